"""TTT-MLP: C++ on the CPU, where there is a compiler, and Triton on a GPU."""

from metattt.kernels.operator import register_operators
from metattt.kernels.ttt_mlp.native import NativeTTTMLP
from metattt.kernels.ttt_mlp.on_gpu import TTTMLPOnGPU

register_operators("ttt_mlp", (NativeTTTMLP, TTTMLPOnGPU))
