"""The laws of every component, each a function from a test layer to its worst error, and the table of their bounds."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from metattt.errors import MetaTTTError
from metattt.layer import TTTLayer
from metattt.nested import tensors_of
from metattt.optimizers.block import BlockRule
from metattt.state import State
from metattt.testing.padding import alone, masks, packing
from metattt.testing.rounding import FACTOR, forms_in, loss_of_the_oracle, precision, sensitivity
from metattt.testing.sharing import aliasing, threads
from metattt.testing.specimen import (
    Found,
    NotApplicable,
    Specimen,
    compare,
    cotangent,
    difference_error,
    distance,
    run,
    state_distance,
)

MEANINGLESS = 0.5  # a relative error above this bound means nothing


@dataclass(frozen=True)
class Law:
    """A law about the worst relative error on a specimen.

    Attributes:
        name: in `LAWS`.
        title: its name in the table.
        worst_error: of a specimen.
        bound: of the error.
        reason: how much the problem itself amplifies rounding, with an explanation (`metattt.testing.rounding`). Called
            if the error is above the bound; then the bound is `FACTOR` times this value. None: the bound is fixed.
    """

    name: str
    title: str
    worst_error: Callable[[Specimen], float]
    bound: float
    reason: Callable[[Specimen], tuple[float, str]] | None = None

    def judge(self, spec: Specimen) -> Found:
        """Examines a specimen.

        Raises:
            NotApplicable: the law does not apply to it.
        """
        _takes_any_length(spec.sample)
        error = self.worst_error(spec)
        if not math.isfinite(error):
            return Found(error, self.bound, _diverged(spec), True)
        if error <= self.bound or self.reason is None:
            return Found(error, self.bound, "", not error <= self.bound)
        measured, words = self.reason(spec)
        if not FACTOR * measured < MEANINGLESS:
            raise NotApplicable(f"{words}: a wrong result would not be noticed (error {error:.1e})")
        if FACTOR * measured <= self.bound:
            return Found(error, self.bound, f"{words}, which explains no more than the usual bound", True)
        bound = FACTOR * measured
        return Found(error, bound, f"{words}, {FACTOR:.0f} times that is allowed", not error <= bound)


def _diverged(spec: Specimen) -> str:
    """What explains an infinite error, if outputs are not finite."""
    with torch.no_grad():
        finite = spec.sample(spec.tokens(extra=32))[0].isfinite().all()
    return "" if finite else "outputs are not finite: the inner loop diverges"


def groups(spec: Specimen) -> float:
    """Recomputed mini-batches, one or two together, give the same gradients as stored ones."""
    found, x = spec.forms(), spec.tokens()
    if not found:
        raise NotApplicable("the learner keeps its data and recomputes nothing")
    worst = 0.0
    for form in found:
        stored = run(spec.make(form=form, group_size=0), x, grads=True)
        again = [run(spec.make(form=form, group_size=size), x, grads=True) for size in (1, 2)]
        worst = max(worst, *(compare(one, stored) for one in again))
    return worst


def derivatives(spec: Specimen) -> float:
    """Gradients of the reference against central differences, along one direction for the tokens and one for each
    parameter."""
    found = spec.forms()
    layer, x = spec.make(form=found[0] if found else None), spec.tokens(batch=1, extra=1)
    leaves = {"x": x} | dict(layer.named_parameters())
    expected = run(layer, x, grads=True).grads
    return difference_error(lambda: run(layer, x).y, [leaves[name] for name in expected], list(expected.values()))


def splits(spec: Specimen) -> float:
    """Splitting a sequence anywhere gives the outputs, gradients and final state of one call."""
    layer = spec.sample
    if not layer.learner.streams:
        raise NotApplicable(f"{type(layer.learner).__name__} treats every call by itself, without a state")
    if layer.optimizer.read in ("block", "final"):
        raise NotApplicable(f"optimizer.read={layer.optimizer.read} shows a query tokens that come after it")
    x = spec.tokens()
    whole = run(layer, x, grads=True)
    length, size = x.shape[1], layer.optimizer.mini_batch_size
    worst = 0.0
    for cuts in (
        list(range(1, length)),  # one token at a time
        list(range(size + 2, length)),  # prefill, then decode
        sorted({1, 3, size + 1, size + 2, length - 2} & set(range(1, length))),  # ragged
        list(range(size, length, size)),
    ):
        parts = run(layer, x, cuts, grads=True)
        worst = max(worst, compare(parts, whole), state_distance(layer, parts.state, whole.state))
    return worst


def causality(spec: Specimen) -> float:
    """`∂y_t/∂x_s = 0` for s > t, exactly, and the outputs up to t do not change with the tokens after t."""
    layer = spec.sample
    if not layer.causal:
        found = [type(part).__name__ for part in (layer.task, layer.learner) if not part.causal]
        found += [] if layer.optimizer.causal else [f"optimizer.read={layer.optimizer.read}"]
        raise NotApplicable(f"{' and '.join(found)} is not causal")
    x = spec.tokens().requires_grad_()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        y, _ = layer(x)
    worst = 0.0
    for t in range(x.shape[1] - 1):
        (gradient,) = torch.autograd.grad((y[:, t] * cotangent(y[:, t])).sum(), x, retain_graph=True)
        changed = torch.cat([x[:, : t + 1], 1 - x[:, t + 1 :]], dim=1)
        gap = distance(run(layer, changed).y[:, : t + 1], y[:, : t + 1].detach())
        leak = gradient[:, t + 1 :].abs().max().item()
        worst = max(
            worst, leak if math.isfinite(leak) else math.inf, gap if gap > 1e-12 else 0.0
        )  # the rest is rounding
    return worst


def limits(spec: Specimen) -> float:
    """At τ = 1, mini-batches of one token are online learning, and one mini-batch for all tokens is batch learning."""
    layer = spec.sample
    rule = layer.optimizer
    if not rule.updates:
        raise NotApplicable("the rule has no mini-batches")
    if rule.steps > 1 and rule.read != "final":
        raise NotApplicable(f"optimizer.steps={rule.steps} is defined for mini-batch anchors only")
    if layer.learner.mixes_tokens and rule.read in ("inclusive", "exclusive"):
        raise NotApplicable("weights per token of tokens that mix are defined for mini-batch anchors only")
    if rule.gradient_at == "decayed":
        raise NotApplicable("optimizer.gradient_at=decayed is defined for online anchors only")
    x = spec.tokens()
    start = State(torch.zeros(len(x), dtype=torch.long), 0, {}, {}, {}, {})
    views, gates, *_ = layer.tokens(x, start, layer.call(x, start).ctx)
    if views.erase_key is not None or views.erase_direction is not None or gates.decay is not None:
        raise NotApplicable("an erase view and decays for every channel are defined for online anchors only")
    if views.k.ndim == 5 and not layer.task.together:
        raise NotApplicable("pairs that are learned one after the other are defined for online anchors only")
    worst = 0.0
    cases = [(x.shape[1], "batch"), (x.shape[1] + 3, "batch")]
    if not isinstance(rule, BlockRule):  # one that moves weights once per mini-batch has no online limit
        cases.append((1, "online"))
    for size, anchor in cases:
        one = run(spec.make(mini_batch_size=size, anchor="minibatch", plain=True), x, grads=True)
        other = run(spec.make(mini_batch_size=size, anchor=anchor, plain=True), x, grads=True)
        worst = max(worst, compare(one, other))
    return worst


def round_trips(spec: Specimen) -> float:
    """`state_dict`, deep copies, evaluation mode and saved states give back the same layer and the same state; states
    move between devices."""
    layer = spec.sample
    x = spec.tokens()
    before, cut = run(layer, x), layer.optimizer.mini_batch_size + 1
    fresh = spec.make(seed=4)
    fresh.load_state_dict(layer.state_dict())
    twin = copy.deepcopy(layer).eval()  # what is trained is what is evaluated
    worst = max(distance(run(other, x).y, before.y) for other in (fresh, twin))
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    worst = max(worst, distance(run(layer, x).y, before.y))  # a copy owns its parameters
    if run(twin, x).y.any():
        return math.inf  # the copy still computes with the parameters of the original
    state = run(layer, x[:, :cut]).state
    if not layer.learner.streams:  # a saved state cannot be used
        return worst
    file = io.BytesIO()
    torch.save(state.detach(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    for other in (loaded, copy.deepcopy(state.detach()), state.to("cpu"), state.select(torch.arange(x.shape[0]))):
        worst = max(worst, state_distance(layer, other, state))
    if not isinstance(loaded, State) or not all(x.is_meta for x in tensors_of(state.to("meta"))):
        return math.inf
    return worst


def _takes_any_length(layer: TTTLayer) -> None:
    for count in (1, 3, 7):
        try:
            layer.optimizer.permutation(count, torch.device("cpu"))
        except MetaTTTError as refusal:
            raise NotApplicable(f"the rule accepts calls of some lengths only: {refusal}") from None


LAWS: dict[str, Law] = {
    law.name: law
    for law in (
        Law("forms", "forms agree, float64", partial(forms_in, dtype=torch.float64), 1e-9),
        Law("groups", "recomputed = stored", groups, 1e-9),
        Law("forms_float32", "forms agree, float32", partial(forms_in, dtype=torch.float32), 1e-4, loss_of_the_oracle),
        Law("derivatives", "gradients = finite differences", derivatives, 1e-6),
        Law("splits", "splits agree", splits, 1e-9),
        Law("causality", "no later token is seen", causality, 0.0),
        Law("limits", "b = 1 online, b >= T batch", limits, 1e-9),
        Law("alone", "alone = in a batch", alone, 1e-9),
        Law("masks", "padding changes nothing", masks, 1e-9),
        Law("packing", "packed = separate", packing, 1e-9),
        Law("round_trips", "copies, saved states, eval()", round_trips, 1e-12),
        Law("aliasing", "later calls do not change a state", aliasing, 0.0),
        Law("threads", "threads do not interfere", threads, 1e-9),
        *(
            Law(f"precision_{of}", f"bf16 {of}", partial(precision, of=of), bound, partial(sensitivity, of=of))
            for of, bound in (("outputs", 2e-2), ("gradients", 5e-2))
        ),
    )
}
