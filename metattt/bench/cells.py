"""Cells of a benchmark that lasts: each is a run whose result is kept in a file of its own, and is not run again."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from metattt.disk import digest, read_object, write_whole
from metattt.errors import MetaTTTError


@dataclass(frozen=True)
class Cell:
    """What a run came to.

    Attributes:
        validation, test: bits per byte of two texts; infinite where the run has diverged.
        parameters: of the model.
        failure: why it diverged; None: it did not.
    """

    validation: float
    test: float
    parameters: int
    failure: str | None


class Cells:
    """Results by the overrides of their runs.

    Args:
        folder: of the files.
        run: the run of some overrides, in a folder that holds what an earlier life of it has left.
    """

    def __init__(self, folder: Path, run: Callable[[Sequence[str], Path], Cell]):
        self.folder, self.run = folder, run

    def get(self, given: Sequence[str], config: str, say: Callable[[str], None]) -> Cell:
        """The result of a run: from its file, or else of the run itself.

        Args:
            given: its overrides, those that tell it from others first.
            config: what they are composed to: a result of another configuration is not taken, and run again.
            say: shows a line.

        Raises:
            MetaTTTError: what the run raises; a file that is none of ours.
        """
        title = " ".join(given[:3])
        name = re.sub(r"[^\w.,=-]", "_", title) + "-" + digest("\n".join(given).encode())[:8]
        file = self.folder / f"{name}.json"
        made_of = digest(config.encode())
        if file.exists() and (found := _read(file, list(given), made_of)) is not None:
            return found
        self.folder.mkdir(parents=True, exist_ok=True)
        cell = self.run(given, self.folder / f"{name}.run")
        content = {"given": list(given), "config": made_of} | {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in asdict(cell).items()
        }
        write_whole(file, (json.dumps(content, indent=1) + "\n").encode())
        say(f"{title}: {cell.failure or f'{cell.validation:.4f} bits per byte of the validation text'}")
        return cell


def _read(file: Path, given: list[str], made_of: str) -> Cell | None:
    """The result in a file; None if it is that of another configuration."""
    content = read_object(file)
    if content.get("given") == given and isinstance(content.get("config"), str) and content["config"] != made_of:
        return None
    bits = [content.get(key) for key in ("validation", "test")]
    count, failure = content.get("parameters"), content.get("failure")
    numbers = all(isinstance(one, int | float) and not isinstance(one, bool) for one in bits)
    if content.get("given") != given or "config" not in content or type(count) is not int or not (numbers or isinstance(failure, str)):
        raise MetaTTTError(f"{file} is no result of this benchmark: remove it, or set benchmark.keep=<another folder>")
    validation, test = (math.inf if one is None else float(one) for one in bits)
    return Cell(validation, test, count, failure)
