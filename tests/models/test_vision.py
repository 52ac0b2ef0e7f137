"""Vision transformers with our layers: timm's registry, published sizes, operations, training on digits."""

import pickle
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from processes_for_tests import fresh
from refusals_for_tests import refusal
from timm.optim import create_optimizer_v2
from torch import nn

import metattt
from metattt.composition.compose import build, compose
from metattt.composition.instantiate import instantiate_model
from metattt.data.digits import DigitsData
from metattt.data.images import ImageData
from metattt.layer import TTTLayer
from metattt.learners import ModuleLearner
from metattt.measures.flops import count_flops, flops_of_layer, flops_per_image
from metattt.measures.inner_steps import inner_losses_by_layer
from metattt.models.timm import LAYERS, SIZES
from metattt.models.vision import ImageTransformer, sincos2d
from metattt.optimizers import GradientDescent
from metattt.tasks import Reconstruction
from metattt.testing.specimen import cotangent
from metattt.training.recipes import TimmRecipe
from metattt.training.train import train

ROWS = tuple(LAYERS)
EXPERIMENTS = Path(metattt.__file__).parent / "configs" / "experiment"
OURS = ("imagenet_patch", "imagenet_pixel", "table2", "digits_pixel")
FILES = (file.relative_to(EXPERIMENTS).with_suffix("").as_posix() for file in EXPERIMENTS.rglob("*.yaml"))
IMAGE_EXPERIMENTS = sorted(name for name in FILES if name.split("/")[0] in OURS)
TINY = {"depth": 2, "img_size": 8, "num_classes": 5}


# -- timm --------------------------------------------------------------------------------------------------------------


def test_timm_knows_the_models_after_import() -> None:
    """Whichever comes first; what timm itself imports is there before."""
    begins = ("import timm, metattt", "import metattt", "importlib.util.find_spec('timm')")
    then = "import metattt.models.timm, timm; print(timm.list_models('vit_*_mttt_mlp'))"
    said = fresh(["torch", "torchvision"], [f"import importlib.util; {first}; {then}" for first in begins]).splitlines()
    assert len(said) == len(begins) and all(size in line for size in SIZES for line in said)


def test_packages_are_attributes() -> None:
    names = ("models.from_published", "learners.MLP", "tasks.NextToken", "optimizers.Momentum")
    names += ("bidirectional.Bidirectional", "combined.Combined", "testing.LearnerConformance")
    fresh(["torch"], [f"import metattt; metattt.{name}; assert 'models' in dir(metattt)" for name in names])
    with pytest.raises(AssertionError, match="no attribute 'nothing'"):
        fresh(["torch"], ["import metattt; metattt.nothing"])


def test_positions_survive_the_meta_device() -> None:
    with torch.device("meta"):
        model = timm.create_model("vit_tiny_patch16_mttt_mlp", img_size=64, depth=1)
    model = model.to_empty(device="cpu")
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data.fill_(torch.nan)  # what `to_empty` may leave
    whole = timm.create_model("vit_tiny_patch16_mttt_mlp", img_size=64, depth=1)
    model.load_state_dict(whole.state_dict())
    images = torch.randn(2, 3, 64, 64)
    assert torch.equal(model.forward_features(images), whole.forward_features(images))


@pytest.mark.parametrize(
    ("size", "row"), [*((size, "mttt_mlp") for size in SIZES), *(("vit_tiny_pixel", row) for row in ROWS)]
)
def test_every_model_trains(size: str, row: str) -> None:
    model = timm.create_model(f"{size}_{row}", **TINY | ({"patch_size": 4} if "patch" in size else {}))
    images = torch.randn(2, model.in_chans, 8, 8)
    logits = model(images)
    assert logits.shape == (2, 5) and not logits.any()  # the head starts at zero
    torch.nn.functional.cross_entropy(logits, torch.tensor([1, 2])).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters() if p.requires_grad)
    assert model.head.logits.weight.grad.any()
    pickle.loads(pickle.dumps(model))


def test_a_model_of_any_layer_and_without_classes_gives_features() -> None:
    model = timm.create_model("vit_digits_pixel_mttt_mlp", layer="delta_net", **(TINY | {"num_classes": 0}))
    assert model.blocks[0].attn.layer.optimizer.anchor == "online"
    x = torch.randn(2, 1, 8, 8)
    assert isinstance(model.get_classifier(), torch.nn.Identity) and model.num_classes == 0
    y = model(x)
    assert y.shape == (2, model.num_features) and torch.equal(y, model.forward_features(x).mean(1))
    model.reset_classifier(3)
    assert model(x).shape == (2, 3) and torch.equal(model.forward_head(model.forward_features(x), pre_logits=True), y)
    model.reset_classifier(0, "")
    assert torch.equal(model(x), model.forward_features(x))


def test_what_timm_does_with_a_model() -> None:
    model = timm.create_model("vit_tiny_patch16_mttt_mlp", img_size=32, depth=2)
    about = timm.data.resolve_model_data_config(model)
    assert about["mean"] == (0.5, 0.5, 0.5) and about.items() >= ImageData.evaluation.items()
    assert model(torch.zeros(0, 3, 32, 32)).shape == (0, 1000)  # no crops of a detector
    assert model._pos_embed(model.patch_embed(torch.zeros(2, 3, 32, 32))).is_contiguous()
    digits = timm.create_model("vit_digits_pixel_mttt_mlp")
    assert timm.data.resolve_model_data_config(digits).items() >= DigitsData.evaluation.items()
    refusal(lambda: timm.create_model("vit_tiny_patch16_mttt_mlp", pretrained=True), "no pretrained weights")


def test_images_that_are_no_squares() -> None:
    """16 tokens are a square, too, which is not their map."""
    options = {"depth": 1, "img_size": 64, "num_classes": 0}
    model = timm.create_model("vit_tiny_patch16_vittt", overrides=["task.rope=map"], **options)
    model.set_input_size((32, 128))
    widths = ["task.rope=map", "task.rope_columns=8", "layer.second.learner.columns=8"]
    told = timm.create_model("vit_tiny_patch16_vittt", overrides=widths, **options)
    told.load_state_dict(model.state_dict())
    x = torch.randn(2, 3, 32, 128)
    super(ImageTransformer, told).set_input_size((32, 128))
    assert torch.equal(model(x), told(x))
    made = timm.create_model("vit_tiny_patch16_vittt", overrides=["task.rope=map"], **options | {"img_size": (32, 128)})
    made.load_state_dict(model.state_dict())
    assert torch.equal(made(x), told(x)) and made.pretrained_cfg["input_size"] == (3, 32, 128)
    make = partial(timm.create_model, "vit_tiny_patch16_self_attention", depth=1)
    for sides in ((12, 24), tuple(np.array([12, 24]))):  # 12 does not divide 224
        assert make(patch_size=12, img_size=sides)(torch.randn(1, 3, 12, 24)).shape == (1, 1000)
    learned = timm.create_model("vit_tiny_pixel_self_attention", depth=1, img_size=(8, 32)).pos_embed
    assert float(learned.detach().std()) == pytest.approx(192**-0.5, rel=0.02)  # as of a square, not averages of neighbours
    for sides in ((30, 32), (32, 30)):
        refusal(lambda sides=sides: make(img_size=sides), "patch_size=16 does not divide")
    refusal(lambda: make(img_size=(3, 32, 32)), "must be an integer")


# -- sizes and costs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("vit_small_patch16_self_attention", 22_122_472),
        ("vit_small_patch16_mttt_mlp", 24_560_104),
        ("vit_tiny_pixel_mttt_linear", 5_569_576),
        ("vit_tiny_pixel_mttt_mlp", 6_774_568),
        ("vit_small_pixel_linear_attention", 22_122_472 - 384 * 3 * (16 * 16 - 1)),  # 21.8 M
    ],
)
def test_published_numbers_of_parameters(name: str, parameters: int) -> None:
    with torch.device("meta"):
        assert timm.create_model(name).num_parameters() == parameters


def test_operations_of_an_image_and_the_model_as_it_was() -> None:
    """By hand, of 64 tokens with 32 features; of layers with an inner loop: `training/test_loggers`."""
    products = 64 * (32 + 12 * 32**2 + 2 * 64 * 32) + 32 * 32 + 32 * 10
    assert flops_per_image(timm.create_model("vit_digits_pixel_self_attention")) == 2 * products
    sgd = ["optimizer.steps=4", "optimizer.sampling=sgd", "optimizer.seed=3"]
    model = timm.create_model("vit_digits_pixel_mttt_mlp", overrides=sgd)
    assert flops_per_image(model) > 0
    assert model.blocks[0].attn.layer.optimizer.seed == 3 and not next(model.parameters()).is_meta


@pytest.mark.parametrize("layer", ["ttt_mlp", "delta_net", "lact", pytest.param("nested_ttt", marks=pytest.mark.slow)])
@pytest.mark.parametrize("left_over", [0, 3])
def test_mini_batches_are_counted_without_running_all(layer: str, left_over: int) -> None:
    module = build(f"layer={layer}", "dim=16", "num_heads=2", "optimizer.mini_batch_size=4").to("meta")
    tokens = 5 * module.optimizer.block + left_over
    assert flops_of_layer(module, tokens, 16) == count_flops(module, torch.empty(1, tokens, 16, device="meta"))


def test_what_a_nested_layer_tries_out_is_not_counted_of_few_mini_batches_either() -> None:
    module = build("layer=nested_ttt", "dim=16", "num_heads=2", "optimizer.mini_batch_size=4").to("meta")
    assert flops_of_layer(module, 6, 16) == count_flops(module, torch.empty(1, 6, 16, device="meta"))


# -- the model ---------------------------------------------------------------------------------------------------------


def test_recomputing_blocks_changes_nothing() -> None:
    # new permutations at every call, but the same ones when recomputed
    overrides = ["optimizer.steps=4", "optimizer.sampling=sgd"]
    model = timm.create_model("vit_digits_pixel_mttt_mlp", overrides=overrides, **TINY).double()
    torch.nn.init.normal_(model.head.logits.weight)
    found = []
    for recompute in (False, True):
        model.set_grad_checkpointing(recompute)
        model.zero_grad()
        torch.manual_seed(0)
        logits = model(torch.ones(2, 1, 8, 8, dtype=torch.float64).cumsum(-1))
        (logits * cotangent(logits)).sum().backward()
        found.append([p.grad.clone() for p in model.parameters()])
    assert all(torch.allclose(a, b, rtol=1e-9, atol=1e-12) for a, b in zip(*found, strict=True))


def test_only_kernels_decay() -> None:
    model = timm.create_model("vit_digits_pixel_mttt_mlp", **TINY)
    groups = create_optimizer_v2(model, opt="adamw", lr=1.0, weight_decay=0.1).param_groups
    names = {id(p): name for name, p in model.named_parameters()}
    decayed = {names[id(p)] for group in groups if group["weight_decay"] for p in group["params"]}
    layer = "blocks.0.attn.layer."
    inside = {name.removeprefix(layer) for name in decayed if name.startswith(layer)}
    task = {"task.phi.weight", "task.psi.weight", "task.decoder"}
    assert inside == task | {"learner.init.w1", "learner.init.w2", "out.weight"}
    assert "pos_embed" not in decayed and "patch_embed.proj.weight" in decayed and "head.logits.weight" in decayed
    assert not any("norm" in name or name.endswith("bias") for name in decayed)


def test_position_tables() -> None:
    table = sincos2d(3, 4, 8)
    assert table.shape == (1, 12, 8)
    frequency = np.array([1.0, 1e-4])
    expected = [f(place * frequency) for place in (3, 2) for f in (np.sin, np.cos)]  # x = 3, y = 2
    np.testing.assert_allclose(table[0, 11], np.concatenate(expected), rtol=1e-5)
    patch = timm.create_model("vit_small_patch16_mttt_linear", img_size=32, depth=1)
    assert "pos_embed" not in dict(patch.named_parameters()) and "pos_embed" not in patch.state_dict()
    pixel = timm.create_model("vit_tiny_pixel_mttt_linear", img_size=16, depth=1)
    assert pixel.pos_embed.requires_grad and pixel.pos_embed.std().item() == pytest.approx(192**-0.5, rel=0.02)


def test_linear_maps_start_as_published() -> None:
    layer = timm.create_model("vit_tiny_pixel_mttt_mlp", img_size=8, depth=1).blocks[0].attn.layer
    bound = (3 / 192) ** 0.5
    for weight in (layer.task.phi.weight, layer.task.decoder, layer.out.weight):
        assert 0.98 * bound < weight.abs().max() <= bound
    nested = timm.create_model("vit_digits_pixel_mttt_mlp", layer="nested_ttt", **TINY)  # its maps have fast weights
    assert nested(torch.randn(1, 1, 8, 8)).isfinite().all()
    maps = nn.Sequential(nn.Unflatten(1, (1, 1, -1)), nn.Conv2d(1, 1, 1), nn.Flatten(), nn.Linear(4, 4))
    kept = maps[3].weight.requires_grad_(False).clone()
    rule = GradientDescent(None, read="final")
    model = ImageTransformer(lambda: TTTLayer(8, 2, Reconstruction(), ModuleLearner(maps), rule), 8, 2, 1, img_size=16)
    assert torch.equal(model.blocks[0].attn.layer.learner.module[3].weight, kept)  # frozen: someone has trained it


def test_sizes_that_do_not_fit() -> None:
    make = partial(timm.create_model, "vit_digits_pixel_mttt_mlp")
    refusal(lambda: make(img_size=10, patch_size=4), match="patch_size=4 does not divide")
    refusal(lambda: make(position="none"), match=r"model\.position")


# -- training ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", IMAGE_EXPERIMENTS)
def test_every_experiment_composes_and_its_model_runs(name: str) -> None:
    sizes = ("dim=16", "num_heads=2", "model.depth=1", "model.img_size=16", "model.num_classes=5")
    cfg = compose(f"experiment={name}", *sizes)
    model = instantiate_model(cfg)
    assert model(torch.randn(1, cfg.model.in_chans, 16, 16)).shape == (1, 5)
    assert (cfg.model.patch_size == 1) == ("pixel" in name) == (cfg.training.mixup == 0)


SMALL = ("dim=16", "num_heads=2", "model.depth=1", "trainer.accelerator=cpu", "trainer.log_every_n_steps=1")


def test_data_and_model_that_do_not_fit(tmp_path: Path) -> None:
    wrong = compose("experiment=digits_pixel", *SMALL, f"output_dir={tmp_path}", "optimizer.steps=3")
    refusal(lambda: train(wrong), "64 tokens do not divide into optimizer.steps=3")
    refusal(lambda: train(compose("data=digits", f"output_dir={tmp_path}")), "set model=vision_transformer")


def test_schedule_of_the_paper() -> None:
    recipe = TimmRecipe(warmup_steps=10)
    optimizer = recipe.optimizer(torch.nn.Linear(2, 2))
    schedule, rates = recipe.schedule(optimizer, 110), []
    for step in range(111):
        schedule.step_update(step)
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates[0] == 0 and max(rates) == rates[10] == 1e-3
    assert rates[60] == pytest.approx(5e-4) and rates[110] == pytest.approx(0)
    assert recipe.warmup_steps(110) == 10 and recipe.warmup_steps(5) == 4  # callbacks=inner_warmup asks


def test_inner_losses_by_layer() -> None:
    model = timm.create_model("vit_digits_pixel_mttt_mlp", overrides=["optimizer.steps=2"], **TINY)
    losses = inner_losses_by_layer(model, torch.randn(3, 1, 8, 8))
    assert {number: loss.shape for number, loss in losses.items()} == {1: (3,), 2: (3,)}
    assert all(loss[0] > loss[2] for loss in losses.values())
    attention = timm.create_model("vit_digits_pixel_self_attention", **TINY)
    assert inner_losses_by_layer(attention, torch.randn(3, 1, 8, 8)) == {}
