"""The names of torch that are not public and that we need: each stands here once, and a test names them all."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack as outside_transforms  # noqa: F401
from torch._subclasses.fake_tensor import FakeTensor  # noqa: F401 - has a shape and a device, and no values
from torch.utils import _pytree as pytree  # walks nested tuples and dictionaries

interpreter_stack = torch._C._functorch.peek_interpreter_stack
"""The innermost `torch.func` transform (vmap, grad, jvp) that is running; None outside of all."""


fake_mode = partial(torch._C._get_dispatch_mode, torch._C._TorchDispatchModeKey.FAKE)
"""The `FakeTensorMode` in force, in which tensors have no numbers; None outside of all."""


dispatch_modes, function_modes = torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack
"""The numbers of modes in force that see every operation: that count or trace, or whose tensors have no numbers."""


is_many = torch._C._functorch.is_legacy_batchedtensor
"""Whether a tensor stands for many, as in `torch.autograd.grad(..., is_grads_batched=True)`."""


def for_torch(*cotangents: Tensor | None) -> bool:
    """Whether a backward pass is for torch: someone differentiates it once more, or takes many at once."""
    many = any(dy is not None and is_many(dy) for dy in cotangents)
    return many or torch.is_grad_enabled() or interpreter_stack() is not None


saved_tensor_hooks = torch._C._autograd._top_saved_tensors_default_hooks
"""The saved-tensor hooks in force (a checkpoint's, `save_on_cpu`'s), asked with `False`; None if there are none."""


register_namedtuple = pytree._register_namedtuple
"""Gives a named tuple the name that files of `torch.export.save` call it by."""
