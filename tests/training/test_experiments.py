"""The experiments of the TTT paper: composed, and one step of each kind; the recipe around them."""

from pathlib import Path

import pytest

from metattt.composition.compose import compose
from metattt.data.prepare import prepare
from metattt.training.train import train

TABLE_1 = (
    "linear_attention", "linear_attention_improved", "ttt_equivalence", "learnable_w0", "ln_residual", "mini_batch", "learnable_lr",
    "mamba_backbone",
)  # fmt: skip
CONTEXTS = {
    "pile_2k": 2048, "pile_8k": 8192,
    "books_1k": 1024, "books_2k": 2048, "books_4k": 4096, "books_8k": 8192, "books_16k": 16384, "books_32k": 32768,
}  # fmt: skip
SIZES = {"125m": (768, 4800, 3e-3), "350m": (1024, 13500, 1.5e-3), "760m": (1536, 29000, 1.25e-3), "1b": (2048, 50000, 1e-3)}
KINDS = [
    "books_4k", "books_4k layer=ttt_mlp callbacks=inner_warmup", "books_4k layer=mamba2", "pile_2k optimizer.mini_batch_size=1",
    "books_4k layer=attention model=transformer_backbone task.rope_theta=500000", *(f"table1/{row}" for row in TABLE_1),
]  # fmt: skip
TINY = (
    "dim=16", "num_heads=2", "model.num_layers=2", "model.ffn_dim=32", "model.vocab_size=257", "trainer.accelerator=cpu",
    "data.context_length=64", "data.batch_size=2", "batch_tokens=256",
)  # fmt: skip


@pytest.fixture(scope="module")
def shards(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("prepared") / "shards"
    prepare(compose(f"source={corpus}", f"target={target}", "validation_fraction=0.2", "workers=1", job="prepare"))
    return target


@pytest.mark.parametrize("name", [*CONTEXTS, *(f"table1/{row}" for row in TABLE_1)])
def test_every_experiment_composes(name: str) -> None:
    context = CONTEXTS.get(name, 2048)
    for size, (dim, steps, lr) in SIZES.items() if name in CONTEXTS else [("125m", SIZES["125m"])]:
        cfg = compose(f"experiment={name}", f"preset={size}")
        assert cfg.data.context_length == context and cfg.batch_tokens == 524288 and 524288 % context == 0
        assert (cfg.dim, cfg.trainer.max_steps, cfg.training.lr) == (dim, steps, lr)
        assert cfg.layer.group_size is None and cfg.trainer.precision == "bf16-mixed"


@pytest.mark.parametrize("name", KINDS)
def test_one_step_of_each_kind(name: str, shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = f"experiment={name} data.path={shards} output_dir={tmp_path} +trainer.fast_dev_run=1".split()
    assert train(compose(*TINY, *words)) == 0
    assert "DummyLogger" not in capsys.readouterr().out


def test_a_size_brings_its_recipe() -> None:
    cfg = compose("experiment=pile_8k", "preset=760m", "layer=delta_net", "trainer=fsdp")
    assert cfg.trainer.max_steps == 29000 and cfg.training.lr == 1.25e-3 and cfg.task.normalize_qk
    assert compose("experiment=pile_8k", "preset=760m", "trainer.max_steps=7").trainer.max_steps == 7
    assert compose().trainer.max_steps == compose("preset=tiny").trainer.max_steps == 320
