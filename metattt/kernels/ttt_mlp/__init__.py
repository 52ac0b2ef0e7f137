"""TTT-MLP: closed form on the CPU, Triton on the GPU."""

from metattt.inner.fused import register_kernel
from metattt.kernels.ttt_mlp.closed_form import TTTMLP
from metattt.kernels.ttt_mlp.on_gpu import TTTMLPOnGPU

register_kernel(TTTMLP)
register_kernel(TTTMLPOnGPU)
