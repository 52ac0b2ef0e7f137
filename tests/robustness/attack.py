"""An attack on everything that the commands read: damaged files, malicious files, bad commands; a table of what came of
them, and exit code 1 if anything was bad.

    python tests/robustness/attack.py --reads 1500 --malicious 60 --commands 300 --folder /tmp/attack
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import os
import random
import shlex
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import bad_commands
import torch
from child import Outcome, metattt, run
from damage import of_file
from malicious import malicious

sys.path.append(str(Path(__file__).parent.parent))
from processes_for_tests import Program

COLUMNS = ("reads", "clear error", "same result", "older one, said", "silently wrong", "traceback", "hang", "code run")
WORST = COLUMNS[4:]
STEPS, MORE = 4, 6  # of a run, and of the run that goes on
TAKEN = "is taken instead"  # what a run says that goes on from an older checkpoint
TRAIN = (
    "train dim=8 num_heads=2 model.num_layers=1 model.ffn_dim=16 data.context_length=24 data.batch_size=4 sample=false "
    "optimizer.mini_batch_size=8 trainer.accelerator=cpu trainer.val_check_interval=2 trainer.log_every_n_steps=1 "
    "callbacks.checkpoint.every_steps=2 ~callbacks.loss_curve trainer.max_steps="
)
RUN = f"{TRAIN}{STEPS} data.path={{text}} output_dir={{here}}"
PREPARE = "prepare source={text} validation_fraction=0.3 workers=1 target={here}"
MADE = {
    "run": f"{RUN}/run",
    "foreign_run": f"{RUN}/foreign_run seed=1",
    "sharded": f"{RUN}/sharded trainer=fsdp trainer.devices=2",
    "published": "convert source={here}/run target={here}/published direction=to_published",
    "converted": "convert source={here}/published target={here}/converted",
    "shards": f"{PREPARE}/shards seed=0",
    "foreign_shards": f"{PREPARE}/foreign_shards seed=1",
}
"""Artifact -> the command that makes it. A foreign one has files to put in the place of others."""
EVAL = "eval checkpoint={it} data.path={text} data.context_length=24 split=all device=cpu output_dir={new}"
GENERATE = "generate checkpoint={it} prompt='the state' max_new_tokens=8 temperature=0 device=cpu"
PUBLISH = "convert source={it} target={new} direction=to_published"
RESUME = f"train resume={{it}} trainer.max_steps={MORE}"
NEW = f"{TRAIN}1 output_dir={{new}}"
INIT = f"{NEW} data.path={{text}} init_from={{it}}"
READ_BY = {
    "run": (EVAL, GENERATE, PUBLISH, RESUME, INIT),
    "sharded": (EVAL, GENERATE, PUBLISH, f"{RESUME} trainer=default trainer.devices=1"),
    "converted": (EVAL, GENERATE, PUBLISH, INIT),
    "published": (EVAL, GENERATE, "convert source={it} target={new}"),
    "shards": (f"{NEW} data=shards data.path={{it}}", EVAL.format(it="{here}/run", text="{it}", new="{new}")),
}
"""Artifact -> the commands that read it."""
FEW_TRAIN = 6  # one of so many reads trains, which takes seconds


class Artifacts:
    """The things under attack, each a folder below `home`, made by the commands themselves.

    Args:
        home: a folder of ours; what an attack before has made is used again.
        made: of `MADE`.
        main: the command line that reads them.
    """

    def __init__(self, home: Path, made: Sequence[str] = tuple(MADE), main: Callable[[Sequence[str]], int] = metattt):
        self.home, self.work, self.main = home, home / "work", main
        self.it, self.new = self.work / "it", self.work / "new"
        self.paths = {"here": home, "text": home / "text", "it": self.it, "new": self.new}
        (home / "text").mkdir(parents=True, exist_ok=True)
        for index in range(6):
            drawn = random.Random(index)
            words = " ".join(drawn.choice(("state", "model", "learns", "while", "it", "reads")) for _ in range(300))
            (home / "text" / f"{index}.txt").write_text(words)
        for thing in made:
            if not (home / thing).exists():
                done = Program("-m", "metattt", *shlex.split(MADE[thing].format(**self.paths)), folder=home).done()
                if done.returncode:
                    raise RuntimeError(f"{thing} cannot be made: {done.stderr}")

    def fresh(self, thing: str) -> Path:
        """A copy of a thing, to be damaged and read, in the place that the commands are given."""
        shutil.rmtree(self.work, ignore_errors=True)
        shutil.copytree(self.home / thing, self.it, symlinks=True)
        return self.it

    def read(self, command: str) -> Outcome:
        """Runs a command on the copy; of a result, `detail` stands for all that it made."""
        words = shlex.split(command.format(**self.paths))
        found = run(words, [self.work, Path(tempfile.gettempdir())], main=self.main)
        return found._replace(detail=self._made(words, found.out)) if found.kind == "result" else found

    def undamaged(self, thing: str, command: str) -> tuple[str, str | None]:
        """What a command makes of a thing, and, where it goes on with a run, of one without its newest checkpoint."""
        found = []
        for newest in (True, False) if "resume=" in command else (True,):
            copy = self.fresh(thing)
            if not newest:
                shutil.rmtree(copy / "checkpoints" / f"step-{STEPS:08}")
            outcome = self.read(command)
            if outcome.kind != "result":
                raise RuntimeError(f"the undamaged {thing} cannot be read by {command}: {outcome}")
            found.append(outcome.detail)
        return found[0], found[1] if len(found) > 1 else None

    def _made(self, words: Sequence[str], printed: str) -> str:
        if words[0] == "generate":
            return printed
        if words[0] != "train":
            file = self.new / {"eval": "by_position.csv", "convert": "model.safetensors"}[words[0]]
            return hashlib.sha256(file.read_bytes()).hexdigest()
        resumed = words[1].startswith("resume=")
        with ((self.it if resumed else self.new) / "metrics.csv").open(newline="") as stream:
            rows = [(int(row["step"]), row.get("train/loss")) for row in csv.DictReader(stream)]
        return " ".join(f"{step}:{loss}" for step, loss in rows if loss and (step > STEPS or not resumed))


class Tally(dict[str, Counter[str]]):
    """Counts of outcomes by row; and what was bad, in `bad`."""

    def __init__(self) -> None:
        self.bad: list[str] = []

    def add(self, row: str, outcome: Outcome, what: str, expected: str | None = None, older: str | None = None) -> None:
        """Counts an outcome: `expected` is what the undamaged thing gives (None: any result is allowed), `older` what
        the checkpoint before gives, which is allowed if the command says so."""
        column = {"error": "clear error", "code": "code run"}.get(outcome.kind, outcome.kind)
        if column == "result":
            wrong = expected is not None and outcome.detail != expected
            said = wrong and outcome.detail == older and TAKEN in outcome.out + outcome.err
            column = "older one, said" if said else "silently wrong" if wrong else "same result"
        self.setdefault(row, Counter()).update(("reads", column))
        if column in WORST:
            self.bad.append(f"{row}: {column}: {what}: {outcome.detail[-600:]}")
            print(self.bad[-1], flush=True)

    def lines(self) -> Iterator[str]:
        """The table in Markdown."""
        yield f"| attack | {' | '.join(COLUMNS)} |"
        yield "|---" * (len(COLUMNS) + 1) + "|"
        for row, counts in [*self.items(), ("**all**", sum(self.values(), Counter[str]()))]:
            yield f"| {row} | {' | '.join(str(counts[column]) for column in COLUMNS)} |"


def read_damaged(artifacts: Artifacts, count: int, draw: random.Random, tally: Tally) -> None:
    """Damages files one at a time, and has commands read them, drawn evenly from all."""
    every: list[tuple[str, Path, int, str]] = []
    for thing in READ_BY:
        for file in sorted((artifacts.home / thing).rglob("*")):
            place = file.relative_to(artifacts.home)
            if file.is_file() and file.stat().st_size and "step-00000002" not in file.parts:  # the older checkpoint
                foreign = artifacts.home / f"foreign_{place}"
                number = len(list(of_file(file, foreign, 0)))
                every += [(thing, place, index, command) for index in range(number) for command in READ_BY[thing]]
    slow, quick = ([one for one in every if one[3].startswith("train") == trains] for trains in (True, False))
    few = min(len(slow), count // FEW_TRAIN)
    expected: dict[tuple[str, str], tuple[str, str | None]] = {}
    for thing, place, index, command in draw.sample(slow, few) + draw.sample(quick, min(len(quick), count - few)):
        if (thing, command) not in expected:
            expected[thing, command] = artifacts.undamaged(thing, command)
        file = artifacts.fresh(thing) / place.relative_to(thing)
        name, damage = list(of_file(file, artifacts.home / f"foreign_{place}", 0))[index]
        damage()
        what = f"{place} {name}, {command:.20}"
        tally.add(f"{thing}, damaged", artifacts.read(command), what, *expected[thing, command])


def read_malicious(artifacts: Artifacts, count: int, draw: random.Random, tally: Tally) -> None:
    """Has the commands read files that are made to harm."""
    canary, payload = artifacts.home / "canary", artifacts.home / "payload.py"
    payload.write_text(f"open({str(canary)!r}, 'w').close()\nclass Learner: ...\ndef run(): ...\n")
    sys.path.append(str(artifacts.home))
    every = list(malicious())
    for one in draw.sample(every, min(len(every), count)):
        for command in (EVAL, RESUME) if one.thing == "run" else READ_BY[one.thing]:
            one.make(artifacts.fresh(one.thing), canary)
            outcome = artifacts.read(command)
            if canary.exists():
                canary.unlink()
                outcome = outcome._replace(kind="code")
            tally.add(f"malicious: {one.kind}", outcome, f"{one.name}, {command:.20}")


def run_bad_commands(home: Path, count: int, draw: random.Random, tally: Tally) -> None:
    """Runs commands that are wrong. One that is taken counts as silently wrong."""
    every = bad_commands.every(home)
    os.chdir(home)
    for group, words in draw.sample(every, min(len(every), count)):
        tally.add(f"command: {group}", run(words, [home]), shlex.join(words), expected="refused")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reads", type=int, default=1500, help="commands on damaged files")
    parser.add_argument("--malicious", type=int, default=10**6, help="malicious files, at most")
    parser.add_argument("--commands", type=int, default=10**6, help="bad commands, at most")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn")
    parser.add_argument("--folder", type=Path, required=True, help="for what is attacked")
    given = parser.parse_args()
    torch.set_num_threads(1)  # a forked child has no other threads
    import metattt.training.train  # noqa: F401, so that no child needs to
    from metattt.native.passes import library

    library()  # asks the compiler who it is, which no child may

    tally, draw, home = Tally(), random.Random(given.seed), given.folder.resolve()
    artifacts = Artifacts(home)
    read_damaged(artifacts, given.reads, draw, tally)
    read_malicious(artifacts, given.malicious, draw, tally)
    run_bad_commands(home / "commands", given.commands, draw, tally)
    print("\n".join(tally.lines()))
    return 1 if tally.bad else 0


if __name__ == "__main__":
    sys.exit(main())
