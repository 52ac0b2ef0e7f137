"""TTT-Linear: closed form on the CPU."""

from metattt.inner.fused import register_kernel
from metattt.kernels.ttt_linear.closed_form import TTTLinear

register_kernel(TTTLinear)
