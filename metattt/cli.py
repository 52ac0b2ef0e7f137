"""The command line: `metattt <command> [overrides...]`.

A command composes its configuration, `configs/<command>.yaml` with the overrides applied, and hands it to one function.
A user's mistake ends with one or two lines on stderr and exit code 2. So does an error of a library or a bug; its
message names a file with the traceback. A Ctrl-C that the command does not handle ends with 130.
"""

import errno
import io
import os
import pkgutil
import re
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from metattt.errors import MetaTTTError, did_you_mean, printable, shown

if TYPE_CHECKING:
    from omegaconf import DictConfig

COMMANDS = {
    "train": "train a language model, by default on the sources of Python's standard library",
    "eval": "bits per byte of a checkpoint on the validation text, or accuracy on images: checkpoint=<run or file>",
    "adapt": "what a language model gains from learning the texts that it reads: checkpoint=<run> data.path=<texts>",
    "predict": "the classes that a classifier sees in pictures: checkpoint=<run> source=<folder>",
    "generate": "continue a text: checkpoint=<run or file> prompt=<text>",
    "prepare": "text to a file of tokens for data=shards: source=<files or dataset> target=<new folder>",
    "convert": "published TTT checkpoints to ours and back: source=<folder or file> target=<new folder>",
    "export": "a folder for Hugging Face Transformers: source=<run or folder> target=<new folder>",
    "layers": "the known layers: family and paper, three parts, state and cost of each; with layer=<name>, its "
    "equations",
    "runs": "the runs in a folder, such as that of a sweep: table of their final metrics, and curves: metattt runs "
    "<folder>",
    "bench": "check a layer against its oracle and time it, in every form: metattt bench learner=<name> length=2048",
    "check": "check every law of the conformance suite for the chosen parts: learner=<name>",
}
"""What each command does."""

FUNCTIONS = {
    "train": "metattt.training.train:train",
    "eval": "metattt.evaluation.evaluate:evaluate",
    "adapt": "metattt.adaptation.adapt:adapt",
    "predict": "metattt.evaluation.predict:predict",
    "generate": "metattt.generation.generate:generate",
    "prepare": "metattt.data.prepare:prepare",
    "convert": "metattt.checkpoints.convert:convert",
    "export": "metattt.hf.export:export",
    "layers": "metattt.catalog.known_layers:layers",
    "runs": "metattt.sweeps.table:runs",
    "bench": "metattt.bench:bench",
    "check": "metattt.testing:check",
}

NAMED = {"runs": ("folder", r"[^=-][^=]*")}
"""Commands whose first word may be a value alone: its key, and what it looks like."""

MOVED = {"bench": ("speed.py layer", r"\w+"), "reproduce": ("claims.py", r".*")}
"""Former commands that are scripts of the repository now, and the form of their first argument."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0, 2 for a mistake of the user's, 130 after Ctrl-C.

    Args:
        arguments: as on the command line, without the program's name; `sys.argv[1:]` if None.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by whoever started us; the first file opened would get its number
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 (until the end of the process)
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors in ("strict", "surrogateescape"):
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr has it: no run fails for a character in a table
    try:
        code = _main(arguments)
        sys.stdout.flush()
        return code
    except OSError as error:  # the reader of our output has closed, e.g. `metattt layers | head`, or its disk is full
        code = 141 if isinstance(error, BrokenPipeError) else _fail(f"standard output: {error.strerror}")
    except SystemExit as end:  # as rich says the same
        if not isinstance(end.__context__, BrokenPipeError):
            raise
        code = 141
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it once more when it ends
    return code


def _main(arguments: Sequence[str] | None) -> int:
    # Threads that spin while they wait slow every other process on the machine; libgomp reads this once, when torch is
    # imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0] in ("-h", "--help", "help"):
        print(_overview())
        return 0 if given else 2
    if given[0] == "--version":
        from metattt import __version__

        print(f"metattt {__version__}")
        return 0
    if given[0] in ("-sc", "--shell-completion"):  # as Hydra's scripts for shells call it
        given.insert(0, "train")
    command, words = given[0], given[1:]
    if command in NAMED and words and re.fullmatch(NAMED[command][1], words[0]):
        words[0] = f"{NAMED[command][0]}={words[0]}"
    first = words[0] if words else ""
    if command in MOVED and re.fullmatch(MOVED[command][1], first):
        script = MOVED[command][0] if not first or "=" in first else f"{MOVED[command][0].split()[0]} {first}"
        script = "gpu.py" if script == "speed.py gpu" else script
        told = f"`metattt {command} {first}".rstrip()
        return _fail(f"{told}` has moved: in a checkout of the repository, python benchmarks/{script}")
    if command not in COMMANDS:
        hint = did_you_mean(command, COMMANDS, "metattt ")
        return _fail(f"`{command}` is not a command.{hint} Commands: {', '.join(COMMANDS)}")
    cfg: list[DictConfig] = []
    try:
        return _run(command, words, cfg)
    except MetaTTTError as error:
        return 2 if error.said else _fail(str(error))
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # told by `main`
        raise
    except Exception as error:
        return _fail(_explained(error, command, cfg[0] if cfg else None))


def _run(command: str, words: list[str], composed: "list[DictConfig]") -> int:
    """Runs a command, or prints what Hydra's options ask for; `composed` receives the configuration."""
    if {"-h", "--help", "--hydra-help"} & set(words):
        from metattt.composition.help import help_of

        print(help_of(command, COMMANDS[command], words))
        return 0
    if not {"", os.getcwd()} & set(sys.path):  # modules of the current folder, as `python -m` has them; installed first
        sys.path.append(os.getcwd())
    from metattt.composition.application import complete, parse, show

    options = parse(words, command)
    if options.shell_completion:
        complete(options.overrides, tuple(COMMANDS))
        return 0
    if options.multirun:
        from metattt.sweeps.launch import sweep

        return sweep(command, options.overrides)
    from metattt.composition.compose import compose

    composed.append(compose(*options.overrides, job=command))  # mistakes are found before heavy imports
    if options.cfg or options.info:
        show(options, command, composed[0])
        return 0
    if command != "train" and "TORCHELASTIC_RUN_ID" in os.environ and (count := os.environ["WORLD_SIZE"]) != "1":
        raise MetaTTTError(
            f"torchrun has started {count} processes, and each would do all that `metattt {command}` does: start it "
            "without torchrun"
        )
    code = pkgutil.resolve_name(FUNCTIONS[command])(composed[0])
    return code if isinstance(code, int) else 0


def _explained(error: Exception, command: str, cfg: "DictConfig | None") -> str:
    """The message for an unexpected error."""
    if line := _fault_of_the_surroundings(error, command, cfg):
        return line
    frames = traceback.extract_tb(error.__traceback__)
    text = " ".join(str(error).split())[:400]
    kind, builtin = type(error).__name__, type(error).__module__ == "builtins"
    said = f"{kind}: {text}" if text and builtin else text or kind
    if any("_dynamo" in Path(frame.filename).parts for frame in frames):
        either = ", or model.checkpoint_blocks=false" if "support saved tensor hooks" in text else ""
        said = f"torch.compile cannot run this model, set compile=false{either}: {said.partition(' from user code')[0]}"
    elif builtin and Path(frames[-1].filename).is_relative_to(Path(__file__).parent):
        said = f"this looks like a bug; please report it, with the traceback and the command: {said}"
    elif override := _spoken_of(text, cfg):
        said += f" ({override})"
    return f"{said}{_written(error, cfg)}"


def _spoken_of(text: str, cfg: "DictConfig | None") -> str:
    """The override for an argument that a library's message names: one that the user gave, or an argument of the
    Trainer with an unmistakable name."""
    if cfg is None:
        return ""
    from omegaconf import OmegaConf

    given = [str(one).partition("=")[0] for one in cfg.get("given") or []]
    trainer = [f"trainer.{name}" for name in cfg.get("trainer") or {} if "_" in str(name)]
    for key in (*given, *trainer):
        if re.search(rf"\b{re.escape(key.rpartition('.')[2])}\b", text, re.IGNORECASE):
            return f"{key}={shown(OmegaConf.select(cfg, key))}"
    return ""


def _written(error: Exception, cfg: "DictConfig | None") -> str:
    """Writes the traceback to the run's folder or a temporary one; returns a phrase that says where."""
    folder = None if cfg is None else cfg.get("output_dir")
    try:
        place = str(folder) if isinstance(folder, str) and Path(folder).is_dir() else None
        number, name = tempfile.mkstemp(".txt", "traceback-", place)
        with os.fdopen(number, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.writelines(traceback.format_exception(error))
    except OSError:
        return ""
    return f"; the traceback is in {name}"


def _fault_of_the_surroundings(error: Exception, command: str, cfg: "DictConfig | None") -> str | None:
    """The message for errors that may happen anywhere and that the user can fix: a full disk, missing permissions, a
    removed key."""
    from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException

    from metattt.composition.messages import first_line, out_of_memory

    if isinstance(error, OSError) and error.strerror:
        advice = ": free some, or choose a folder on another disk" if error.errno == errno.ENOSPC else ""
        advice = ": the limit is that of `ulimit -f`" if error.errno == errno.EFBIG else advice
        place = error.filename or ("current folder" if error.errno == errno.ENOENT else cfg and cfg.get("output_dir"))
        return f"{place}: {error.strerror}{advice}" if place else f"{error.strerror}{advice}"  # a write names no file
    if line := out_of_memory(error):
        return line
    if "wandb login" in str(error):
        return "W&B has no key: run `wandb login`, or set logger.wandb.offline=true"
    if "InvalidCxxCompiler" in str(error):
        return "torch.compile finds no C++ compiler: install one, or name it in CXX, or set compile=false"
    if isinstance(error, InterpolationResolutionError):
        return f"{error.full_key}: {first_line(error)}: set {error.full_key}=<value>, or leave out what asks for it"
    if isinstance(error, OmegaConfBaseException) and error.full_key:
        needs = f"`metattt {command}` needs: `metattt {command} --cfg job` shows what it has"
        return f"the configuration has no `{error.full_key}`, which {needs}"
    return None


def _fail(message: str) -> int:
    print("error:", printable(message).replace("\n", "\n       "), file=sys.stderr)
    return 2


def _overview() -> str:
    """What `metattt --help` prints."""
    width = max(map(len, COMMANDS))
    lines = ["usage: metattt <command> [<key>=<value> ...]", "", "commands:"]
    lines += [f"  {name:<{width}}  {summary}" for name, summary in COMMANDS.items()]
    lines += ["", "metattt <command> --help lists what can be chosen and set, e.g. metattt train layer=ttt_mlp dim=128"]
    lines += ["metattt <command> --cfg job prints the configuration and runs nothing, --resolve with values filled in"]
    return "\n".join(lines)
