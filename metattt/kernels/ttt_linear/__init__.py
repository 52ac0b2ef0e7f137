"""TTT-Linear: C++ on the CPU, where there is a compiler, and Triton on a GPU."""

from metattt.kernels.operator import register_operators
from metattt.kernels.ttt_linear.native import NativeTTTLinear
from metattt.kernels.ttt_linear.on_gpu import TTTLinearOnGPU

register_operators("ttt_linear", (NativeTTTLinear, TTTLinearOnGPU))
