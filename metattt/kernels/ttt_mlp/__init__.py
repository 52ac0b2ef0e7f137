"""TTT-MLP: closed form on the CPU."""

from metattt.inner.fused import register_kernel
from metattt.kernels.ttt_mlp.closed_form import TTTMLP

register_kernel(TTTMLP)
