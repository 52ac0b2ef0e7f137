"""What is wrong with token ids of a call that has failed. Nothing here is asked while calls succeed."""

from __future__ import annotations

import torch
from torch import Tensor

from metattt.errors import MetaTTTError

FAILURES = (RuntimeError, TypeError, AttributeError, KeyError, IndexError)
"""What torch and Python raise for inputs of the wrong kind."""


def require_ids(ids: object, vocab_size: int, name: str = "ids") -> None:
    """Refuses what are no token ids.

    Raises:
        MetaTTTError: no tensor `[B, T]` of integers with T ≥ 1, or one with ids outside of the vocabulary.
    """
    if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.shape[1] == 0:
        shown = f"of shape {list(ids.shape)}" if isinstance(ids, Tensor) else f"a {type(ids).__name__}"
        raise MetaTTTError(f"{name} are token ids [B, T] with T >= 1, not {shown}")
    if ids.dtype not in (torch.int64, torch.int32):
        raise MetaTTTError(f"{name} are {ids.dtype}, expected integers: convert them with {name}.long()")
    if ids.numel() and not 0 <= (least := int(ids.min())) <= (most := int(ids.max())) < vocab_size:
        wrong = least if least < 0 else most
        raise MetaTTTError(f"{name} hold {wrong}, and the model's vocabulary has 0 to {vocab_size - 1}")
