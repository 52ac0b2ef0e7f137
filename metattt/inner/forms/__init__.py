"""The exact forms of one compute chunk: gradients at the anchor, predictions for the queries, and the new memory.

| form | how |
|---|---|
| `primal` | per-token gradients and per-token weights, token by token: the oracle |
| `dual` | one backward pass gives every token's output gradients; queries read through matmuls of them |
| `summed` | the gradient of a weighted sum of losses: for reads without per-token weights; any function of them |

Two forms differ from `dual` in how they compute the gradients: `solved`, where an online rule is a triangular system,
and `mixed`, for learners that mix tokens. Each is a function of `InnerLoop`
(`metattt.inner.loop`) and of the chunk's tokens.
"""

from __future__ import annotations

from metattt.inner.forms import dual, mixed, primal, solved, summed

FORMS = {
    "primal": primal.chunk,
    "dual": dual.chunk,
    "solved": solved.chunk,
    "mixed": mixed.chunk,
    "summed": summed.chunk,
}
"""`chunk(loop, tokens, memory, phase, read)`: predictions `[B, H, n, d]` for the rows `read` (None: none), and the
memory after them."""

SHARE = ("dual", "summed")
"""Forms that compute pairs shared by several tokens only once (`dual.band_of`)."""
