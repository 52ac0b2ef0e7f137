"""Every training row of the TTT paper: composed, built tiny, and one step of each kind; the recipe around them."""

import math
from importlib.resources import files
from pathlib import Path

import pytest
import torch
from runs_for_tests import write_corpus

from metattt.checkpoints.trained import read_checkpoint
from metattt.composition.compose import compose
from metattt.composition.instantiate import instantiate_model
from metattt.composition.paper_rows import CONTEXTS, METHODS, MINI_BATCH_SIZES, SIZES, rows
from metattt.data.prepare import prepare
from metattt.errors import MetaTTTError
from metattt.training.train import train

TABLE_1 = (
    "linear_attention", "linear_attention_improved", "ttt_equivalence", "learnable_w0", "ln_residual", "mini_batch", "learnable_lr",
    "mamba_backbone",
)  # fmt: skip
EXPERIMENTS = [*CONTEXTS, *rows(), *(f"table1/{row}" for row in TABLE_1)]
KINDS = [
    *(f"books_4k/{method}_125m" for method in METHODS),
    *(f"table1/{row}" for row in TABLE_1),
    "minibatch/1",
    "minibatch/2048",
]  # fmt: skip
TINY = (
    "dim=16", "num_heads=2", "model.num_layers=2", "model.ffn_dim=32", "model.vocab_size=257", "trainer.accelerator=cpu",
    "data.context_length=64", "data.batch_size=2", "batch_tokens=256",
)  # fmt: skip


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    write_corpus(folder)
    words = (f"source={folder}", f"target={folder / 'shards'}", "validation_fraction=0.2", "workers=1")
    prepare(compose(*words, job="prepare"))
    return folder / "shards"


def run(folder: Path, shards: Path, *overrides: str) -> Path:
    assert train(compose(*TINY, f"data.path={shards}", f"output_dir={folder}", *overrides)) == 0
    return folder


def test_the_list_is_complete() -> None:
    folder = files("metattt.configs") / "experiment"
    assert {file.name.removesuffix(".yaml") for file in (folder / "table1").iterdir()} == set(TABLE_1)
    for group in CONTEXTS:
        assert (folder / f"{group}.yaml").is_file()
        found = {f"{group}/{method}_{size}" for method in ("ttt_linear", "ttt_mlp", "transformer") for size in SIZES}
        assert found <= set(EXPERIMENTS)


@pytest.mark.parametrize("group", [*CONTEXTS, "table1", "minibatch"])
def test_every_experiment_composes(group: str) -> None:
    rows = [name for name in EXPERIMENTS if name.partition("/")[0] == group]
    # The rows of the context lengths come from one table: every fifth of them, and all of the others.
    for name in rows[::5] if group in CONTEXTS else rows:
        cfg = compose(f"experiment={name}")
        context = CONTEXTS.get(group, 2048)
        size = name.rpartition("_")[2] if "/" in name and group in CONTEXTS else "125m"
        assert cfg.data.context_length == context and cfg.batch_tokens == 524288 and 524288 % context == 0
        assert cfg.dim == {"125m": 768, "350m": 1024, "760m": 1536, "1b": 2048}[size]
        finetune = "finetune" in name
        assert cfg.trainer.max_steps == (SIZES[size] // 5 if finetune else SIZES[size])
        assert cfg.training.lr == {"125m": 3e-3, "350m": 1.5e-3, "760m": 1.25e-3, "1b": 1e-3}[size] or finetune
        assert ("inner_warmup" in cfg.callbacks) == ("ttt_mlp" in name)
        assert cfg.layer.group_size is None and cfg.trainer.precision == "bf16-mixed"
        if "transformer" in name:
            assert not cfg.model.pre_conv and not cfg.layer.gate and cfg.task.views == "separate"
        if name.partition("/")[2].startswith("transformer"):
            assert cfg.task.rope_theta == (5e5 if context >= 4096 else 1e4)
        if group == "minibatch" and "/" in name:
            assert cfg.optimizer.mini_batch_size == int(name.partition("/")[2])
    assert min(MINI_BATCH_SIZES) == 1 and max(MINI_BATCH_SIZES) == 2048


@pytest.mark.parametrize("name", KINDS)
def test_one_step_of_each_kind(name: str, shards: Path, tmp_path: Path) -> None:
    run(tmp_path, shards, f"experiment={name}", "+trainer.fast_dev_run=1")


def test_a_size_brings_its_recipe() -> None:
    cfg = compose("experiment=pile_8k", "preset=760m", "layer=delta_net", "trainer=fsdp")
    assert cfg.trainer.max_steps == 29000 and cfg.training.lr == 1.25e-3 and cfg.task.normalize_qk
    assert compose("experiment=pile_8k", "preset=760m", "trainer.max_steps=7").trainer.max_steps == 7
    assert compose().trainer.max_steps == compose("preset=tiny").trainer.max_steps == 320


def test_finetuning_starts_from_a_shorter_run(shards: Path, tmp_path: Path) -> None:
    short = run(tmp_path / "short", shards, "experiment=books_2k/ttt_linear_125m", "trainer.max_steps=4")
    with pytest.raises(MetaTTTError, match="add init_from="):
        run(tmp_path / "none", shards, "experiment=books_32k/ttt_linear_finetune_125m")
    longer = ("experiment=books_32k/ttt_linear_finetune_125m", "data.context_length=128", f"init_from={short}")
    run(tmp_path / "long", shards, *longer, "trainer.max_steps=1", "training.lr=1e-12", "training.min_lr=1e-12")
    before, after = (read_checkpoint(folder) for folder in (short, tmp_path / "long"))
    assert after["global_step"] == 1
    for name, value in before["state_dict"].items():
        torch.testing.assert_close(after["state_dict"][name], value, rtol=1e-5, atol=1e-8)
    with pytest.raises(MetaTTTError, match="does not fit this model"):
        run(tmp_path / "other", shards, "experiment=pile_2k", "dim=32", f"init_from={short}")


def test_checkpointing_blocks_changes_nothing() -> None:
    ids = torch.randint(257, (2, 40))
    gradients = []
    for checkpoint in ("false", "true"):
        torch.manual_seed(0)
        cfg = compose("experiment=pile_2k/ttt_mlp_125m", *TINY, f"model.checkpoint_blocks={checkpoint}")
        model = instantiate_model(cfg)
        torch.nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    torch.testing.assert_close(gradients[0], gradients[1])
    assert all(gradient is not None and math.isfinite(gradient.sum().item()) for gradient in gradients[0].values())
