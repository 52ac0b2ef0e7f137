"""The exact forms of one compute chunk: gradients at the anchor, predictions for the queries, and the new memory.

| form | how |
|---|---|
| `primal` | per-token gradients and per-token weights, token by token: the oracle |
| `dual` | one backward pass gives every token's output gradients; queries read through matmuls of them |
| `summed` | the gradient of a weighted sum of losses: for reads without per-token weights; any function of them |

Three forms compute the gradients of `dual` in another way: `solved`, where an online rule is a triangular system;
`chunks`, the same for many chunks at once, for rules without momentum; and `mixed`, for learners that mix tokens.
"""

from __future__ import annotations

from metattt.inner.forms import chunks, dual, mixed, primal, solved, summed

FORMS = {
    "primal": primal.chunk,
    "dual": dual.chunk,
    "solved": solved.chunk,
    "chunks": chunks.chunk,
    "mixed": mixed.chunk,
    "summed": summed.chunk,
}
"""`chunk(loop, tokens, memory, phase, read)`: predictions `[B, H, n, d]` for the rows `read` (None: none), and the
memory after them."""

SHARE = ("dual", "summed")
"""Forms that compute pairs shared by several tokens only once (`dual.band_of`)."""
