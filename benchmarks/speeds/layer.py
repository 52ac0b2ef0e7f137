"""Whole layers at growing lengths, in every form that they have, beside attention."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from common import Check, Row, Say, in_turn, product, rate, ratios, require, some, summary
from report import Report
from torch import Tensor, nn

from metattt.composition.compose import build
from metattt.composition.settings import pick_device
from metattt.errors import MetaTTTError, check_choice
from metattt.inner.compiled import allow
from metattt.layer import TTTLayer
from metattt.measures.flops import flops_of_layer
from metattt.testing.specimen import Run, compare, cotangent, distance, gradients, randomize

PASSES = ("forward + backward", "forward")
ATTENTION = "torch attention"
Way = tuple[str, str]  # layer and form


class Attention(nn.Module):
    """`F.scaled_dot_product_attention` between projections like those of our layers, `[B, T, D]`; no state."""

    def __init__(self, dim: int, num_heads: int):
        super().__init__()
        self.num_heads = num_heads
        self.query, self.key, self.value, self.out = (nn.Linear(dim, dim, bias=False) for _ in range(4))

    def views(self, x: Tensor) -> list[Tensor]:
        projections = (self.query, self.key, self.value)
        return [view(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for view in projections]

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        q, k, v = self.views(x)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2)), None


def plain(layer: nn.Module) -> nn.Module:
    """The layer that was compiled, or `layer` itself."""
    return getattr(layer, "_orig_mod", layer)


@dataclass
class Layers:
    """Known layers, and attention, on the same tokens: fp32 on the CPU, bf16 autocast on a GPU.

    Args:
        layers: names.
        forms: of `layer.form`, for every layer; forms that it does not have, or has under another name, are left out.
        lengths: T, tokens.
        batch: B, sequences.
        dim, num_heads: of the layers.
        rounds: timed calls of each way, in turn.
        limit: seconds; a way whose calls take longer is not taken to the next length.
        device: `cpu`, `cuda`, or `auto`.
        baseline: whose time the others are told as multiples of: one of `layers`, or torch's attention.
        overrides: for every layer, such as `block_style=plain`.
        compile: also the last form of each layer under `torch.compile`, as `metattt train compile=true` has it: a mini-batch
            is compiled once, with its derivative, for all of a sequence.
    """

    MAY_BE_EMPTY = ("overrides",)
    layers: list[str] = some(
        "ttt_linear", "ttt_mlp", "delta_net", "gated_delta_net", "mamba2", "linear_attention", "attention"
    )  # fmt: skip
    forms: list[str] = some("auto", "dual")
    lengths: list[int] = some(512, 1024, 2048, 4096)
    batch: int = 1
    dim: int = 768
    num_heads: int = 12
    rounds: int = 3
    limit: float = 6.0
    device: str = "auto"
    baseline: str = ATTENTION
    overrides: list[str] = some()
    compile: bool = False

    def run(self, say: Say) -> Report:
        check_choice("baseline", self.baseline, [ATTENTION, *self.layers])
        self.at = pick_device(self.device)
        self.dtype = torch.float32 if self.at.type == "cpu" else torch.bfloat16
        self.lengths.sort()
        checks: list[Check] = []
        ways: dict[Way, nn.Module] = {}
        for name in self.layers:
            say(f"{name}: checking")
            made = self._forms(name)
            checks += self._check(name, made)
            ways |= {(name, form): layer for form, layer in made.items()}
        torch.manual_seed(0)
        attention = Attention(self.dim, self.num_heads).to(self.at)
        checks.append(self._check_attention(attention))
        ways[ATTENTION, ""] = attention
        tables: dict[str, list[Row]] = {"Time": [], f"Times as long as {self.baseline}": []}
        for title in PASSES:
            left = dict(ways)
            for length in self.lengths:
                say(f"{title}: timing {len(left)} ways at T = {length}")
                call, x = (self._training if title == PASSES[0] else self._inference), self._tokens(length)
                seconds = in_turn({way: partial(call, layer, x) for way, layer in left.items()}, self.rounds)
                most = rate(*product(self.at, self.dtype))
                for (name, form), took in seconds.items():
                    row: Row = {"layer": name, "form": form, "pass": title, "T": length}
                    row |= summary(took).columns("ms", 1000)
                    least = self._products(left[name, form], length) * (3 if title == PASSES[0] else 1) / most
                    row |= {"tokens/s": self.batch * length / summary(took).median}
                    tables["Time"].append(row | {"products": least / summary(took).median})
                self._compare(title, length, seconds, tables)
                left = {
                    way: layer for way, layer in left.items()
                    if min(seconds[way]) <= self.limit or way[0] in (ATTENTION, self.baseline)
                }  # fmt: skip
        given = f"Every layer with `{' '.join(self.overrides)}`. " if self.overrides else ""
        text = (
            f"B = {self.batch}, D = {self.dim}, {self.num_heads} heads, {str(self.dtype)[6:]} operands, "
            f"{self.rounds} rounds in turn, projections included. What takes more than {self.limit:g} s is left out of "
            f"longer sequences. {given}{ATTENTION}: four projections and `F.scaled_dot_product_attention`. "
            "Ratios are made round by round. `products`: the share of the time that the matrix products of a forward pass, "
            "or three times these with the backward one, take at the rate of a large product in this process; masked "
            "parts of a product count as well, so that attention may be above 1."
        )
        shown = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return Report("Whole layers", text, tables, checks, shown)

    # -- what is timed -------------------------------------------------------------------------------------------------

    def _forms(self, name: str) -> dict[str, TTTLayer]:
        """The layer in each of the forms that it has, with the same parameters."""
        found: dict[str, TTTLayer] = {}
        settings = [f"layer={name}", f"dim={self.dim}", f"num_heads={self.num_heads}", "seed=0", *self.overrides]
        build(*settings)  # what is wrong with the layer is told as it is, not as a form that is missing
        for form in self.forms:
            try:
                layer = build(*settings, f"layer.form={form}")
            except MetaTTTError:
                continue
            randomize(layer)
            found.setdefault(layer.form, layer.to(self.at))
        if self.compile and found:
            allow()
            found["compiled"] = torch.compile(copy.deepcopy(layer), dynamic=False)  # type: ignore[assignment]
        if not found:
            raise MetaTTTError(f"layer={name} has none of forms={self.forms}: add auto")
        return found

    def _tokens(self, length: int) -> Tensor:
        return torch.randn(self.batch, length, self.dim, generator=torch.Generator().manual_seed(1)).to(self.at)

    def _outputs(self, layer: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast(self.at.type, torch.bfloat16, enabled=self.dtype is torch.bfloat16):
            y: Tensor = layer(x)[0]
        return y

    def _training(self, layer: nn.Module, x: Tensor) -> None:
        x = x.detach().requires_grad_()
        y = self._outputs(layer, x)
        leaves = [x, *(parameter for parameter in layer.parameters() if parameter.requires_grad)]
        torch.autograd.grad(y, leaves, torch.ones_like(y), allow_unused=True)

    def _inference(self, layer: nn.Module, x: Tensor) -> None:
        with torch.inference_mode():
            self._outputs(layer, x)

    def _products(self, layer: nn.Module, length: int) -> int:
        """Operations of the products of a forward pass, as the generic forms have them."""
        return self.batch * flops_of_layer(copy.deepcopy(plain(layer)).to("meta"), length, self.dim)

    # -- checks --------------------------------------------------------------------------------------------------------

    def _check(self, name: str, layers: dict[str, TTTLayer]) -> list[Check]:
        """All forms against the last one, in fp32 and in the type that is timed; and one call against two."""
        x = self._tokens(min(self.lengths[-1], 200))
        reference, last = list(layers.items())[-1]
        expected, checks = self._run(last, x, torch.float32), []
        for form, layer in layers.items():
            if form != reference:
                error = compare(self._run(layer, x, torch.float32), expected)
                checks.append(require(f"{name}, {form} and {reference}, outputs and gradients, fp32", error, 1e-3))
            if self.dtype is not torch.float32:
                error = distance(self._run(layer, x, self.dtype).y.float(), expected.y)
                checks.append(require(f"{name}, {form} in bf16 and {reference} in fp32, outputs", error, 1e-1))
        form, layer = next(iter(layers.items()))
        with torch.no_grad():
            try:
                first, state = layer(x[:, :-7])
                second, _ = layer(x[:, -7:], state)
            except MetaTTTError:  # every call is a set of tokens of its own
                return checks
            optimizer = getattr(layer, "optimizer", None)
            if optimizer is None or optimizer.read != "final":
                error = distance(torch.cat([first, second], 1), layer(x)[0])
                checks.append(require(f"{name}, {form}, one call and two, outputs, fp32", error, 1e-3))
        return checks

    def _run(self, layer: TTTLayer, x: Tensor, dtype: torch.dtype) -> Run:
        x = x.detach().requires_grad_()
        with torch.autocast(self.at.type, torch.bfloat16, enabled=dtype is torch.bfloat16):
            y: Tensor = layer(x)[0]
        loss = (y.float() * cotangent(y.float())).sum()
        return Run(y.detach(), None, gradients(plain(layer), x, loss))  # type: ignore[arg-type]

    def _check_attention(self, layer: Attention) -> Check:
        x = self._tokens(min(self.lengths[-1], 100))
        with torch.no_grad():
            q, k, v = layer.views(x)
            hidden = torch.ones(x.shape[1], x.shape[1], device=x.device).triu(1).bool()
            scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(hidden, -torch.inf)
            error = distance(layer(x)[0], layer.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2)))
        return require(f"{ATTENTION} and softmax attention written out, outputs, fp32", error, 1e-4)

    # -- what is written -----------------------------------------------------------------------------------------------

    def _compare(
        self, title: str, length: int, seconds: Mapping[Way, list[float]], tables: dict[str, list[Row]]
    ) -> None:
        """Every way against the baseline, and the later forms of a layer against its first."""
        baseline = next(way for way in seconds if way[0] == self.baseline)
        for (name, form), took in seconds.items():
            row: Row = {"layer": name, "form": form, "pass": title, "T": length}
            if (name, form) != baseline:
                tables[f"Times as long as {self.baseline}"].append(row | ratios(took, seconds[baseline])._asdict())
            first = next(way for way in seconds if way[0] == name)
            if first[1] != form:
                rows = tables.setdefault("Times as long as another form", [])
                rows.append(row | {"against": first[1]} | ratios(took, seconds[first])._asdict())
