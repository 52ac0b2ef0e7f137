"""The names of torch that are not public and that we need: each stands here once, and a test names them all."""

from __future__ import annotations

import torch
from torch.autograd import forward_ad


def interpreter_stack() -> object | None:
    """The innermost transform (`torch.func`'s vmap, grad, jvp; a level of `torch.autograd.forward_ad`) that is running;
    None outside of all."""
    if forward_ad._current_level >= 0:
        return forward_ad._current_level
    return torch._C._functorch.peek_interpreter_stack()


saved_tensor_hooks = torch._C._autograd._top_saved_tensors_default_hooks
"""The saved-tensor hooks in force (a checkpoint's, `save_on_cpu`'s), asked with `False`; None if there are none."""
