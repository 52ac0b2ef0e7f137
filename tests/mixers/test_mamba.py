"""Mamba, Mamba-2 and Longhorn: against the published mixers, derivatives, long decays, memory. (Their equations:
`test_layer_table`; the laws that every layer obeys: `test_whole_layers`.)"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from saved import SavedBytes
from torch import Tensor, nn

import metattt
from metattt.mixers import Longhorn, Mamba, Mamba2, Mixer
from metattt.mixers.chunks import by_chunks
from metattt.mixers.duality import duality
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


@pytest.mark.parametrize("name", NAMES)
def test_in_transforms(name: str) -> None:
    layer, x = make(name, "layer.chunk_size=4"), tokens().requires_grad_()
    expected = torch.autograd.grad(layer(x)[0].square().sum(), x)[0]
    torch.testing.assert_close(torch.func.grad(lambda t: layer(t)[0].square().sum())(x), expected, **EXACT)
    each = torch.vmap(lambda t: layer(t.unsqueeze(0))[0].squeeze(0))(x)
    torch.testing.assert_close(each, layer(x)[0], **EXACT)


@pytest.mark.parametrize("name", NAMES)
def test_a_layer_made_wider_or_narrower_goes_on_from_its_state(name: str) -> None:
    layer, x = make(name).float(), tokens()
    state = layer(x[:, :9].float())[1]
    wide, after = layer.double()(x[:, 9:], state)
    torch.testing.assert_close(wide, layer(x[:, 9:], state.to(torch.float64))[0], rtol=1e-6, atol=1e-6)
    narrow, last = layer.float()(x.float(), after)
    torch.testing.assert_close(narrow, layer(x.float(), after.to(torch.float32))[0], rtol=0, atol=0)
    assert last.learner["memory"].dtype == torch.float32


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
    """In float32 against float64 of the same numbers, outputs and gradients; `doubling` is the scan of other devices than a CPU."""
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
            scan = way if h.dtype == torch.float32 else one_by_one
            states, last = scan(a.transpose(0, 1), b.transpose(0, 1), h)
            return (states.transpose(0, 1) @ q.unsqueeze(-1)).squeeze(-1), last

        def scanned(a: Tensor, b: Tensor, q: Tensor, step: Any = step) -> tuple[Tensor, Tensor]:
            return by_chunks(step, a.new_zeros(1, 6, 4), (q, a, b), (), 64, None)

        assert error(scanned, a, noise(1, 4096, 6, 4), noise(1, 4096, 4)) < 1e-6

    def multiplied(x: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        return duality(x, log.to(x.dtype), b, c, x.new_zeros(1, 3, 4, 5), None, 64, None)

    assert error(multiplied, noise(1, 4096, 3, 4), noise(1, 4096, 1, 5), noise(1, 4096, 1, 5)) < 1e-6


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
