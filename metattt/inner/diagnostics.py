"""Explains why a call failed on its token ids. Runs only after a call has failed."""

from __future__ import annotations

import torch
from torch import Tensor

from metattt.errors import MetaTTTError

FAILURES = (RuntimeError, TypeError, AttributeError, KeyError, IndexError)
"""What torch and Python raise for inputs of the wrong kind."""


def require_ids(ids: object, vocab_size: int, name: str = "ids") -> None:
    """Raises an error if these are not token ids.

    Raises:
        MetaTTTError: not a tensor `[B, T]` of integers with T ≥ 1, or ids outside the vocabulary.
    """
    if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.shape[1] == 0:
        shown = f"of shape {list(ids.shape)}" if isinstance(ids, Tensor) else f"a {type(ids).__name__}"
        raise MetaTTTError(f"{name} are token ids [B, T] with T >= 1, not {shown}")
    if ids.dtype not in (torch.int64, torch.int32):
        raise MetaTTTError(f"{name} are {ids.dtype}, expected integers: convert them with {name}.long()")
    if ids.numel() and not 0 <= (least := int(ids.min())) <= (most := int(ids.max())) < vocab_size:
        wrong = least if least < 0 else most
        raise MetaTTTError(f"{name} hold {wrong}, and the model's vocabulary has 0 to {vocab_size - 1}")
