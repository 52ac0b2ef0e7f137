"""Whether a tokenizer.json can be used without harm, tried out in a process of its own.

What is in such a file runs inside a library: expressions that never end, replacements that double a text over and over,
tables that are read beyond their end. None of that can be stopped from the process it happens in. So a process with
little time and memory encodes texts that bring it about, first.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from typing import Any

from metattt.errors import MetaTTTError

CPU_SECONDS = 10  # a tokenizer needs half a second for the texts here
WALL_SECONDS = 300  # on a machine that does much else
MEMORY = 2**33  # bytes of address space; one of 256,000 tokens needs a tenth
GROWTH = 64  # characters that replacements may make of one, together

# Runs as a program, with nothing of ours imported. A text that is refused in order (no unknown token, for one) is not
# harm: whoever encodes it is told.
PROGRAM = """
import json, resource, sys
path, seconds, memory = json.loads(sys.stdin.buffer.readline())
for kind, most in ((resource.RLIMIT_CPU, seconds), (resource.RLIMIT_AS, memory), (resource.RLIMIT_CORE, 0)):
    try:
        resource.setrlimit(kind, (most, most))
    except (ValueError, OSError):  # not on this system, or it is set lower already
        pass
sys.path[:] = path
import tokenizers
try:
    tokenizer = tokenizers.Tokenizer.from_str(sys.stdin.buffer.read().decode())
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation(), tokenizer.no_padding()
except Exception as error:
    sys.exit(f"refused: {error}")
prose = "The cat's 3 hats (10.5%) aren't here: naïve café, 你好世界, привет! \\U0001f600\\n\\tdef f(x): return x_1 + [0]*12\\n\\n"
runs = [one * 4096 for one in (*map(chr, range(128)), "é", "文", "\\u0301", "ａ", "a ", "ab", "aA1", "a\\n")]
for text in ["", *runs, *(one + "!" for one in runs), prose * 2500]:
    try:
        tokenizer.encode(text, add_special_tokens=False)
    except Exception:
        pass
print("fine")
"""

_fine: set[str] = set()  # checksums of what was tried out in this process


def try_tokenizer(content: str, name: str) -> None:
    """Tries a tokenizer out, once in a process for each content.

    Args:
        content: the text of a tokenizer.json.
        name: where it is from, for messages.

    Raises:
        MetaTTTError: the library refuses it, or it takes too long, too much memory, or ends the process.
    """
    try:
        data = content.encode()
    except UnicodeEncodeError as error:
        raise MetaTTTError(f"tokenizer={name} is damaged: it holds half a pair of surrogates") from error
    digest = hashlib.sha256(data).hexdigest()
    if digest in _fine:
        return
    header = json.dumps((sys.path, CPU_SECONDS, MEMORY)).encode() + b"\n"
    alone = {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "RUST_BACKTRACE": "0"}
    try:
        tried = subprocess.run(  # -P: what lies in the working directory is not imported
            [sys.executable, "-P", "-c", PROGRAM], input=header + data, capture_output=True, timeout=WALL_SECONDS,
            env=os.environ | alone, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise MetaTTTError(f"tokenizer={name} does not come to an end: it is damaged, or meant to harm") from error
    if tried.returncode == 0 and tried.stdout == b"fine\n":
        _fine.add(digest)
        return
    raise MetaTTTError(f"tokenizer={name} {_reason(tried.returncode, tried.stderr.decode(errors='replace'))}")


def trust(sha256: str) -> None:
    """Takes a tokenizer, by its checksum, for tried out: by the process that started this one."""
    _fine.add(sha256)


def _reason(code: int, said: str) -> str:
    lines = [line for line in said.strip().splitlines() if line.strip()]
    last = lines[-1][:200] if lines else ""
    if last.startswith("refused: "):
        return f"is not a tokenizer of the tokenizers library: {last.removeprefix('refused: ')}"
    if -code in (signal.SIGXCPU, signal.SIGKILL):
        return f"takes more than {CPU_SECONDS} s for a short text: an expression in it does not come to an end"
    if any("memory allocation" in line or "MemoryError" in line for line in lines):
        return f"takes more than {MEMORY / 2**30:.0f} GB of memory for a short text: it is damaged, or meant to harm"
    panic = next((line for line in lines if "PanicException" in line), last).partition("PanicException: ")
    return f"breaks the tokenizers library: {panic[2] or panic[0] or f'exit code {code}'}"


def growth_of(normalizer: Any) -> float:
    """Characters, at most, that the replacements of a normalizer (its JSON) make of one, all together."""
    if not isinstance(normalizer, dict):
        return 1.0
    together = 1.0
    for one in normalizer.get("normalizers") or ():
        together = min(together * growth_of(one), 1e300)
    text = normalizer.get("content") if normalizer.get("type") == "Replace" else normalizer.get("prepend")
    return together * max(1, len(text)) if isinstance(text, str) else together
