"""The command line: `metattt <command> [overrides...]`.

A command composes its configuration, `configs/<command>.yaml` with the overrides applied, and hands it to one function.
What a user can get wrong ends with one or two lines on stderr and exit code 2; Ctrl-C that the job did not handle ends
with 130.
"""

import errno
import importlib
import os
import re
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from metattt.composition.flags import Flags

COMMANDS = {  # name: (what it does, module, function)
    "train": (
        "train a language model, by default on the sources of Python's standard library",
        "metattt.training.train",
        "train",
    ),
    "eval": (
        "bits per byte of a checkpoint on the validation text, or accuracy on images: checkpoint=<run or file>",
        "metattt.evaluation.evaluate",
        "evaluate",
    ),
    "predict": (
        "the classes that a classifier sees in pictures: checkpoint=<run> source=<folder>",
        "metattt.evaluation.predict",
        "predict",
    ),
    "generate": ("continue a text: checkpoint=<run or file> prompt=<text>", "metattt.generation.generate", "generate"),
    "prepare": (
        "text to a file of tokens for data=shards: source=<files or dataset> target=<new folder>",
        "metattt.data.prepare",
        "prepare",
    ),
    "convert": (
        "published TTT checkpoints to ours and back: source=<folder or file> target=<new folder>",
        "metattt.checkpoints.convert",
        "convert",
    ),
    "export": (
        "a folder for Hugging Face Transformers: source=<run or folder> target=<new folder>",
        "metattt.hf.export",
        "export",
    ),
    "layers": (
        "the known layers: family and paper, three parts, state and cost of each; with layer=<name>, its equations",
        "metattt.catalog.known_layers",
        "layers",
    ),
    "runs": (
        "the runs in a folder, such as that of a sweep: table of their final metrics, and curves: metattt runs <folder>",
        "metattt.sweeps.table",
        "runs",
    ),
    "bench": (
        "check a layer against its oracle and time it, in every form: metattt bench learner=<name> length=2048",
        "metattt.bench",
        "bench",
    ),
    "check": (
        "check every law of the conformance suite for the chosen parts: learner=<name>",
        "metattt.testing",
        "check",
    ),
}

NAMED = {"runs": ("folder", r"[^=-][^=]*")}
"""Commands whose first word may be a value alone: its key, and what it looks like."""

MOVED = {"bench": ("speed.py layer", r"\w+"), "reproduce": ("claims.py", r".*")}
"""What is a script of the repository now, and what the first word after the command looks like there."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0, 2 for a mistake of the user's, 130 after Ctrl-C.

    Args:
        arguments: as on the command line, without the program's name; `sys.argv[1:]` if None.
    """
    try:
        code = _main(arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader of our output went away, e.g. `metattt layers | head`
        pass
    except SystemExit as end:  # as rich says the same
        if not isinstance(end.__context__, BrokenPipeError):
            raise
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it once more when it ends
    return 141


def _main(arguments: Sequence[str] | None) -> int:
    # Threads that spin while they wait slow every other process on the machine; libgomp reads this once, when torch is
    # imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0] in ("-h", "--help", "help"):
        print(_overview())
        return 0 if given else 2
    if given[0] == "--version":
        print(f"metattt {_version()}")
        return 0
    if given[0] in ("-sc", "--shell-completion"):  # as Hydra's scripts for shells call it
        given.insert(0, "train")
    command, overrides = given[0], given[1:]
    if command in NAMED and overrides and re.fullmatch(NAMED[command][1], overrides[0]):
        overrides[0] = f"{NAMED[command][0]}={overrides[0]}"
    first = overrides[0] if overrides else ""
    if command in MOVED and re.fullmatch(MOVED[command][1], first):
        script = MOVED[command][0] if not first or "=" in first else f"{MOVED[command][0].split()[0]} {first}"
        script = "gpu.py" if script == "speed.py gpu" else script
        return _fail(f"`metattt {command} {first}".rstrip() + f"` has moved: in a checkout of the repository, python benchmarks/{script}")
    if command not in COMMANDS:
        return _fail(f"`{command}` is not a command.{_did_you_mean(command)} Commands: {', '.join(COMMANDS)}")
    from metattt.composition.flags import take_flags
    from metattt.errors import MetaTTTError

    try:
        flags, overrides = take_flags(overrides, command)
        if flags.help:
            from metattt.composition.help import help_of

            print(help_of(command, COMMANDS[command][0], overrides))
            return 0
    except MetaTTTError as error:
        return _fail(str(error))
    _see_the_working_directory()
    return _run(command, overrides, flags)


def _see_the_working_directory() -> None:
    """Modules beside the user are found, as `python -m` finds them, but never in the place of one that is installed."""
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.append(os.getcwd())


def _run(command: str, overrides: list[str], flags: "Flags") -> int:
    """Compose the configuration of a command, and show it or call the command's function; or do so for every cell of a
    sweep."""
    from metattt.errors import MetaTTTError

    _, module, function = COMMANDS[command]
    code = 0
    try:
        if flags.completion:
            print(_completion(overrides), end="")
            return 0
        if flags.multirun:
            from metattt.sweeps.launch import sweep

            return sweep(command, module, overrides)
        from metattt.composition.compose import compose

        cfg = compose(*overrides, job=command)  # first: a mistake shows before anything heavy is imported
        if flags.cfg or flags.info:
            print(_shown(cfg, command, overrides, flags), end="")
        else:
            code = getattr(importlib.import_module(module), function)(cfg)
    except MetaTTTError as error:
        return _fail(str(error))
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # told by `main`
        raise
    except Exception as error:
        line = _fault_of_the_surroundings(error, command)
        if line is None:  # a bug of ours: the traceback is what helps
            raise
        return _fail(line)
    return code if isinstance(code, int) else 0


def _shown(cfg: "DictConfig", command: str, overrides: list[str], flags: "Flags") -> str:
    """What `--cfg` or `--info` prints."""
    from metattt.composition.compose import show
    from metattt.composition.information import show_hydra, show_info

    if flags.info:
        return show_info(flags.info, overrides, command)
    if flags.cfg == "job":
        return show(cfg, flags.resolve, flags.package)
    return show_hydra(flags.cfg or "", overrides, command, flags.package, flags.resolve)


def _completion(words: list[str]) -> str:
    from metattt.composition.information import complete

    return complete(words, tuple(COMMANDS))


def _fault_of_the_surroundings(error: Exception, command: str) -> str | None:
    """The message for what is the user's to mend and may happen anywhere: a full disk, a file without rights, a key
    taken away."""
    from omegaconf.errors import OmegaConfBaseException

    if isinstance(error, OSError) and error.strerror:
        advice = ": free some, or choose a folder on another disk" if error.errno == errno.ENOSPC else ""
        return f"{error.filename}: {error.strerror}{advice}" if error.filename else f"{error.strerror}{advice}"
    if isinstance(error, RuntimeError) and re.search(
        "inline_container|PytorchStreamWriter", str(error)
    ):  # torch.save, half way
        return "a checkpoint cannot be written whole: the disk is full; free some, or choose a folder on another disk"
    if isinstance(error, MemoryError) or re.search("out of memory|can't allocate memory|not enough memory", str(error)):
        tried = re.search(r"[Tt]ried to allocate ([\d.]+ ?\w+)", str(error))
        return (
            f"there is not enough memory{f' for another {tried[1]}' if tried else ''}: make the batch, the sequences or the model smaller"
        )
    if isinstance(error, OmegaConfBaseException) and error.full_key:
        return f"the configuration has no `{error.full_key}`, which `metattt {command}` needs: `metattt {command} --cfg` shows what it has"
    return None


def _fail(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return 2


def _did_you_mean(command: str) -> str:
    import difflib

    close = difflib.get_close_matches(command, COMMANDS, n=1)
    return f" Did you mean `metattt {close[0]}`?" if close else ""


def _version() -> str:
    try:
        return version("metattt")
    except PackageNotFoundError:
        return "(not installed: run from its sources)"


def _overview() -> str:
    """What `metattt --help` prints."""
    width = max(map(len, COMMANDS))
    lines = ["usage: metattt <command> [<key>=<value> ...]", "", "commands:"]
    lines += [f"  {name:<{width}}  {summary}" for name, (summary, _, _) in COMMANDS.items()]
    lines += ["", "metattt <command> --help lists what can be chosen and set, e.g. metattt train layer=ttt_mlp dim=128"]
    lines += [
        "metattt <command> --cfg prints the whole configuration without running it, --resolve with every value filled in"
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
