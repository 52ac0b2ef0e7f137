"""Whether two checkouts compute the same: all known layers, on the same weights and tokens.

usage: compare_commits.py OLD NEW [layer ...]     (two folders; the environment has the project's requirements)
       compare_commits.py --write FILE [--weights FILE] [layer ...]    (inside one of them, by PYTHONPATH)

Outputs and the derivative by every parameter and by the tokens of one call, of one cut at 23 and 24, of padded and of
packed sequences, and the outputs of token by token decoding; float64 and float32. Figures are the largest difference
beside the largest number of the tensor (of all derivatives of the layer where that is larger than 1e-3 of them).
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

LIMITS = {"float64": 1e-12, "float32": 1e-5}


def cases(layer: nn.Module, x: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Outputs by the name of the case, with derivatives to come but for decoding."""
    batch, length = x.shape[:2]
    yield "call", layer(x)[0]
    state, parts = None, []
    for a, b in ((0, 23), (23, 24), (24, length)):
        y, state = layer(x[:, a:b], state)
        parts.append(y)
    yield "cut", torch.cat(parts, 1)
    mask = torch.ones(batch, length, dtype=torch.bool)
    mask[0, :5] = mask[0, 40:49] = mask[1, 60:] = False
    yield "masked", layer(x, mask=mask)[0]
    reset = torch.zeros(batch, length, dtype=torch.bool)
    reset[0, 30] = reset[1, 7] = reset[1, 33] = True
    yield "reset", layer(x, reset=reset)[0]
    y, state = layer(x[:, :19], None, reset=reset[:, :19])
    z, state = layer(x[:, 19:], state, mask=mask[:, 19:])
    yield "all", torch.cat([y, z], 1)
    with torch.no_grad():
        y, state = layer(x[:, :30])
        parts = [y]
        for t in range(30, length):
            y, state = layer(x[:, t : t + 1], state)
            parts.append(y)
    yield "decode", torch.cat(parts, 1)


def write(path: str, weights: str | None, names: Sequence[str]) -> None:
    """What this checkout computes, with the weights of another one where they are given: by layer and type, then by case, tensors."""
    import metattt

    known = torch.load(weights) if weights else {}
    found: dict[str, dict[str, Any]] = {}
    folder = Path(metattt.__file__).parent / "configs" / "layer"
    names = names or sorted(p.stem for p in folder.glob("*.yaml") if p.stem != "custom")
    for name, dtype in itertools.product(names, LIMITS):
        torch.manual_seed(0)
        layer = metattt.build(f"layer={name}", "dim=32", "num_heads=2").to(getattr(torch, dtype))
        if (key := f"{name} {dtype}") in known:
            layer.load_state_dict(known[key]["weights"])
        else:  # away from zeros and ones that would hide a term
            draw = torch.Generator().manual_seed(1)
            with torch.no_grad():
                for p in layer.parameters():
                    p += 0.02 * torch.randn(p.shape, generator=draw, dtype=torch.float64).to(p)
        found[key] = entry = {"weights": layer.state_dict(), "refused": ""}
        x = normal(2, 2, 70, 32).to(getattr(torch, dtype)).requires_grad_()
        wanted = {"x": x, **{n: p for n, p in layer.named_parameters() if p.requires_grad}}
        try:
            for case, y in cases(layer, x):
                entry[case] = {"outputs": y.detach()}
                if y.requires_grad:
                    grads = torch.autograd.grad((y * normal(3, *y.shape).to(y)).sum(), list(wanted.values()), allow_unused=True)
                    entry[case] |= dict(zip(wanted, grads, strict=True))
        except Exception as error:  # what a layer refuses must stay refused (the cases after it are not run)
            entry["refused"] = type(error).__name__ + ": " + str(error).splitlines()[0][:100]
    torch.save(found, path)


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def distance(a: Tensor | None, b: Tensor | None, scale: float) -> float:
    """The largest difference beside the largest number of `a`, or beside `scale` where that is larger."""
    if a is None or b is None:
        return 0.0 if a is b else float("inf")
    if a.shape != b.shape or a.isnan().any() != b.isnan().any():
        return float("inf")
    if not a.numel():
        return 0.0
    top = max(float(a.nan_to_num().abs().max()), scale, 1e-30)
    return float((a - b).nan_to_num().abs().max()) / top


def compare(old: dict[str, dict[str, Any]], new: dict[str, dict[str, Any]]) -> int:
    """Prints a line for every layer and type, and returns how many differ."""
    bad = 0
    for key, before in old.items():
        after, worst = new.get(key, {"refused": "not there"}), {"outputs": 0.0, "derivatives": 0.0}
        if before.keys() != after.keys() or before["refused"] != after["refused"]:
            print(f"{key:40s} DIFFERS: {before['refused']} / {after['refused']}")
            bad += 1
            continue
        for case in before.keys() - {"weights", "refused"}:
            grads = [g for name, g in before[case].items() if name != "outputs" and g is not None and g.numel()]
            top = 1e-3 * max((float(g.abs().max()) for g in grads), default=0)
            for name, value in before[case].items():
                kind, scale = ("outputs", 0.0) if name == "outputs" else ("derivatives", top)
                worst[kind] = max(worst[kind], distance(value, after[case].get(name), scale))
        wrong = max(worst.values()) > LIMITS[key.split()[1]]
        bad += wrong
        figures = "  ".join(f"{kind} {value:.1e}" for kind, value in worst.items())
        print(f"{key:40s} {figures}{'  DIFFERS' if wrong else ''}  {before['refused'][:60]}")
    print(f"{len(old)} compared, {bad} differ")
    return bad


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--write")
    parser.add_argument("--weights")
    parser.add_argument("rest", nargs="*")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.write:
        write(given.write, given.weights, given.rest)
        sys.exit()
    old, new, *names = given.rest
    with tempfile.TemporaryDirectory() as folder:
        a, b = Path(folder, "a.pt"), Path(folder, "b.pt")
        for checkout, options in ((old, ["--write", a]), (new, ["--write", b, "--weights", a])):
            environment = {**os.environ, "PYTHONPATH": checkout}
            subprocess.run([sys.executable, __file__, *map(str, options), *names], env=environment, check=True)
        sys.exit(compare(torch.load(a), torch.load(b)) > 0)
