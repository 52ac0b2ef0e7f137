"""What a training run says: progress, times, gradient norms, the sample; and that an evaluation loses nothing."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import WeightAveraging
from omegaconf import OmegaConf
from refusals_for_tests import refusal
from rich.console import Console
from runs_for_tests import TINY, column, tiny
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.optim.swa_utils import AveragedModel

from metattt.composition.compose import build, compose
from metattt.data.text import ByteTokenizer
from metattt.errors import MetaTTTError, printable
from metattt.models.block import Block
from metattt.models.language_model import LanguageModel
from metattt.training import callbacks, compiling
from metattt.training.callbacks import LossCurve, Progress
from metattt.training.csv_log import CSVLog
from metattt.training.inner_warmup import InnerWarmup
from metattt.training.text_module import TextJob
from metattt.training.train import train


def test_a_line_shows_a_validation_once_and_the_log_has_speed_and_gradients(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    small = [one for one in TINY if "progress" not in one]
    settings = ("trainer.val_check_interval=4", "trainer.accumulate_grad_batches=2", "trainer.gradient_clip_val=1e-9")
    assert train(compose(*small, *settings, f"data.path={corpus}", f"output_dir={run}", "trainer.max_steps=8")) == 0
    output = capsys.readouterr()
    lines = [line for line in output.err.splitlines() if line.startswith("step ")]
    assert [line.count("validation bits/byte (step 4)") for line in lines] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert all(" s left" in line for line in lines) and "sample" not in output.out
    assert all(norm > 1e-3 for norm in column(run, "gradient_norm").values())  # before clipping
    assert list(column(run, "tokens_per_second")) == list(range(2, 9))


def test_the_bar_does_not_ask_the_device_at_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    now, asked = 100.0, []
    monkeypatch.setattr("time.monotonic", lambda: now)

    class Metric(torch.Tensor):
        def item(self) -> float:
            asked.append(now)
            return super().item()

    bar = Progress()
    bar.validated = 40
    known = {"train/loss": torch.tensor(1.5), "tokens_per_second": torch.tensor(12345.6)}
    metrics = {name: value.as_subclass(Metric) for name, value in known.items()}
    metrics["validation/bits_per_byte"] = torch.tensor(2.0)
    trainer: Any = SimpleNamespace(callback_metrics=metrics, max_steps=100, global_step=40)
    shown = bar.get_metrics(trainer, None)  # type: ignore[arg-type]
    assert shown == {"loss": "1.500", "validation bits/byte (step 40)": "2.000", "tokens/s": "12,346"}
    for now in (100.4, 100.6):  # noqa: B007 (the clock looks at it)
        assert bar.get_metrics(trainer, None) == shown  # type: ignore[arg-type]
    assert asked == [100.0] * 2 + [100.6] * 2


def test_a_sample_steers_no_terminal_and_compiles_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    given = b"a\x1b[31m\x07\x00\r\n\tz\xff\x7f" + "é\u202e\x9b\u200d".encode()
    assert printable(given.decode(errors="replace")) == "a\\x1b[31m\\x07\\x00\\r\n\tz\ufffd\\x7fé\\u202e\\x9b\u200d"
    model, compiler = LanguageModel(257, 8, 1, lambda: build("linear_attention", dim=8, num_heads=2)), CompileCounter()
    for block in model.blocks:
        block.compile(backend=compiler)
    model(torch.zeros(1, 16, dtype=torch.long))
    trained = compiler.frame_count
    assert trained > 0
    job = TextJob.__new__(TextJob)
    job.cfg = OmegaConf.create({"seed": 0})  # of a run before the switch
    job.data = SimpleNamespace(tokenizer=ByteTokenizer(), sample_document=lambda: b"\x1b[0m prompt")  # type: ignore[assignment]
    job.sample(Console(), SimpleNamespace(model=model, device="cpu"))  # type: ignore[arg-type]
    assert compiler.frame_count == trained
    assert "\\x1b[0m prompt" in capsys.readouterr().out
    model(torch.zeros(1, 16, dtype=torch.long))
    assert compiler.frame_count == trained  # and training goes on with what it has


def warmed(warmup: InnerWarmup, *overrides: str) -> tuple[Any, Any, Any]:
    """A layer, whose rate rises in four of eight steps, and what stands for its run: trainer and module."""
    layer = build("layer=ttt_linear", "dim=8", "num_heads=2", *overrides)
    module: Any = SimpleNamespace(modules=layer.modules, recipe=SimpleNamespace(warmup_steps=lambda steps: 4))
    trainer: Any = SimpleNamespace(global_step=0, estimated_stepping_batches=8)
    warmup.on_fit_start(trainer, module)
    return layer, trainer, module


@pytest.mark.parametrize("base_lr", [0.1, -0.1])
def test_the_warm_up_of_an_inner_learning_rate_keeps_its_sign(base_lr: float) -> None:
    warmup = InnerWarmup(0.01)
    layer, trainer, module = warmed(warmup, f"optimizer.base_lr={base_lr}")
    sign, rates = 1 if base_lr > 0 else -1, []
    for trainer.global_step in range(6):
        warmup.on_train_batch_start(trainer, module, None, 0)
        rates.append(layer.optimizer.scale * 4)  # head width
    assert rates == pytest.approx([sign * rate for rate in (0.01, 0.0325, 0.055, 0.0775, 0.1, 0.1)])
    trainer.global_step = 0
    warmup.on_train_batch_start(trainer, module, None, 0)
    warmup.on_exception(trainer, module, KeyboardInterrupt())  # in a notebook: the model has the final rate
    assert layer.optimizer.scale * 4 == pytest.approx(base_lr)
    for other in (("ttt_linear", "optimizer.base_lr=0"), ("lact",), ("mamba2",)):
        module.modules = build(f"layer={other[0]}", "dim=8", "num_heads=2", *other[1:]).modules
        refusal(lambda: warmup.on_fit_start(trainer, module), "that is not 0: leave it out")


@pytest.mark.slow
@pytest.mark.parametrize("lr", ["per_head", "constant"])
def test_the_warm_up_compiles_once(lr: str) -> None:
    warmup, compiler = InnerWarmup(), CompileCounter()
    layer, trainer, module = warmed(warmup, "optimizer.mini_batch_size=4", f"optimizer.lr={lr}")
    compiled, x, found = torch.compile(layer, backend=compiler), torch.randn(1, 4, 8), []
    for trainer.global_step in range(4):
        warmup.on_train_batch_start(trainer, module, None, 0)
        found.append(compiled(x)[0])
        assert torch.allclose(found[-1], layer(x)[0], atol=1e-6)
    assert compiler.frame_count == 1
    assert (found[0] - found[-1]).norm() > 1e-4 * found[0].norm()  # the rate has moved
    warmup.on_fit_end(trainer, module)
    assert layer.optimizer.scale == 1 / 4 and type(layer.optimizer.scale) is float


def test_the_curve_is_drawn_at_once_then_now_and_then_and_whole_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, drawn = [0.0], []
    module: Any = SimpleNamespace(model=None)

    def plot(points: dict[str, list[list[float]]], *_: Any) -> None:
        now[0] += 2.0  # seconds that drawing takes
        drawn.append(len(points["validation"]))

    monkeypatch.setattr(callbacks, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(callbacks, "plot", plot)
    curve, log = LossCurve(str(tmp_path / "curve.png")), CSVLog(str(tmp_path / "metrics.csv"))
    for step in range(1, 31):  # one validation every ten seconds
        now[0] += 10.0
        log.log_metrics({"validation/bits_per_byte": 2.0}, step)
        trainer: Any = SimpleNamespace(global_step=step, is_global_zero=True, loggers=[log], datamodule=None, callbacks=[])
        curve.on_validation_end(trainer, module)
    assert drawn == [1, 21]  # not before 200 seconds have passed: a hundred times what drawing takes
    curve.on_train_end(trainer, module)
    assert drawn == [1, 21, 30]
    other = SimpleNamespace(**{**vars(trainer), "is_global_zero": False})
    LossCurve(str(tmp_path / "curve.png")).on_train_end(other, module)  # type: ignore[arg-type]
    assert drawn == [1, 21, 30]


def test_the_inner_losses_are_those_of_averaged_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the validation curve beside them is, wherever the averaging stands among the callbacks."""
    module: Any = nn.Module()
    module.model, averaging, seen = LanguageModel(5, 8, 1, nn.Identity), WeightAveraging(), []
    averaging._average_model = AveragedModel(module)
    module.device, weight = torch.device("cpu"), module.model.embedding.weight
    average = weight.detach().clone()
    weight.data.add_(1)
    trained = weight.detach().clone()
    monkeypatch.setattr(callbacks, "average", lambda model, *_, **__: seen.append(model.embedding.weight.detach().clone()))
    data = SimpleNamespace(windows_of_text=True, val_dataloader=list)
    trainer: Any = SimpleNamespace(datamodule=data, callbacks=[averaging])
    LossCurve(str(tmp_path / "curve.png"))._inner_losses(trainer, module)
    assert torch.equal(seen[0], average) and torch.equal(weight, trained)


@pytest.mark.parametrize("faster", [True, False])
def test_compiled_where_the_first_batches_show_that_it_pays(
    faster: bool, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that resumes computes as the run did before, and measures nothing again."""
    calls = [0, 0]  # of blocks, plain and compiled

    class Counted(Block):
        def compile(self, *args: Any, **kwargs: Any) -> None:
            def compiled(*given: Any) -> Any:
                calls[1] += 1
                return Block.forward(self, *given)

            self._compiled_call_impl = compiled

        def forward(self, *given: Any) -> Any:  # type: ignore[override]
            calls[0] += given[0].device.type == "cpu"  # not where operations are counted
            return super().forward(*given)

    monkeypatch.setattr("metattt.models.block.Block", Counted)
    monkeypatch.setattr(compiling, "_now", lambda: calls[0] + calls[1] * (0.5 if faster else 2.0))
    monkeypatch.setattr(compiling, "allow", lambda: None)
    run = tmp_path / "run"
    settings = ("compile=auto", "resume=auto", "trainer.val_check_interval=12", "trainer.max_steps=12")
    assert train(tiny(corpus, run, *settings)) == 0
    said = f"a batch takes 1 s, and {0.5 if faster else 2:g} s compiled: goes on {'compiled' if faster else 'as it is'}"
    assert said in capsys.readouterr().err
    calls[:] = [0, 0]
    assert train(tiny(corpus, run, *settings[:3], "trainer.max_steps=24")) == 0
    assert (calls[0] == 0) is faster and (calls[1] > 0) is faster
    assert "a batch takes" not in capsys.readouterr().err
    with pytest.raises(MetaTTTError, match=r"compile=auto, whose graphs run backwards once: set training\.truncate=1"):
        train(tiny(corpus, tmp_path / "other", "compile=auto", "training.chunk=8", "training.truncate=2"))


def test_a_class_that_divides_blocks_is_not_measured() -> None:
    trainer: Any = SimpleNamespace(strategy=SimpleNamespace(on_block=None))
    refusal(lambda: compiling.CompileWherePays().on_train_start(trainer, None), "compile=auto is for trainer=default")
