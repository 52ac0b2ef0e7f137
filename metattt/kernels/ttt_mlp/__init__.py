"""TTT-MLP: C++ where there is a compiler and batched products elsewhere on the CPU, Triton on the GPU."""

from metattt.kernels.base import register_kernel
from metattt.kernels.operator import register_decode, register_operator
from metattt.kernels.ttt_mlp.closed_form import TTTMLP
from metattt.kernels.ttt_mlp.native import NativeTTTMLP
from metattt.kernels.ttt_mlp.on_gpu import TTTMLPOnGPU

KERNELS = NativeTTTMLP, TTTMLP, TTTMLPOnGPU  #: the first that takes a call is used
for kernel in KERNELS:
    register_kernel(kernel)
register_operator("ttt_mlp", KERNELS)
register_decode("ttt_mlp", (NativeTTTMLP, TTTMLPOnGPU))
