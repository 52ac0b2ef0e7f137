"""Mamba, Mamba-2 and Longhorn: against the published mixers, derivatives, long decays, memory. (Their equations:
`test_layer_table`; the laws that every layer obeys: `test_whole_layers`.)"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from saved import SavedBytes
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck

import metattt
from metattt.mixers import Longhorn, Mamba, Mamba2, Mixer
from metattt.mixers.chunks import by_chunks
from metattt.mixers.duality import duality
from metattt.mixers.longhorn import implicit
from metattt.mixers.scan import doubling, one_by_one
from metattt.testing.specimen import randomize

NAMES = ["longhorn", "mamba", "mamba2_mixer"]
SMALL = {"longhorn": ["layer.d_state=3"], "mamba": ["layer.d_state=3"], "mamba2_mixer": ["layer.d_state=5"]}
EXACT: dict[str, float] = {"rtol": 1e-9, "atol": 1e-11}


def make(name: str, *overrides: str) -> Mixer:
    layer = metattt.build(f"layer={name}", "dim=8", "num_heads=2", *SMALL[name], *overrides).double()
    randomize(layer)
    assert isinstance(layer, Mixer)
    return layer


def tokens(length: int = 21, batch: int = 2) -> Tensor:
    return torch.randn(batch, length, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def worst(found: Tensor, wanted: Tensor) -> float:
    return ((found - wanted).norm() / wanted.norm()).item()


@pytest.mark.parametrize("name", ["longhorn", "mamba"])
def test_the_scan_of_other_devices(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = make(name, "layer.chunk_size=8"), tokens()
    expected = layer(x)[0]
    monkeypatch.setattr("metattt.mixers.scan.one_by_one", doubling)
    torch.testing.assert_close(layer(x)[0], expected, **EXACT)


@pytest.mark.parametrize("name", NAMES)
def test_derivatives(name: str) -> None:
    """By finite differences, and once more: what is computed again can be differentiated again."""
    layer, x = make(name, "layer.chunk_size=2", "layer.expand=1"), tokens(5, 1).requires_grad_()
    parameters = dict(layer.named_parameters())

    def call(x: Tensor, *values: Tensor) -> Tensor:
        named = dict(zip(parameters, values, strict=True))
        y: Tensor = torch.func.functional_call(layer, named, (x,))[0]
        return y

    given = (x, *(p.detach().clone().requires_grad_() for p in parameters.values()))
    assert gradcheck(call, given, fast_mode=True) and gradgradcheck(call, given, fast_mode=True)


@pytest.mark.parametrize("name", NAMES)
def test_in_transforms(name: str) -> None:
    layer, x = make(name, "layer.chunk_size=4"), tokens().requires_grad_()
    expected = torch.autograd.grad(layer(x)[0].square().sum(), x)[0]
    torch.testing.assert_close(torch.func.grad(lambda t: layer(t)[0].square().sum())(x), expected, **EXACT)
    each = torch.vmap(lambda t: layer(t.unsqueeze(0))[0].squeeze(0))(x)
    torch.testing.assert_close(each, layer(x)[0], **EXACT)


def test_against_the_mixers_of_transformers() -> None:
    """Their pure torch paths, with our weights under the published names, in float32: to 1e-5."""
    transformers = pytest.importorskip("transformers")
    from transformers.models.mamba.modeling_mamba import MambaMixer
    from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

    sizes = {"hidden_size": 32, "vocab_size": 8, "num_hidden_layers": 1}
    one = transformers.MambaConfig(**sizes, state_size=16)
    two = transformers.Mamba2Config(**sizes, state_size=24, head_dim=16, num_heads=4, n_groups=2, chunk_size=16)
    pairs: list[tuple[Mixer, nn.Module]] = [
        (Mamba(32), MambaMixer(one, 0)),
        (Mamba2(32, 2, d_state=24, ngroups=2), Mamba2Mixer(two, 0)),
    ]
    x = torch.randn(2, 70, 32, generator=torch.Generator().manual_seed(0))
    for ours, theirs in pairs:
        with torch.no_grad():
            for parameter in ours.parameters():
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2)))
        theirs.load_state_dict(ours.state_dict())
        expected = theirs.eval()(x)
        assert worst(ours(x)[0], expected) < 1e-5


def test_initial_values() -> None:
    torch.manual_seed(0)
    one, two, three = Mamba(64), Mamba2(64, 4), Longhorn(64)
    assert torch.equal(one.A_log[5], torch.arange(1, 17).log()) and one.A_log.shape == (128, 16)
    for bias in (one.dt_proj.bias, two.dt_bias):
        steps = nn.functional.softplus(bias)
        assert steps.min() > 0.00099 and steps.max() < 0.1001
    assert 0.003 < nn.functional.softplus(one.dt_proj.bias).log().mean().exp() < 0.03  # the middle of the logarithms
    assert one.rank == 4 and 0.4 < one.dt_proj.weight.abs().max() <= 0.5
    assert two.heads == 8 and two.A_log.min() >= 0 and two.A_log.max() <= torch.tensor(16.0).log()
    assert not three.dt_head.bias.any() and "A_log" not in dict(three.named_parameters())
    for layer in (one, two, three):
        assert bool((layer.D == 1).all()) and 0.45 < layer.conv1d.weight.abs().max() <= 0.5


@pytest.mark.parametrize("name", NAMES)
def test_the_size_of_a_state(name: str) -> None:
    layer = make(name)
    state = layer(tokens(10))[1]
    assert {key: value.shape[1:] for key, value in state.learner.items()} == layer.carried
    assert state.nbytes == sum(value.nbytes for value in state.learner.values()) + state.pos.nbytes
    assert all(value.untyped_storage().nbytes() == value.nbytes for value in layer(tokens(200))[1].learner.values())


# -- numbers and memory ------------------------------------------------------------------------------------------------


def decays(shape: tuple[int, ...]) -> Tensor:
    """In turn: at random, 1e-4, 1, 0, and 512 tokens of each."""
    generator = torch.Generator().manual_seed(0)
    length = shape[1]
    a = torch.rand(shape, generator=generator, dtype=torch.float64)
    for start in range(0, length, 2048):
        a[:, start + 512 : start + 1024] = 1e-4
        a[:, start + 1024 : start + 1536] = 1
    a[:, ::97] = 1e-4
    a[:, 1300::701] = 0
    return a


def test_decays_over_4096_tokens() -> None:
    """In float32 against float64 of the same numbers, outputs and gradients."""
    generator = torch.Generator().manual_seed(1)

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    def error(call: Callable[..., tuple[Tensor, Tensor]], *given: Tensor) -> float:
        runs = []
        for dtype in (torch.float32, torch.float64):
            leaves = [one.to(dtype).requires_grad_() for one in given]
            y, last = call(*leaves)
            runs.append([y, last, *torch.autograd.grad(y.square().sum() + last.sum(), leaves)])
        assert bool(runs[0][0].isfinite().all())
        return max(worst(x.double(), wanted) for x, wanted in zip(*runs, strict=True))

    a, log = decays((1, 4096, 6, 4)).float(), decays((1, 4096, 3)).float().log()
    for way in (one_by_one, doubling):

        def step(h: Tensor, q: Tensor, a: Tensor, b: Tensor, way: Any = way) -> tuple[Tensor, Tensor]:
            states, last = way(a.transpose(0, 1), b.transpose(0, 1), h)
            return (states.transpose(0, 1) @ q.unsqueeze(-1)).squeeze(-1), last

        def scanned(a: Tensor, b: Tensor, q: Tensor, step: Any = step) -> tuple[Tensor, Tensor]:
            return by_chunks(step, a.new_zeros(1, 6, 4), (q, a, b), (), 64, None)

        assert error(scanned, a, noise(1, 4096, 6, 4), noise(1, 4096, 4)) < 1e-6

    def multiplied(x: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        return duality(x, log.to(x.dtype), b, c, x.new_zeros(1, 3, 4, 5), None, 64, None)

    assert error(multiplied, noise(1, 4096, 3, 4), noise(1, 4096, 1, 5), noise(1, 4096, 1, 5)) < 1e-6


def test_longhorn_never_forgets_more_than_all() -> None:
    """Decays stay in [0, 1] for keys of any size, and Δ keeps the regression's own step."""
    k = torch.randn(7, 3, 4, dtype=torch.float64) * 10.0 ** torch.arange(-3, 4).view(7, 1, 1)
    beta, v = torch.rand(2, 7, 3, 5, dtype=torch.float64)
    a, b = implicit(beta, v, k)
    assert bool(((a >= 0) & (a <= 1)).all()) and bool(b.isfinite().all())
    one = implicit(beta[..., :1], v[..., :1], k[..., :1])  # one key feature: the diagonal is all of k kᵀ
    s = torch.randn(7, 3, 1, 1, dtype=torch.float64)
    solved = (s + (beta * v)[..., :1, None] * k[..., :1, None]) / (1 + beta[..., :1, None] * k[..., :1, None].square())
    torch.testing.assert_close(one[0] * s + one[1], solved, **EXACT)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_kept_for_the_backward_pass(name: str) -> None:
    """Numbers of O(T D), and a memory for every chunk: less than a third of what storing everything takes."""
    kept = {}
    for group in ("null", "0"):
        layer = metattt.build(f"layer={name}", "dim=32", "num_heads=1", f"layer.group_size={group}")
        with SavedBytes() as saved:
            y = layer(torch.randn(1, 1024, 32))[0]
        kept[group] = saved.now if y.requires_grad else 0
    assert 3 * kept["null"] < kept["0"] if name != "mamba2_mixer" else kept["null"] < kept["0"]
