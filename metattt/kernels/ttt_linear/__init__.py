"""TTT-Linear: closed form on the CPU, Triton on the GPU."""

from metattt.inner.fused import register_kernel
from metattt.kernels.ttt_linear.closed_form import TTTLinear
from metattt.kernels.ttt_linear.on_gpu import TTTLinearOnGPU

register_kernel(TTTLinear)
register_kernel(TTTLinearOnGPU)
