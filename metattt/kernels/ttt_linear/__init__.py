"""TTT-Linear: C++ on the CPU, where there is a compiler, and Triton on a GPU."""

from metattt.kernels.base import register_kernel
from metattt.kernels.operator import register_operators
from metattt.kernels.ttt_linear.native import NativeTTTLinear
from metattt.kernels.ttt_linear.on_gpu import TTTLinearOnGPU

KERNELS = NativeTTTLinear, TTTLinearOnGPU
for kernel in KERNELS:
    register_kernel(kernel)
register_operators("ttt_linear", KERNELS)
