"""The laws about rounding, and how much a problem itself amplifies rounding: the reason for a wider bound.

Two measures, neither of which uses the code under test:

- float32: the error of the reference in float32 against float64 (Newton-Schulz iterations amplify the rounding of small
singular values hundreds of times, in any implementation). Another form may lose `FACTOR` times as much.
- bfloat16: how far the float32 result moves when tokens, parameters and what a mini-batch adds to the weights (one
  rounding of it is allowed, where a matmul has no float32 output) are rounded to bfloat16, the least that autocast
  does. A sign, a nearest neighbour or the first steps of Adam may flip under rounding. A layer under autocast rounds a
  token several times (views, inner predictions, reads), so its error may be `FACTOR` times that.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from metattt.layer import TTTLayer
from metattt.optimizers.base import InnerOptimizer
from metattt.state import Tensors
from metattt.testing.specimen import NotApplicable, Run, Specimen, compare, run

FACTOR = 4.0
DRAWS = 3  # of a rounding; the worst counts


def forms_in(spec: Specimen, dtype: torch.dtype) -> float:
    """Every form against the reference, also if a sequence is split."""
    found = spec.forms(dtype)
    if not found:
        raise NotApplicable("the learner keeps its data and has one form")
    x = spec.tokens(dtype=dtype)
    cuts = _cuts(spec)
    oracle = run(spec.make(form=found[0], dtype=dtype), x, cuts, grads=True)
    others = [run(spec.make(form=form, dtype=dtype), x, cuts, grads=True) for form in found[1:]]
    return max((compare(other, oracle) for other in others), default=0.0)


def loss_of_the_oracle(spec: Specimen) -> tuple[float, str]:
    """The error of the reference in float32, measured as in `forms_in`, with an explanation."""
    form, cuts = spec.forms()[0], _cuts(spec)
    single = spec.make(form=form, dtype=torch.float32)
    double = spec.make(form=form)
    double.load_state_dict(single.state_dict())  # the same numbers
    worst = 0.0
    for seed in range(DRAWS):
        x = _rounded(spec.tokens(dtype=torch.float32), torch.float32, torch.Generator().manual_seed(seed))
        exact = run(double, x.double(), cuts, grads=True)
        exact = Run(exact.y.float(), exact.state, {name: gradient.float() for name, gradient in exact.grads.items()})
        worst = max(worst, compare(run(single, x, cuts, grads=True), exact))
    return worst, f"form={form} itself loses {worst:.1e} in float32"


def precision(spec: Specimen, of: str) -> float:
    """bf16 autocast against fp32, of the `outputs`, or of all `gradients` together: relative Frobenius error; the
    carried weights stay fp32."""
    layer, x = _wide(spec)
    full = run(layer, x, grads=of == "gradients")
    with torch.autocast("cpu", torch.bfloat16):
        half = run(layer, x, grads=of == "gradients")
    if any(value.dtype != torch.float32 for weights in half.state.weights.values() for value in weights.values()):
        return math.inf
    return _frobenius(half, full, of)


def sensitivity(spec: Specimen, of: str) -> tuple[float, str]:
    """How far rounded tokens and parameters move the `outputs` or `gradients` in float32, with an explanation."""
    layer, x = _wide(spec)
    full, worst = run(layer, x, grads=of == "gradients"), 0.0
    for seed in range(DRAWS):
        moved, _ = _wide(spec)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in moved.parameters():
                parameter.copy_(_rounded(parameter, torch.bfloat16, generator))
        _round_steps(moved.optimizer, generator)
        found = run(moved, _rounded(x, torch.bfloat16, generator), grads=of == "gradients")
        worst = max(worst, _frobenius(found, full, of))
    return worst, f"rounding tokens, parameters and inner steps to bf16 alone moves {of} by {worst:.1e}"


def _round_steps(rule: InnerOptimizer, generator: torch.Generator) -> None:
    """Rounds what a rule commits to bfloat16."""
    commit = rule.commit

    def rounded(memory: dict[str, Tensors], filled: int | Tensor) -> dict[str, Tensors]:
        steps = memory.get("update", {})
        made = {name: _rounded(x, torch.bfloat16, generator) for name, x in steps.items()}
        return commit(memory | {"update": made} if steps else memory, filled)

    rule.commit = rounded  # type: ignore[method-assign]


def _wide(spec: Specimen) -> tuple[TTTLayer, Tensor]:
    """A layer in float32 whose heads are at least 16 wide (narrower ones are nearly singular under a norm), and
    tokens for it."""
    spec = replace(spec, dim=max(spec.dim, 16 * spec.num_heads), longest_mini_batch=16)
    x = torch.randn(2, 40, spec.dim, generator=torch.Generator().manual_seed(5))
    return spec.make(dtype=torch.float32), x


def _rounded(x: Tensor, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """`x` with relative errors like those of rounding to `dtype`: up to half the distance of neighbours."""
    noise = 2 * torch.rand(x.shape, generator=generator, dtype=torch.float64) - 1
    return (x * (1 + torch.finfo(dtype).eps / 2 * noise)).to(x.dtype)


def _frobenius(found: Run, expected: Run, of: str) -> float:
    now, then = (
        one.y.float() if of == "outputs" else torch.cat([gradient.float().flatten() for gradient in one.grads.values()])
        for one in (found, expected)
    )
    error = ((now - then).norm() / then.norm()).item()
    return error if math.isfinite(error) else math.inf


def _cuts(spec: Specimen) -> list[int]:
    # inside a mini-batch: the second call continues with a state
    return [spec.sample.optimizer.mini_batch_size + 2]
