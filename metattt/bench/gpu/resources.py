"""What the compiled kernels of this process take: registers, stack and shared memory, from Triton's own record."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any


def compiled_kernels(package: str) -> list[dict[str, Any]]:
    """The kernels of a package's modules that were compiled and loaded so far; none under TRITON_INTERPRET=1.

    Returns:
        Of each: `kernel`, `warps`, `registers` of a thread, `stack` in bytes of a thread, `shared` in bytes of a
        program; launches that take the same are one.
    """
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for function in _functions(package):
        for cache in list(getattr(function, "device_caches", {}).values()):
            for kernel in list(cache[0].values()):
                row = _row(function, kernel)
                if row is not None:
                    found.setdefault(tuple(row.values()), row)
    return list(found.values())


def _functions(package: str) -> Iterator[Any]:
    """The kernels of modules that are imported, each once."""
    seen = set()
    for name, module in list(sys.modules.items()):
        if name == package or name.startswith(f"{package}."):
            for value in list(vars(module).values()):
                if hasattr(value, "device_caches") and id(value) not in seen:
                    seen.add(id(value))
                    yield value


def _row(function: Any, kernel: Any) -> dict[str, Any] | None:
    """None for what was compiled and never loaded."""
    spills = getattr(kernel, "n_spills", None)  # in words of a thread's local memory
    registers = getattr(kernel, "n_regs", None)
    if registers is None or spills is None:
        return None
    metadata = getattr(kernel, "metadata", None)
    file = str(getattr(function, "__module__", "")).rpartition(".")[2]  # kernels of two passes may have one name
    name = getattr(metadata, "name", None) or getattr(function, "__name__", "?")
    return {
        "kernel": f"{file}.{name}",
        "warps": getattr(metadata, "num_warps", None),
        "registers": registers,
        "stack": 4 * spills,
        "shared": getattr(metadata, "shared", None),
    }
