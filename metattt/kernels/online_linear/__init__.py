"""Online rules of a linear map: C++ on the CPU where there is a compiler; elsewhere the solved form computes them."""

from metattt.kernels.base import register_kernel
from metattt.kernels.online_linear.native import NativeOnlineDot, NativeOnlineLinear

for kernel in (NativeOnlineLinear, NativeOnlineDot):
    register_kernel(kernel)
