"""C++ sources compiled on first use by the system's compiler, for the processor at hand, and loaded with ctypes.

What was compiled stays in a folder of the user's cache under a name that depends on the sources, the compiler, its
options, the processor, and on the library itself: another process loads it again, and nothing stale or damaged is ever
loaded. Where nothing can be compiled, `load` returns None, and a warning says so once for each operation.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Mapping
from functools import cache
from pathlib import Path

HEADERS = Path(__file__).parent
# No -ffast-math: NaN and infinity keep their meaning, and the order of operations is that of the source.
OPTIONS = (
    *["-std=c++17", "-O3", "-shared", "-fPIC", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math"],
    f"-I{HEADERS}",
)
PROCESSOR_OPTIONS = (("-march=native",), ("-mcpu=native",), ())  #: the first that the compiler accepts

_log = logging.getLogger("metattt")
_lock = threading.Lock()
_loaded: dict[tuple[Path, tuple[tuple[str, int], ...]], ctypes.CDLL | None] = {}
_warned: set[str] = set()


def _after_fork() -> None:
    """Another thread may have held the lock, to compile: in the child it is not there to give it back."""
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def load(source: Path, defines: Mapping[str, int]) -> ctypes.CDLL | None:
    """The library made of `source` with its macros set to `defines`; None, with the reason in the debug log, where it
    cannot be compiled."""
    key = source, tuple(sorted(defines.items()))
    with _lock:
        if key not in _loaded:
            try:
                _loaded[key] = ctypes.CDLL(str(_compiled(source, [f"-D{name}={value}" for name, value in key[1]])))
            except (OSError, RuntimeError, ValueError) as error:
                _log.debug("%s is not compiled: %s", source, error)
                _loaded[key] = None
                _warn(source.stem if source.parent == HEADERS else source.parent.name, error)
        return _loaded[key]


def _compiled(source: Path, defines: list[str]) -> Path:
    compiler, version = _compiler()
    about = [*OPTIONS, str(PROCESSOR_OPTIONS), *defines, *compiler, version, _processor()]
    about += [path.read_text(encoding="utf-8") for path in (source, *sorted(HEADERS.glob("*.h")))]
    digest = hashlib.sha256("\0".join(about).encode()).hexdigest()
    name = f"{source.parent.name}-{digest[:24]}-%s.so"
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "metattt" / "native"
    for library in folder.glob(name % "*"):
        if library.name == name % _digest(library):  # a damaged one would end each process that calls it
            return library
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:  # several processes may compile it: the last one wins
        made = Path(scratch) / "made.so"
        for options in PROCESSOR_OPTIONS:
            run = _run([*compiler, *OPTIONS, *options, *defines, str(source), "-o", str(made)], timeout=300)
            if run.returncode == 0:
                return made.replace(folder / (name % _digest(made)))
    raise RuntimeError(f"{shlex.join(compiler)} failed: {run.stderr.strip()[:500]}")


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16]


def _run(command: list[str], timeout: float) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command, capture_output=True, encoding="utf-8", errors="replace", timeout=timeout, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"{command[0]} takes longer than {timeout:g} s") from error


@cache
def _compiler() -> tuple[tuple[str, ...], str]:
    """The compiler's command and what it says about itself."""
    chosen = os.environ.get("CXX")
    for command in [shlex.split(chosen)] if chosen else (["c++"], ["g++"], ["clang++"]):
        if command and shutil.which(command[0]):
            return tuple(command), _run([*command, "--version"], timeout=60).stdout
    raise RuntimeError(f"install a C++ compiler, or name one in CXX: {chosen or 'c++, g++, clang++'} not found")


def _warn(operation: str, error: Exception) -> None:
    if operation not in _warned:
        _warned.add(operation)
        said = "%s has no kernel here, and plain PyTorch takes several times as long: %s%s"
        hint = "; XDG_CACHE_HOME chooses another folder to compile in" if isinstance(error, OSError) else ""
        _log.warning(said, operation, error, hint)


@cache
def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    described = ("model name", "flags", "Features", "CPU implementer", "CPU part")
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(described)))
