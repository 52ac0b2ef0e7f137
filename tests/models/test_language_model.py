"""The language model: state, padding, packing, and sampling from it."""

import pytest
import torch
import torch.nn.functional as F
from models_for_tests import TOLERANCE, documents_are_apart, read_in_pieces, small_model
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

from metattt.generation.sampling import generate
from metattt.models.block import Block, SwiGLU
from metattt.models.language_model import LanguageModel

LAYERS = ("ttt_linear", "ttt_mlp", "linear_attention", "attention", "delta_net", "nested_ttt")
HYBRID = (
    "model.num_layers=3 model.blocks=ttt_mlp+ttt_linear+window_attention model.blocks.ttt_mlp.optimizer.mini_batch_size=4 "
    "model.blocks.ttt_linear.optimizer.mini_batch_size=6 "
    "model.blocks.window_attention.learner.window=6 model.blocks.window_attention.learner.sinks=1"
)


def make(layer: str = "ttt_linear", *overrides: str) -> LanguageModel:
    chosen = layer.split() if "=" in layer else ("model.num_layers=2", f"layer={layer}")
    return small_model("dim=16", "num_heads=2", "model.vocab_size=31", *chosen, *overrides, noise=0.05)


def tokens(*shape: int) -> Tensor:
    return torch.randint(31, shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(("layer", "conv"), [*((layer, "true") for layer in (*LAYERS, HYBRID)), ("ttt_mlp", "false")])
def test_any_split_gives_the_logits_of_one_call(layer: str, conv: str) -> None:
    model, ids = make(layer, f"model.pre_conv={conv}"), tokens(2, 41)
    whole = model(ids)
    for cuts in ([7, 8, 31], [19, 20, 21], [1, 2, 3, 4, 8, 19, 20], [16, 17, 18, 19], list(range(1, 41))):
        torch.testing.assert_close(read_in_pieces(model, ids, cuts)[0], whole, **TOLERANCE)
    torch.testing.assert_close(read_in_pieces(model.float(), ids, [7])[0], model(ids), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("side", ["left", "right", "inside"])
@pytest.mark.parametrize("layer", ["ttt_linear", "attention", HYBRID])
def test_padding_and_packed_documents(layer: str, side: str) -> None:
    columns = torch.arange(50)
    here = {"left": columns >= 13, "right": columns < 37, "inside": (columns % 3 > 0) | (columns > 43)}[side]
    model, mask = make(layer), torch.stack([here, columns < 21])
    for starts in ([], [20], [0, 11, 30]):
        reset = torch.zeros(2, 50, dtype=torch.bool)
        reset[0, here.nonzero().flatten()[starts]] = True
        reset[1, 20] = len(starts) > 1
        documents_are_apart(model, tokens(2, 50), tokens(2, 5), mask, reset, 24)


@pytest.mark.parametrize("layer", LAYERS)
def test_blocks_that_are_run_again_have_the_same_gradients(layer: str) -> None:
    model, ids, found = make(layer).float().train(), tokens(2, 21), []
    for again in ("no", "by us", "by torch"):
        model.checkpoint_blocks = again == "by us"
        if again == "by torch":
            apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
        model.zero_grad()
        model(ids).logsumexp(-1).sum().backward()
        found.append([one.grad.clone() for one in model.parameters() if one.grad is not None])
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[2], found[0], rtol=1e-5, atol=1e-5)


def test_seed_and_stop() -> None:
    model, ids = make(), tokens(1, 5)
    first, second = ([int(t) for t in generate(model, ids, 30, seed=3)] for _ in range(2))
    assert first == second and len(first) == 30
    stopped = [int(t) for t in generate(model, ids, 30, seed=3, stop=[first[4]])]
    assert stopped == first[: first.index(first[4]) + 1]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_gated_product_of_a_block(dtype: torch.dtype) -> None:
    """Bit for bit as torch computes it, and a tensor less is kept; once, twice and forward differentiable."""
    ffn = SwiGLU(6, 10).to(dtype)  # of no size that C++ takes
    x = torch.randn(2, 3, 6, dtype=dtype, requires_grad=True)
    given, found, kept = (x, *ffn.parameters()), [], []
    for function in (ffn, lambda x: ffn.down(F.silu(ffn.gate(x)) * ffn.up(x))):
        with torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one.shape[-1]) or one, lambda one: one):
            y = function(x)
        found.append((kept.count(10), y, *torch.autograd.grad(y.square().sum(), given)))
        kept.clear()
    (ours, *values), (torchs, *expected) = found
    assert ours < torchs and all(map(torch.equal, values, expected))
    if dtype == torch.float64:
        assert torch.autograd.gradcheck(ffn, (x,), check_forward_ad=True) and torch.autograd.gradgradcheck(ffn, (x,))
