"""Cross-entropy without the logits of all tokens: values, derivatives and memory."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from metattt.models.language_model import LanguageModel
from metattt.models.linear_cross_entropy import linear_cross_entropy


def data(rows: int, dim: int, vocab_size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, dim, generator=generator, dtype=torch.float64)
    weight = torch.randn(vocab_size, dim, generator=generator, dtype=torch.float64)
    labels = torch.randint(vocab_size, (rows,), generator=generator)
    labels[::5] = -1
    return x.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), labels


def whole(x: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Loss and gradients in float64, of 0.37 times the loss."""
    x, weight = (tensor.detach().double().requires_grad_() for tensor in (x, weight))
    loss = F.cross_entropy(x @ weight.mT, labels, ignore_index=-1, reduction="sum")
    return loss.detach(), *torch.autograd.grad(0.37 * loss, (x, weight))


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize(("rows", "max_logits"), [(64, 64 * 53), (67, 500), (1, 1)])
def test_equals_cross_entropy(rows: int, max_logits: int, dtype: torch.dtype, bound: float) -> None:
    x, weight, labels = data(rows, 16, 53, dtype)
    if rows == 1:
        labels[:] = 3
    loss = linear_cross_entropy(x, weight, labels, ignore_index=-1, max_logits=max_logits)
    assert loss.dtype == torch.promote_types(dtype, torch.float32)
    (0.37 * loss).backward()
    for found, expected in zip((loss, x.grad, weight.grad), whole(x, weight, labels), strict=True):
        assert found is not None
        assert (found.double() - expected).norm() <= bound * expected.norm()
    losses = linear_cross_entropy(x, weight, labels, ignore_index=-1, max_logits=max_logits, reduction="none")
    assert losses.shape == labels.shape and bool((losses[labels == -1] == 0).all())
    torch.testing.assert_close(losses.sum(), loss, rtol=bound, atol=bound)


@pytest.mark.parametrize("max_logits", [2**20, 400])
def test_autocast_rounds_the_operands_and_not_the_loss(max_logits: int) -> None:
    x, weight, labels = data(50, 16, 53, torch.float32)
    double = [x.detach().double(), weight.detach().double(), labels]
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(x, weight, labels, ignore_index=-1, max_logits=max_logits)
        exact = linear_cross_entropy(*double, ignore_index=-1, max_logits=max_logits)  # autocast leaves it as it is
    torch.testing.assert_close(exact, whole(*double)[0])
    expected = whole(x.bfloat16(), weight.bfloat16(), labels)
    loss.backward()
    assert loss.dtype == x.grad.dtype == weight.grad.dtype == torch.float32  # type: ignore[union-attr]
    assert abs(loss.double() / expected[0] - 1) < 2e-3
    for found, right in zip((x.grad, weight.grad), expected[1:], strict=True):
        assert (0.37 * found.double() - right).norm() <= 1e-2 * right.norm()  # type: ignore[union-attr]


def test_memory_does_not_grow_with_rows_times_vocabulary() -> None:
    x, weight, labels = data(2048, 8, 1024, torch.float32)

    def largest(max_logits: int) -> int:
        """Bytes of the largest piece of memory that was asked for."""
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            linear_cross_entropy(x, weight, labels, ignore_index=-1, max_logits=max_logits).backward()
        return max(event.cpu_memory_usage for event in profiler.events())

    logits = x.shape[0] * weight.shape[0]
    assert largest(logits) >= 4 * logits
    assert largest(logits // 16) <= 4 * logits // 4


def test_only_what_needs_gradients_gets_them(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, labels = data(20, 8, 30, torch.float64)
    expected = whole(x, weight, labels)
    for frozen, leaf, right in ((weight, x, expected[1]), (x, weight, expected[2])):
        frozen.requires_grad_(False)
        (grad,) = torch.autograd.grad(linear_cross_entropy(x, weight, labels, ignore_index=-1, max_logits=100), leaf)
        torch.testing.assert_close(0.37 * grad, right)
        frozen.requires_grad_()
    monkeypatch.setattr(Tensor, "scatter_add_", None)  # softmax − one-hot: no gradient is made where none is wanted
    for off in (torch.no_grad, torch.inference_mode):
        with off():
            torch.testing.assert_close(linear_cross_entropy(x, weight, labels, ignore_index=-1, max_logits=100), expected[0])


def test_a_model_with_tied_embeddings(monkeypatch: pytest.MonkeyPatch) -> None:
    class Echo(torch.nn.Module):
        def forward(self, x: Tensor, state: object, mask: object = None, reset: object = None) -> tuple[Tensor, object]:
            return x.cumsum(1), state

    monkeypatch.setitem(linear_cross_entropy.__kwdefaults__, "max_logits", 100)
    torch.manual_seed(0)
    model = LanguageModel(40, 16, 1, Echo).double()
    assert model.head.weight is model.embedding.weight
    ids = torch.randint(40, (2, 14))
    labels = ids[:, 1:].clone()
    labels[1, 3:7] = -1
    gradients = []
    for loss in (
        model.cross_entropy(ids[:, :-1], labels, ignore_index=-1)[0],
        F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), labels.flatten(), ignore_index=-1, reduction="sum"),
    ):
        model.zero_grad()
        loss.backward()
        gradients.append([loss.detach(), *(p.grad for p in model.parameters())])
    torch.testing.assert_close(gradients[0], gradients[1])
    losses, state = model.cross_entropy(ids[:, :5], ids[:, 1:6], reduction="none")
    rest, _ = model.cross_entropy(ids[:, 5:-1], ids[:, 6:], state, reduction="none")
    assert losses.shape == (2, 5)
    assert rest.shape == (2, 8)
