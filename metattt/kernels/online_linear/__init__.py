"""Online rules of a linear map: C++ on the CPU where there is a compiler, flash-linear-attention on a GPU where it is
installed and agrees; elsewhere the solved form."""

from metattt.kernels.base import register_kernel
from metattt.kernels.online_linear.by_fla import FlaOnlineDot, FlaOnlineLinear
from metattt.kernels.online_linear.native import NativeOnlineDot, NativeOnlineLinear

for kernel in (NativeOnlineLinear, NativeOnlineDot, FlaOnlineLinear, FlaOnlineDot):
    register_kernel(kernel)
