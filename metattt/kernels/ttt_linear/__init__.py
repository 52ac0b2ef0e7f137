"""TTT-Linear: C++ where there is a compiler and batched products elsewhere on the CPU, Triton on the GPU."""

from metattt.kernels.base import register_kernel
from metattt.kernels.operator import register_decode, register_operator
from metattt.kernels.ttt_linear.closed_form import TTTLinear
from metattt.kernels.ttt_linear.native import NativeTTTLinear
from metattt.kernels.ttt_linear.on_gpu import TTTLinearOnGPU

KERNELS = NativeTTTLinear, TTTLinear, TTTLinearOnGPU  #: the first that takes a call is used
for kernel in KERNELS:
    register_kernel(kernel)
register_operator("ttt_linear", KERNELS)
register_decode("ttt_linear", (NativeTTTLinear, TTTLinearOnGPU))
