"""The algebra of a chunk of tokens that forms, learners, inner optimizers and mixers share: functions of tensors."""

from metattt.ops.channel_decays import Rows, decayed_scores
from metattt.ops.chunk import (
    chunk_read,
    chunk_state,
    decay_matrix,
    decays,
    decays_of_logs,
    matmul,
    running_sum,
    solve_unit_lower,
)

__all__ = [
    "Rows",
    "chunk_read",
    "chunk_state",
    "decay_matrix",
    "decayed_scores",
    "decays",
    "decays_of_logs",
    "matmul",
    "running_sum",
    "solve_unit_lower",
]
