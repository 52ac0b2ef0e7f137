"""Which laws hold for the layers of other packages: `python benchmarks/referee.py`; packages that are not installed are left out.

Each is called as its own documentation says, by a module of a few lines (`metattt.testing.foreign` says how a module is
called). `<output_dir>/referee.md` and `.json` are written.
"""

from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from common import Row, exit_code, settings
from report import Report
from torch import Tensor, nn

import metattt
from metattt.testing.foreign import EXACT, Found, Subject, examine

DIM, HEADS = 16, 2


@dataclass
class Settings:
    output_dir: str = "results"


class Operation(nn.Module):
    """An operation of flash-linear-attention in PyTorch, with projections that give it its arguments."""

    def __init__(self, name: str, gates: Sequence[str]):
        super().__init__()
        self.function = getattr(importlib.import_module(f"fla.ops.{name}.naive"), f"naive_recurrent_{name}")
        self.gates, self.erase = gates, name == "comba"
        self.maps = nn.ModuleDict({one: nn.Linear(DIM, DIM) for one in ("q", "k", "v", "p")})
        self.scalars = nn.ModuleDict(
            {one: nn.Linear(DIM, HEADS if one != "gk" else DIM) for one in ("g", "beta", "gk")}
        )
        self.out = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        q, k, v, p = (self.maps[one](x).unflatten(-1, (HEADS, -1)) for one in ("q", "k", "v", "p"))
        k, p = F.normalize(k, dim=-1), F.normalize(p, dim=-1)
        wide = self.scalars["gk"](x).unflatten(-1, (HEADS, -1))
        known: dict[str, Tensor] = {
            "g": F.logsigmoid(self.scalars["g"](x)), "beta": torch.sigmoid(self.scalars["beta"](x)),
            "gk": F.logsigmoid(wide), "g_wide": F.logsigmoid(wide),
        }  # fmt: skip
        given = {one.removesuffix("_wide"): known[one] for one in self.gates} | ({"p": p} if self.erase else {})
        y, state = self.function(q, k, v, **given, initial_state=state, output_final_state=True)
        return self.out(y.flatten(-2).to(x.dtype)), state


def tensors_in(value: object) -> Iterator[Tensor]:
    """The tensors in an object's attributes, lists and dictionaries."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for one in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(one)
    elif hasattr(value, "__dict__") and not isinstance(value, type):
        yield from tensors_in(vars(value))


class Cached(nn.Module):
    """A mixer of Transformers, whose state is a cache that it changes in place: copied before each call."""

    detaches = True

    def __init__(self, name: str, **config: int):
        super().__init__()
        module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
        kind = name.capitalize()
        self.config = getattr(importlib.import_module(f"transformers.models.{name}"), f"{kind}Config")(
            hidden_size=DIM, num_hidden_layers=1, **config
        )
        self.mixer = getattr(module, f"{kind}Mixer")(self.config, 0)

    def forward(self, x: Tensor, state: Any = None, mask: Tensor | None = None) -> tuple[Tensor, Any]:
        from transformers import DynamicCache

        # (its tensors hold the graph of the call before)
        memo = {id(one): one.detach().clone() for one in tensors_in(state)}
        cache = DynamicCache(config=self.config) if state is None else copy.deepcopy(state, memo)
        return self.mixer(x, cache=cache, attention_mask=mask), cache


class Recurrent(nn.Module):
    """A GRU or LSTM of torch."""

    def __init__(self, kind: type[nn.GRU] | type[nn.LSTM]):
        super().__init__()
        self.cell = kind(DIM, DIM, batch_first=True)

    def forward(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        y, state = self.cell(x, state)
        return y, state


FLA = {"gated_delta_rule": ("beta", "g"), "comba": ("beta", "g"), "kda": ("g_wide", "beta"), "simple_gla": ("g",)}
"""Operations of flash-linear-attention that have a recurrence, and their gates."""


def subjects() -> Iterator[tuple[str, str, Callable[[], nn.Module]]]:
    """Package, layer and what makes it."""
    for name in ("ttt_linear", "ttt_mlp", "gated_delta_net", "comba", "kda", "mamba2"):
        yield "metattt", name, partial(metattt.build, name, dim=DIM, num_heads=HEADS)
    for kind in (nn.GRU, nn.LSTM):
        yield "torch", kind.__name__, partial(Recurrent, kind)
    for name, gates in FLA.items():
        yield "fla-core", f"{name}, recurrent", partial(Operation, name, gates)
    yield "fla-core", "gla, recurrent", partial(Operation, "gla", ("gk",))
    yield "transformers", "MambaMixer", partial(Cached, "mamba", state_size=4)
    sizes = {"state_size": 4, "num_heads": 4, "head_dim": 8, "chunk_size": 4, "n_groups": 1}
    yield "transformers", "Mamba2Mixer", partial(Cached, "mamba2", **sizes)


def main(words: Sequence[str]) -> int:
    """Examines all layers; returns the exit code."""
    chosen = settings(Settings, words)
    rows: list[Row] = []
    for package, name, make in subjects():
        try:
            known = version(package) if package != "metattt" else "this"
            subject = Subject(make, DIM, rounds=package in ("fla-core", "transformers"))
        except (PackageNotFoundError, ImportError) as error:
            print(f"{package}, {name}: left out ({error})", file=sys.stderr)
            continue
        for law, found in examine(subject):
            rows.append(row(package, known, name, law, found))
    broken = [one for one in rows if one["result"] == "broken"]
    for one in broken:
        print(*one.values(), sep=" | ")
    text = f"Laws of layers in float64 (bound {EXACT:g} unless said). {len(broken)} of {len(rows)} are broken."
    tables = {"Broken": broken or [], "All": rows}
    for path in Report("Laws of other packages", text, tables).write(Path(chosen.output_dir), "referee"):
        print(f"written  {path}")
    return 0


def row(package: str, known: str, name: str, law: str, found: Found) -> Row:
    result = "broken" if found.failed else "not offered" if found.error is None else "holds"
    error = None if found.error is None else float(f"{found.error:.2e}")
    return {
        "package": f"{package} {known}", "layer": name, "law": law, "result": result, "error": error,
        "note": found.note.removeprefix("does not apply: "),
    }  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(exit_code(main))
