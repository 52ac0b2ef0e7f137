"""`metattt bench quality`: every known layer in the main job, each at its own best learning rate, several seeds a row."""

from __future__ import annotations

import contextlib
import io
import math
import shutil
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from metattt.bench.base import Benchmark, check_counts
from metattt.bench.cells import Cell, Cells
from metattt.bench.report import Report, Row
from metattt.composition.compose import compose
from metattt.errors import MetaTTTError, check_integer, check_number
from metattt.registry import register

ROWS = (
    "linear_attention", "linear_attention_elu", "retnet", "mamba2", "gla", "hgrn2", "mamba", "mamba2_mixer", "longhorn",
    "delta_net", "gated_delta_net", "gated_delta_net2", "kda", "comba", "delta_gradient", "delta_product", "gated_delta_product",
    "preconditioned_delta_net", "rwkv7", "ttt_linear", "ttt_mlp", "titans", "lact", "moneta", "yaad", "memora", "mesa_net",
    "attention", "window_attention",
)  # fmt: skip
BASELINE = "linear_attention"
BEHIND = 1.1  # times the baseline's bits: a row above is told


@register(group="benchmark", name="quality")
class Quality(Benchmark):
    """Trains every row at every rate, takes for each row the rate with the least validation loss, and reports its loss on
    a third part of the documents.

    Args:
        rows: known layers (`layer=<name>`); None: `ROWS`.
        rates: peak learning rates of the outer loop.
        seeds: of the initial parameters and of the order of the windows.
        choosing: seeds, the first ones, that are trained at every rate; the others are trained at the best alone.
        steps, dim, num_heads, num_layers, context_length, batch_size: of every run.
        text: what to read, as `data.path`.
        held_out_bytes: of the validation text, and of the test text.
        accelerator: as of Lightning's Trainer.
        overrides: of the training's configuration, for all cells; they win.
        keep: folder of the finished cells, one file each; None: `quality-cells` beside the report.
    """

    def __init__(
        self,
        rows: Sequence[str] | None = None,
        rates: Sequence[float] = (2e-3, 4e-3, 8e-3),
        seeds: Sequence[int] = (0, 1, 2),
        choosing: int = 1,
        steps: int = 160,
        dim: int = 128,
        num_heads: int = 4,
        num_layers: int = 2,
        context_length: int = 256,
        batch_size: int = 8,
        text: str | None = None,
        held_out_bytes: int = 131072,
        accelerator: str = "cpu",
        overrides: Sequence[str] = (),
        keep: str | None = None,
    ):
        self.sizes = {"steps": steps, "dim": dim, "num_heads": num_heads, "num_layers": num_layers}
        self.sizes |= {"context_length": context_length, "batch_size": batch_size, "held_out_bytes": held_out_bytes}
        check_counts(**self.sizes)
        for rate in rates:
            check_number("benchmark.rates", rate, above=0)
        for seed in seeds:
            check_integer("benchmark.seeds", seed, 0, 2**32 - 1)
        for name, values in (("rows", ROWS if rows is None else rows), ("rates", rates), ("seeds", seeds)):
            if not values or len(set(values)) < len(values):
                raise MetaTTTError(f"benchmark.{name}={list(values)} is not allowed: give one or more, each once")
        check_integer("benchmark.choosing", choosing, 1, len(seeds), advice=" (some of benchmark.seeds)")
        self.rows, self.rates = list(ROWS if rows is None else rows), sorted(float(rate) for rate in rates)
        self.seeds, self.choosing = list(seeds), choosing
        self.text, self.accelerator, self.overrides = text, accelerator, list(overrides)
        self.keep = None if keep is None else Path(keep).expanduser()

    def keep_in(self, folder: Path) -> None:
        self.keep = self.keep or folder / "quality-cells"

    def run(self, say: Callable[[str], None]) -> Report:
        for row in self.rows:  # a misspelt row must not show after the others' hours
            self._compose(row, self.rates[0], self.seeds[0])
        if self.keep is None:
            raise MetaTTTError("benchmark.keep=null: there is no folder to keep cells in, set benchmark.keep=<folder>")
        cells = Cells(self.keep, self._train)
        table, failed = [], []
        found: dict[str, tuple[float, list[Cell]]] = {}
        tried: dict[str, dict[float, float]] = {}
        for row in self.rows:
            tried[row] = {}
            for rate in self.rates:
                first = [self._cell(cells, row, rate, seed, say) for seed in self.seeds[: self.choosing]]
                tried[row][rate] = statistics.mean(cell.validation for cell in first)
            best = min(self.rates, key=tried[row].__getitem__)
            if not math.isfinite(tried[row][best]):
                failed.append(row)
                continue
            found[row] = best, [self._cell(cells, row, best, seed, say) for seed in self.seeds]
        baseline = statistics.mean(cell.test for cell in found[BASELINE][1]) if BASELINE in found else None
        for row, (best, results) in sorted(found.items(), key=lambda one: statistics.mean(cell.test for cell in one[1][1])):
            table.append(self._row(row, best, results, tried[row], baseline))
        return Report(
            "Known layers in one model, each at its own best learning rate",
            self._text(table, failed),
            {"Bits per byte of the test text": table},
            [],
            {
                "rows": self.rows, "rates": self.rates, "seeds": self.seeds, "choosing": self.choosing, **self.sizes,
                "text": self.text, "overrides": self.overrides,
                "validation": {row: {f"{rate:g}": value for rate, value in of.items()} for row, of in tried.items()},
                "test": {row: [cell.test for cell in cells_of] for row, (_, cells_of) in found.items()},
            },
        )  # fmt: skip

    def _given(self, row: str, rate: float, seed: int) -> list[str]:
        """The overrides of a cell."""
        sizes = self.sizes
        return [
            f"layer={row}", f"training.lr={rate:g}", f"seed={seed}", "data=text", "data.split_seed=0", "data.test_fraction=0.1",
            f"data.path={'null' if self.text is None else self.text}", f"data.validation_max_bytes={sizes['held_out_bytes']}",
            f"dim={sizes['dim']}", f"num_heads={sizes['num_heads']}", f"model.num_layers={sizes['num_layers']}",
            f"data.context_length={sizes['context_length']}", f"data.batch_size={sizes['batch_size']}",
            f"trainer.max_steps={sizes['steps']}", f"trainer.accelerator={self.accelerator}", "trainer.val_check_interval=1.0",
            "sample=false", *self.overrides,
        ]  # fmt: skip

    def _cell(self, cells: Cells, row: str, rate: float, seed: int, say: Callable[[str], None]) -> Cell:
        config = OmegaConf.to_yaml(self._compose(row, rate, seed))
        return cells.get(self._given(row, rate, seed), config, say)

    def _compose(self, row: str, rate: float, seed: int, folder: Path = Path("unused")) -> Any:
        entries = [f"~callbacks.{name}" for name in ("progress", "loss_curve", "watch", "inner_health")]
        return compose(*self._given(row, rate, seed), *entries, f"output_dir={folder}", "resume=auto")

    def _train(self, given: Sequence[str], folder: Path) -> Cell:
        """Trains a cell in `folder`, or goes on with what was begun there, and scores it."""
        from metattt.checkpoints.files import find_checkpoint
        from metattt.checkpoints.trained import load_model
        from metattt.composition.instantiate import instantiate_part
        from metattt.evaluation.by_position import score
        from metattt.metrics_file import read_rows
        from metattt.training.train import train  # not for the benchmarks beside this one: it waits for Lightning

        row, rate, seed = (one.partition("=")[2] for one in given[:3])
        cfg = self._compose(row, float(rate), int(seed), folder)
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                code = train(cfg)
            if code:  # a signal: the run has written a checkpoint, and goes on when the benchmark is called again
                raise SystemExit(code)
            model, _ = load_model(find_checkpoint(str(folder)), torch.device("cuda" if self.accelerator == "gpu" else "cpu"))
            data = instantiate_part(cfg, "data")
            data.setup()
            test = score(model, data.loader("test"), data.tokenizer.token_bytes).bits_per_byte
            validated = [row for row in read_rows(folder / "metrics.csv")[0] if row.get("validation/bits_per_byte")]
        except MetaTTTError as error:
            if "finite" not in str(error):
                raise
            shutil.rmtree(folder)
            return Cell(math.inf, math.inf, 0, str(error).splitlines()[0])
        parameters = sum(p.numel() for p in model.parameters())
        shutil.rmtree(folder)
        return Cell(float(validated[-1]["validation/bits_per_byte"]), test, parameters, None)

    def _row(self, row: str, best: float, results: list[Cell], tried: dict[float, float], baseline: float | None) -> Row:
        test = [cell.test for cell in results]
        spread = statistics.stdev(test) if len(test) > 1 else None
        mean = statistics.mean(test)
        edge = len(self.rates) > 1 and best in (self.rates[0], self.rates[-1])
        return {
            "layer": row,
            "bits per byte": f"{mean:.3f}" + ("" if spread is None else f" ± {spread:.3f}"),
            f"times {BASELINE}": None if baseline is None else f"{mean / baseline:.3f}",
            "best rate": f"{best:g}" + (" (an end of those tried)" if edge else ""),
            "validation at each rate": ", ".join(f"{rate:g}: {bits:.3f}" for rate, bits in tried.items()),
            "parameters": results[0].parameters,
        }

    def _text(self, table: list[Row], failed: list[str]) -> str:
        sizes = self.sizes
        behind = [
            f"{row['layer']} ({row[f'times {BASELINE}']})"
            for row in table
            if row[f"times {BASELINE}"] is not None and float(row[f"times {BASELINE}"]) > BEHIND
        ]
        text = (
            f"The main job (`metattt train layer=<name>`) with {sizes['steps']} steps of {sizes['batch_size']} windows of "
            f"{sizes['context_length']} bytes, {sizes['num_layers']} blocks of width {sizes['dim']} with {sizes['num_heads']} heads"
            f"{', ' + ' '.join(self.overrides) if self.overrides else ''}; text: "
            f"{'the Python standard library' if self.text is None else self.text}. Each row has the learning rate, of "
            f"{len(self.rates)}, that is best on the validation documents (mean over {self.choosing} "
            f"seed{'s' if self.choosing > 1 else ''}); what is reported is the loss on test documents, which neither training nor "
            f"that choice saw, mean ± standard deviation over {len(self.seeds)} seed{'s' if len(self.seeds) > 1 else ''}. "
            "Made by `metattt bench quality`."
        )
        if behind:
            text += f"\n\nMore than {BEHIND - 1:.0%} behind {BASELINE}: {', '.join(behind)}."
        if failed:
            text += f"\n\nDiverged at every rate: {', '.join(failed)}."
        return text
