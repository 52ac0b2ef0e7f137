"""Settings that a component declares: the constructor, the checks and the text that come from one line each."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any, Literal

import pytest
import torch
from torch import nn

from metattt import MetaTTTError, TTTLayer, build
from metattt.composition.signatures import constructor
from metattt.declared import Declared
from metattt.learners import Learner, Linear, Weight
from metattt.optimizers import GradientDescent, InnerOptimizer
from metattt.setting import setting
from metattt.tasks import Reconstruction


class Sized(Learner):
    """A plain attribute and an annotation beside settings."""

    residual = True
    plain = 3
    noted: int
    size: int = setting()
    kind: Literal["a", "b"] = setting(default="a")
    share: float | None = setting(default=None, above=0, below=1, advice=", or null")
    last: bool = setting(default=False, kw_only=True)

    def weights(self, d_in: int, d_out: int) -> dict[str, Weight]:
        return {"w": Weight((d_in, d_out))}


class Narrow(Sized, takes=("kind", "size")):
    """Other defaults, fewer settings, another order."""

    kind = "b"
    size = 2


def names(kind: type) -> list[str]:
    return list(inspect.signature(kind).parameters)


def test_the_constructor_follows_the_lines() -> None:
    assert names(Sized) == ["size", "kind", "share", "residual", "norm", "learn_init", "last", "trainable", "step_scale"]
    assert names(Narrow) == ["kind", "size", "trainable", "step_scale"]
    made = Sized(2, "b", None, False)
    assert (made.size, made.kind, made.residual, made.plain) == (2, "b", False, 3) and not hasattr(made, "noted")
    assert (Narrow().kind, Narrow().size, Narrow().share, Narrow().residual) == ("b", 2, None, True)
    assert made.extra_repr() == "size=2, kind='b', residual=False" and Narrow("a").extra_repr() == "kind='a'"
    for part in (copy.copy(made), copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert part.extra_repr() == made.extra_repr() and part.size == 2
    for cls, arguments, said in (
        (Sized, {}, "'size'"), (Sized, {"size": 1, "sise": 2}, "'sise'"), (Sized, {"size": 1, "plain": 2}, "setting: `plain: <type> = "),
        (Narrow, {"share": 0.5}, "'share'$"), (Sized, {"size": 1, "train": 2}, "Did you mean trainable.$"),
    ):  # fmt: skip
        with pytest.raises(TypeError, match=rf"{cls.__name__}.__init__\(\) .*{said}"):
            cls(**arguments)


class Plain(Linear, takes=("bias",)):
    """A setting by the name that its constructor has for it."""

    bias = False


class Dot(Reconstruction):
    """The same for one that is called as a method is."""

    loss = "dot"


def test_a_default_by_the_name_of_the_constructor() -> None:
    assert names(Plain) == ["bias", "trainable", "step_scale"] and not Plain().with_bias and Plain(bias=True).with_bias
    layer = TTTLayer(8, 2, Dot(), Plain(), GradientDescent())
    assert layer.task.loss_name == "dot" and callable(layer.task.loss) and "b1" not in layer.learner.shapes
    assert Dot("shared_qk", loss="cosine").loss_name == "cosine"
    read = {one.name: one.default for one in constructor(__name__, "Plain")}
    assert read == {one.name: one.default for one in list(inspect.signature(Plain.__init__).parameters.values())[1:]}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"size": 0}, "learner.size=0 is not allowed: it must be at least 1"),
        ({"size": "2"}, "learner.size='2' is not allowed: it must be an integer, at least 1"),
        ({"kind": "c"}, "learner.kind=c is not allowed: choose from a, b."),
        ({"share": 1}, "learner.share=1 is not allowed: it must be above 0 and below 1, or null"),
        ({"last": 1}, "learner.last=1 is not allowed: it must be true or false"),
    ],
)
def test_a_value_that_is_not_allowed(given: dict[str, Any], message: str) -> None:
    with pytest.raises(MetaTTTError) as raised:
        Sized(**{"size": 1, **given})
    assert str(raised.value) == message


@pytest.mark.parametrize(
    ("name", "key", "value"), [("attention", "kernel", "c"), ("mesa_net", "iterations", 0), ("ttt_mlp", "activation", "c")]
)
def test_a_value_that_is_assigned_to_a_learner_is_checked_in_the_next_call(name: str, key: str, value: Any) -> None:
    layer, x = build(name, dim=16, num_heads=2), torch.ones(1, 3, 16)
    before = getattr(layer.learner, key)
    setattr(layer.learner, key, value)
    with pytest.raises(MetaTTTError, match=f"learner.{key}={value} is not allowed"):
        layer(x)
    setattr(layer.learner, key, before)
    layer(x)


def test_a_value_in_the_place_of_a_method_is_refused_in_a_built_layer() -> None:
    with pytest.raises(MetaTTTError, match="sets an attribute called 'loss', which Task has for its own use"):
        build("ttt_linear", dim=16, num_heads=2).task.loss = "dot"  # the setting is loss_name


def test_no_graph_of_a_learner_that_keeps_its_data_plans_again(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = build("attention", dim=16, num_heads=2), torch.randn(1, 3, 16)
    layer.learner.window, plan = 2, layer._plan
    with monkeypatch.context() as patch:
        patch.setattr(torch.compiler, "is_compiling", lambda: True)
        y = layer(x)[0]
    assert layer._plan is plan
    torch.testing.assert_close(layer(x)[0], y)


def test_a_class_that_is_written_after_torch_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which wraps the constructor of modules for the whole process."""
    plain = nn.Module.__init__
    monkeypatch.setattr(nn.Module, "__init__", lambda self, *args, **options: plain(self, *args, **options))
    for base in (Declared, Sized, Linear):
        late = type("Late", (base,), {"__annotations__": {"more": int}, "more": setting(default=3, kw_only=True)})
        given = {"size": 2} if base is Sized else {}
        assert late(**given).more == 3 and late(**given, more=4).more == 4


def test_a_constructor_of_ones_own_takes_what_every_learner_has() -> None:
    class Mixin:
        def __init__(self, depth: int = 1):
            super().__init__()
            self.depth = depth

    class Mine(Linear):
        residual = False

        def __init__(self, depth: int = 1):
            super().__init__(bias=False)
            self.depth = depth

    class Below(Mine): ...

    class Mixed(Mixin, Linear): ...

    for kind in (Mine, Below, Mixed):
        made = kind(2, trainable=["w1"], step_scale=0.5)  # type: ignore[call-arg]
        assert names(kind) == ["depth", "trainable", "step_scale"] and made.trainable == ["w1"]
        assert made.depth == 2 and made.extra_repr() == "depth=2, trainable=['w1'], step_scale=0.5"
        assert made.residual == (kind is Mixed)
    assert names(nn.Linear) and "trainable" not in names(InnerOptimizer)
    with pytest.raises(MetaTTTError, match="Late declares more, and inherits an __init__ that does not take them"):
        type("Late", (Mine,), {"more": setting(default=1)})
