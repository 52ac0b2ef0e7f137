"""`metattt bench layer`: whole layers at growing lengths, in every form that they have, beside other libraries."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from metattt.bench.base import Benchmark, check_counts, require
from metattt.bench.ceilings import Ceilings, ceilings
from metattt.bench.peers import Peer, peers
from metattt.bench.report import Check, Panel, Report, Row
from metattt.bench.timing import in_turn, ratios, summary
from metattt.catalog.known_layers import known_layers
from metattt.catalog.layer_measures import Operations
from metattt.composition.compose import build
from metattt.composition.settings import pick_device
from metattt.errors import MetaTTTError, check_choice, check_number
from metattt.inner.planning import ASKED
from metattt.layer import TTTLayer
from metattt.registry import register
from metattt.testing.specimen import Run, compare, cotangent, distance, gradients, randomize

PASSES = ("forward + backward", "forward")
ATTENTION = "torch attention"


class PeerLayer(nn.Module):
    """Another library's operation between projections like those of our layers: `[B, T, D]` to `[B, T, D]` and no
    state."""

    def __init__(self, peer: Peer, dim: int, num_heads: int):
        super().__init__()
        self.peer, self.num_heads = peer, num_heads
        self.query, self.key, self.value, self.out = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.others: list[Tensor] = []  # of the operation's inputs, those that are not views: they stay as they are

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        q, k, v = (view(x).unflatten(-1, (self.num_heads, -1)) for view in (self.query, self.key, self.value))
        if self.peer.name != ATTENTION:
            q, k = F.normalize(q, dim=-1).to(v.dtype), F.normalize(k, dim=-1).to(v.dtype)
        if not self.others or self.others[0].shape[:2] != x.shape[:2]:
            self.others = self.peer.inputs(tuple(q.shape), q.dtype, x.device.type)[3:]
        return self.out(self.peer.call(q, k, v, *self.others).flatten(2)), None


@register(group="benchmark", name="layer")
class LayerBenchmark(Benchmark):
    """Known layers and other libraries' operations on the same tokens: fp32 on the CPU, bf16 autocast on a GPU.

    Args:
        layers: names.
        forms: of `layer.form`, for every layer; forms that it does not have, or has under another name, are left out.
        lengths: T, tokens.
        batch: B, sequences.
        dim, num_heads: of the layers.
        rounds: timed calls of each way, in turn.
        baseline: one of `layers`, whose time in its first form the others are told as multiples of; null is torch's attention.
        overrides: for every layer, such as `block_style=plain`.
        limit: seconds; a way whose calls take longer is not taken to the next length.
        device: `cpu`, `cuda`, or `auto`.
    """

    def __init__(
        self,
        layers: Sequence[str] = (
            "ttt_linear",
            "ttt_mlp",
            "delta_net",
            "gated_delta_net",
            "mamba2",
            "linear_attention",
            "attention",
        ),
        forms: Sequence[str] = ("auto", "dual"),
        lengths: Sequence[int] = (512, 1024, 2048, 4096),
        batch: int = 1,
        dim: int = 768,
        num_heads: int = 12,
        rounds: int = 3,
        limit: float = 6.0,
        device: str = "auto",
        baseline: str | None = None,
        overrides: Sequence[str] = (),
    ):
        for name in layers:
            check_choice("benchmark.layers", name, known_layers())
        for form in forms:
            check_choice("benchmark.forms", form, ASKED)
        check_counts(lengths=lengths, batch=batch, dim=dim, num_heads=num_heads, rounds=rounds)
        check_number("benchmark.limit", limit, least=0)
        if baseline is not None:
            check_choice("benchmark.baseline", baseline, layers)
        if not layers or not forms:
            raise MetaTTTError(f"benchmark.layers={list(layers)} forms={list(forms)}: lists need an entry")
        self.layers, self.forms, self.lengths, self.batch = list(layers), list(forms), sorted(lengths), batch
        self.dim, self.num_heads, self.rounds, self.limit, self.device = (
            dim,
            num_heads,
            rounds,
            limit,
            pick_device(device),
        )
        self.baseline, self.overrides = baseline or ATTENTION, list(overrides)
        self.matmul_dtype = torch.float32 if self.device.type == "cpu" else torch.bfloat16

    def run(self, say: Callable[[str], None]) -> Report:
        checks: list[Check] = []
        ways: dict[tuple[str, str], nn.Module] = {}
        for name in self.layers:
            say(f"{name}: checking")
            made = self._forms(name)
            checks += self._check(name, made)
            ways |= {(name, form): layer for form, layer in made.items()}
        peer_layers, missing = self._peers()
        checks.append(self._check_attention(peer_layers[ATTENTION]))
        ways |= {(name, ""): layer for name, layer in peer_layers.items()}
        ceiling = ceilings(self.device, self.matmul_dtype)
        rows: list[Row] = []
        against_peer: list[Row] = []
        against_form: list[Row] = []
        for title in PASSES:
            left = dict(ways)
            for length in self.lengths:
                say(f"{title}: timing {len(left)} ways at T = {length}")
                seconds = self._time(title, left, length)
                operations = self._operations(left, length, title)
                for way in left:
                    rows.append(self._row(way, title, length, seconds[way], operations.get(way[0]), ceiling))
                peer, forms = self._compare(title, length, seconds)
                against_peer += peer
                against_form += forms
                left = {
                    way: layer for way, layer in left.items() if min(seconds[way]) <= self.limit or way[0] in (ATTENTION, self.baseline)
                }
        tables = {"Time": rows, f"Times as long as {self.baseline}": against_peer}
        if against_form:
            tables["Times as long as another form"] = against_form
        settings = {key: str(value) if key in ("device", "matmul_dtype") else value for key, value in vars(self).items()}
        return Report("Whole layers", self._text(missing, ceiling), tables, checks, settings, self._panels(rows))

    # -- what is timed -------------------------------------------------------------------------------------------------

    def _forms(self, name: str) -> dict[str, TTTLayer]:
        """The layer in each of the forms that it has, with the same parameters."""
        found: dict[str, TTTLayer] = {}
        settings = [f"layer={name}", f"dim={self.dim}", f"num_heads={self.num_heads}", "seed=0", *self.overrides]
        if self.overrides:
            build(*settings)  # a wrong one is told as it is, not as a form that is missing
        for form in self.forms:
            try:
                layer = build(*settings, f"layer.form={form}")
            except MetaTTTError:
                continue
            randomize(layer)
            found.setdefault(layer.form, layer.to(self.device))
        if not found:
            raise MetaTTTError(f"layer={name} has none of benchmark.forms={self.forms}: add auto")
        return found

    def _peers(self) -> tuple[dict[str, PeerLayer], str]:
        """Other libraries' layers by name, and what is not there."""
        found = peers(mini_batch_size=16) if self.device.type == "cuda" else peers(mini_batch_size=16)[:1]
        missing = ""
        if len(found) == 1:
            installed = importlib.util.find_spec("fla") is not None
            missing = (
                "needs a GPU"
                if installed and self.device.type == "cpu"
                else "does not import"
                if installed
                else "not installed"
            )
        torch.manual_seed(0)
        return {peer.name: PeerLayer(peer, self.dim, self.num_heads).to(self.device) for peer in found}, missing

    def _tokens(self, length: int) -> Tensor:
        x = torch.randn(self.batch, length, self.dim, generator=torch.Generator().manual_seed(1))
        return x.to(self.device)

    def _outputs(self, layer: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.matmul_dtype is torch.bfloat16):
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

    def _time(
        self, title: str, ways: dict[tuple[str, str], nn.Module], length: int
    ) -> dict[tuple[str, str], list[float]]:
        call, x = (self._training if title == PASSES[0] else self._inference), self._tokens(length)
        seconds = in_turn({"\n".join(way): partial(call, layer, x) for way, layer in ways.items()}, self.rounds)
        return {way: seconds["\n".join(way)] for way in ways}

    def _operations(self, ways: dict[tuple[str, str], nn.Module], length: int, title: str) -> dict[str, int]:
        """Of the products of one call, by layer. Kernels hide theirs: counted in another form, the last one."""
        found: dict[str, int] = {}
        for (name, form), layer in ways.items():
            if name == ATTENTION or form not in ("", "fused"):
                with torch.no_grad(), Operations() as counter:
                    layer(self._tokens(length))
                found[name] = counter.count * (3 if title == PASSES[0] else 1)
        return found

    # -- checks --------------------------------------------------------------------------------------------------------

    def _check(self, name: str, layers: dict[str, TTTLayer]) -> list[Check]:
        """All forms against the last one, in fp32 and in the type that is timed; and one call against two."""
        x = self._tokens(min(self.lengths[-1], 200))
        reference, layer = list(layers.items())[-1]
        expected = self._run(layer, x, torch.float32)
        checks = []
        for form, other in layers.items():
            if form != reference:
                error = compare(self._run(other, x, torch.float32), expected)
                checks.append(require(f"{name}, {form} and {reference}, outputs and gradients, fp32", error, 1e-3))
            if self.matmul_dtype is not torch.float32:
                error = distance(self._run(other, x, self.matmul_dtype).y.float(), expected.y)
                checks.append(require(f"{name}, {form} in bf16 and {reference} in fp32, outputs", error, 1e-1))
        form, layer = next(iter(layers.items()))
        with torch.no_grad():
            try:
                first, state = layer(x[:, :-7])
                second, _ = layer(x[:, -7:], state)
            except MetaTTTError:  # every call is a set of tokens of its own
                return checks
            if layer.optimizer.read != "final":
                error = distance(torch.cat([first, second], 1), layer(x)[0])
                checks.append(require(f"{name}, {form}, one call and two, outputs, fp32", error, 1e-3))
        return checks

    def _run(self, layer: TTTLayer, x: Tensor, dtype: torch.dtype) -> Run:
        x = x.detach().requires_grad_()
        with torch.autocast(self.device.type, torch.bfloat16, enabled=dtype is torch.bfloat16):
            y: Tensor = layer(x)[0]
        loss = (y.float() * cotangent(y.float())).sum()
        return Run(y.detach(), None, gradients(layer, x, loss))  # type: ignore[arg-type]

    def _check_attention(self, layer: PeerLayer) -> Check:
        x = self._tokens(min(self.lengths[-1], 100))
        with torch.no_grad():
            q, k, v = (
                view(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
                for view in (layer.query, layer.key, layer.value)
            )
            hidden = torch.ones(x.shape[1], x.shape[1], device=x.device).triu(1).bool()
            scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(hidden, -torch.inf)
            expected = layer.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
            return require(
                f"{ATTENTION} and softmax attention written out, outputs, fp32", distance(layer(x)[0], expected), 1e-4
            )

    # -- what is written -----------------------------------------------------------------------------------------------

    def _row(
        self,
        way: tuple[str, str],
        title: str,
        length: int,
        took: list[float],
        operations: int | None,
        ceiling: Ceilings,
    ) -> Row:
        milliseconds = summary([1000 * second for second in took])
        row: Row = {"layer": way[0], "form": way[1], "pass": title, "T": length}
        row |= {f"ms, {key}": value for key, value in milliseconds._asdict().items()}
        row["tokens/s"] = 1000 * self.batch * length / milliseconds.median
        row["GFLOP"] = None if operations is None else operations / 1e9
        row["share of ceiling"] = None if operations is None else ceiling.share(milliseconds.median / 1000, operations)
        return row

    def _compare(
        self, title: str, length: int, seconds: Mapping[tuple[str, str], list[float]]
    ) -> tuple[list[Row], list[Row]]:
        """Every way against the baseline, and the later forms of a layer against its first."""
        peer: list[Row] = []
        forms: list[Row] = []
        baseline = next(way for way in seconds if way[0] == self.baseline)
        for (name, form), took in seconds.items():
            row: Row = {"layer": name, "form": form, "pass": title, "T": length}
            if (name, form) != baseline:
                peer.append(row | ratios(took, seconds[baseline])._asdict())
            first = next(other for other in seconds if other[0] == name)
            if first[1] != form:
                forms.append(row | {"against": first[1]} | ratios(took, seconds[first])._asdict())
        return peer, forms

    def _text(self, missing: str, ceiling: Ceilings) -> str:
        overrides = f"Every layer with `{' '.join(self.overrides)}`. " if self.overrides else ""
        return (
            f"B = {self.batch}, D = {self.dim}, {self.num_heads} heads, {str(self.matmul_dtype).removeprefix('torch.')} operands, "
            f"{self.rounds} rounds in turn in one process, projections included. A way that takes more than {self.limit:g} s is not taken "
            f"to longer sequences. {overrides}{ATTENTION}: four projections and `F.scaled_dot_product_attention`. flash-linear-attention: "
            f"{missing or 'in the tables'}.\n\n"
            "Ratios are made round by round. GFLOP are those of the products of the generic form (2 per multiplication and "
            "addition, three times the forward pass for both passes, masked ones of attention too), the ceiling is a product of two "
            f"large matrices in the same process: {ceiling.operations / 1e9:.0f} GFLOP/s."
        )

    def _panels(self, rows: Sequence[Row]) -> list[Panel]:
        panels = []
        for title in PASSES:
            curves: dict[str, tuple[list[float], list[float]]] = {}
            for row in rows:
                if row["pass"] == title:
                    x, y = curves.setdefault(f"{row['layer']} {row['form']}".strip(), ([], []))
                    x.append(row["T"])
                    y.append(1000 * row["ms, median"] / (self.batch * row["T"]))
            panels.append(Panel(title, "T (tokens)", "µs per token", curves))
        return panels
