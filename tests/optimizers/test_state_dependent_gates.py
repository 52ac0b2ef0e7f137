"""Gates that look at the weights of the last commit: every form agrees, and every law of the other rules holds."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

from metattt.errors import MetaTTTError
from metattt.inner.committed import Committed
from metattt.learners import Linear
from metattt.optimizers import BlockMomentum, Gates, GradientDescent, InnerOptimizer, Momentum
from metattt.tasks import Reconstruction
from metattt.testing import LAWS, Specimen

task = partial(Reconstruction, normalize_qk=True)


class Careful(GradientDescent):
    """Smaller steps where the prediction is near the label already."""

    def gates_at(self, gates: Gates, committed: Committed) -> Gates:
        far = (committed.predict(committed.k) - committed.v).square().mean(-1)
        return gates._replace(eta=gates.eta * far / (1 + far))


class Forgetful(Momentum):
    """Forgets where the weights are large; its momentum, too, hangs on the state."""

    def gates_at(self, gates: Gates, committed: Committed) -> Gates:
        assert gates.alpha is not None and gates.beta is not None
        size = sum(w.square().flatten(2).mean(-1) for w in committed.weights.values()).unsqueeze(-1)  # type: ignore[union-attr]
        return gates._replace(alpha=gates.alpha / (1 + size), beta=gates.beta * torch.tanh(committed.losses()))


class Pooled(BlockMomentum):
    def gates_at(self, gates: Gates, committed: Committed) -> Gates:
        assert gates.alpha is not None and gates.weight_lr is not None
        norms = committed.gradient_norms()
        return gates._replace(alpha=gates.alpha * torch.exp(-norms), weight_lr=gates.weight_lr / (1 + norms.unsqueeze(-1)))


OWN: dict[str, Callable[[], InnerOptimizer]] = {
    "token steps": lambda: Careful(4, base_lr=0.5, token_steps="shared"),
    "clipping": lambda: Careful(4, base_lr=0.5, max_norm=0.15),
    "online": lambda: Careful(4, "online", base_lr=0.5),
    "decay and momentum": lambda: Forgetful(4, base_lr=0.3, decay="per_head"),
    "per mini-batch": lambda: Pooled(4, base_lr=0.3, lr="per_weight", decay="per_head", pool="gates"),
}


@pytest.mark.parametrize("name", OWN)
def test_laws_of_ones_own(name: str) -> None:
    spec = Specimen(Linear, task, OWN[name])
    for law in ("forms", "splits", "causality", "masks", "packing", "round_trips"):
        assert LAWS[law].worst_error(spec) <= LAWS[law].bound, law


def test_fast_paths_refuse() -> None:
    assert Specimen(Linear, task, lambda: GradientDescent(4)).make().form == "fused"
    layer = Specimen(Linear, task, lambda: Careful(4)).make()
    assert layer.form == "dual" and "Careful depend on the weights" in layer.plan.reasons["ttt_linear.native"]
    with pytest.raises(MetaTTTError, match=r"layer\.form=fused .*the gates of Careful depend on the weights"):
        Specimen(Linear, task, lambda: Careful(4)).make(form="fused")
    linear = partial(Linear, residual=False, norm=False, bias=False)
    assert Specimen(linear, task, lambda: GradientDescent(4, "online")).make().plan.solved
    online = Specimen(linear, task, lambda: Careful(4, "online")).make()
    assert online.plan.form == "dual" and "depend on the weights" in online.plan.reasons["solved"]
    assert online.optimizer.slots == ("commit", "weights") and online.optimizer.period == 4


def test_gates_that_come_from_nowhere() -> None:
    class Surprising(GradientDescent):
        def gates_at(self, gates: Gates, committed: Committed) -> Gates:
            return gates._replace(alpha=torch.full_like(gates.eta, 0.5))

    layer = Specimen(Linear, task, lambda: Surprising(4)).make()
    with pytest.raises(MetaTTTError, match=r"gates_at must return the gates that it was given, and alpha was not"):
        layer(torch.zeros(1, 5, 8, dtype=torch.float64))
