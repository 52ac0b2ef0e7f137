"""The published language models: golden logits and gradients, names, presets, and state for every layer and
backbone."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hf_for_tests import golden, part, write_checkpoint
from hf_for_tests import published_config as config
from refusals_for_tests import refusal
from safetensors.torch import load_file, save_file
from torch import Tensor

from metattt import MetaTTTError, load_model
from metattt.checkpoints.folder import write_model
from metattt.checkpoints.record import make_record
from metattt.cli import main
from metattt.composition.compose import compose
from metattt.composition.instantiate import instantiate_model
from metattt.models import LanguageModel, from_published, to_published
from metattt.models.published_config import build_empty

KINDS = ("linear_mamba", "linear_transformer", "mlp_mamba", "mlp_transformer")


def published(kind: str) -> LanguageModel:
    return from_published(part(golden(kind), "param:"), config(kind))


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]) for name in a)


def check_golden(model: LanguageModel, kind: str) -> None:
    vectors = golden(kind)
    ids = torch.from_numpy(vectors["ids"])
    logits = model(ids)
    torch.testing.assert_close(logits, torch.from_numpy(vectors["logits"]), rtol=0, atol=1e-4)
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    assert loss.item() == pytest.approx(float(vectors["loss"]), abs=1e-5)
    loss.backward()
    with torch.no_grad():  # gradients take the places of the values, so that they get the published names
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.copy_(parameter.grad)
    gradients, expected = to_published(model)[0], part(vectors, "grad:")
    assert gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        assert (gradients[name] - gradient).norm() <= 1e-3 * gradient.norm(), name


# -- golden vectors ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_logits_loss_and_every_gradient_are_the_published_ones(kind: str) -> None:
    check_golden(published(kind), kind)


def test_jax_names_shapes_and_roots() -> None:
    model = published("mlp_mamba")
    params, keys = to_published(model, "jax")
    block = "model/h/0/seq_modeling_block/"
    shapes = {name: tuple(value.shape) for name, value in params.items()}
    assert shapes["model/wte/embedding"] == (61, 32) and shapes["model/ln_f/kernel"] == (32,)
    assert shapes["model/h/0/feed_forward/w1/kernel"] == (32, 48)
    assert shapes["model/h/0/feed_forward/w2/kernel"] == (48, 32)
    assert shapes["model/h/0/conv/conv1/kernel"] == shapes[block + "conv_k/kernel"] == (4, 1, 32)
    assert shapes[block + "learnable_ttt_lr/kernel"] == (2, 32, 1) and shapes[block + "learnable_ttt_lr/bias"] == (2, 1)
    assert shapes[block + "ttt_dense_0"] == (2, 16, 64) and shapes[block + "ttt_bias_0"] == (2, 1, 64)
    theirs = to_published(model)[0]
    convolution = theirs["model.layers.0.conv.conv.weight"]
    assert torch.equal(params["model/h/0/conv/conv1/kernel"][:, 0, :], convolution[:, 0, :].T)  # no flip of the taps
    assert torch.equal(params[block + "wq/kernel"], theirs["model.layers.0.seq_modeling_block.q_proj.weight"].T)
    assert keys["seq_modeling_block"] == "ttt_mlp"
    assert to_published(published("linear_transformer"), "jax")[1]["seq_modeling_block"] == "ttt_linear_base"

    arrays = {name: value.numpy() for name, value in params.items()}
    for root in ("params/params/model/", ""):
        renamed = {root + name.removeprefix("model/"): value for name, value in arrays.items()}
        assert same(to_published(from_published(renamed, keys, "jax"), "jax")[0], params)
    tree = {"params": {"model": {name.removeprefix("model/"): value for name, value in arrays.items()}}}
    assert same(to_published(from_published(tree, keys, "jax"), "jax")[0], params)


def test_types_are_kept_and_tensors_are_not_shared() -> None:
    tensors = {name: value.bfloat16() for name, value in part(golden("linear_mamba"), "param:").items()}
    model = from_published(tensors, SimpleNamespace(**config("linear_mamba")))
    assert same(to_published(model)[0], tensors)
    with torch.no_grad():
        model.embedding.weight.zero_()
    assert tensors["model.embed_tokens.weight"].abs().sum() > 0
    mixed = {name: value if "norm" in name else value.float() for name, value in tensors.items()}
    model = from_published(mixed, SimpleNamespace(**config("linear_mamba")))
    assert {x.dtype for x in model.parameters()} == {torch.float32} == {model(torch.zeros(1, 3, dtype=torch.long)).dtype}


@pytest.mark.parametrize("tied", [True, False])
def test_tied_and_untied_heads(tied: bool) -> None:
    settings = config("linear_transformer") | {"tie_word_embeddings": tied}
    tensors = part(golden("linear_transformer"), "param:")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    model = from_published(tensors, settings)
    assert (model.head.weight is model.embedding.weight) == tied
    back, _ = to_published(model)
    assert ("lm_head.weight" in back) != tied
    assert same(to_published(from_published(*to_published(model, "jax"), "jax"))[0], back)
    tensors["lm_head.weight"] += 1
    if tied:
        refusal(lambda: from_published(tensors, settings), "lm_head.weight differs from model.embed_tokens.weight")
    else:
        from_published(tensors, settings)


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_every_name_that_does_not_fit_is_listed() -> None:
    tensors = part(golden("mlp_mamba"), "param:")
    block = "model.layers.0.seq_modeling_block."
    del tensors[block + "W2"], tensors["model.norm.weight"]
    tensors["model.layers.0.rotary.inv_freq"] = torch.ones(3)
    tensors["model.layers.1.seq_norm.weight"] = torch.ones(32)
    tensors[block + "b1"] = torch.ones(2, 64)
    tensors[block + "v_proj.weight"] = torch.ones(32, 16)
    with pytest.raises(MetaTTTError) as caught:
        from_published(tensors, config("mlp_mamba"))
    message = str(caught.value)
    assert f"missing: {block}W2, model.norm.weight;" in message
    assert "unknown: model.layers.0.rotary.inv_freq, model.layers.1.seq_norm.weight;" in message
    assert f"{block}b1 [2, 64] instead of [2, 1, 64]" in message
    wide = config("mlp_mamba") | {"hidden_size": 64}
    refusal(lambda: from_published(part(golden("mlp_mamba"), "param:"), wide), "wrong shape: ", "and 19 more")
    params, keys = to_published(published("linear_mamba"), "jax")
    params["step"] = torch.tensor(3.0)
    refusal(lambda: from_published(params, keys, "jax"), "unknown: step")
    params, keys = to_published(published("linear_mamba"))
    params["model.norm.weight"] = params["model.norm.weight"].to("meta")
    refusal(lambda: from_published(params, keys), "on the meta device: model.norm.weight")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_gate": "yes"}, "use_gate='yes' .* expected bool"),
        ({"ttt_layer_type": "conv"}, "ttt_layer_type=conv .* linear or mlp"),
        ({"hidden_act": "gelu"}, "hidden_act=gelu"),
        ({"pre_convs": True}, "`pre_convs` .* Did you mean `pre_conv`"),
        ({"seq_modeling_block": "self_attention"}, "seq_modeling_block=self_attention"),
    ],
)
def test_bad_configurations_are_refused(change: dict[str, Any], message: str) -> None:
    settings = {key: value for key, value in config("linear_mamba").items() if not any(key in one for one in change)}
    refusal(lambda: from_published(part(golden("linear_mamba"), "param:"), settings | change), match=message)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["layer=attention"], "layer.learner = KernelEstimator"),
        (["task.rope=full"], r"blocks.0.layer.task.rope = full \(published: mini_batch\)"),
        (["layer=ttt_mlp", "learner.depth=3"], r"learner.depth = 3 \(published: 2\)$"),
        (["model.causal=false"], r"differs in causal = False \(published: True\)$"),
        (["layer.output_norm=false"], "layer.norm is needed"),
        (["model=mamba_backbone", "model.conv_width=3"], r"conv_q.weight \[64, 1, 4\] \(published: \[64, 1, 3\]\)"),
    ],
)
def test_models_that_were_never_published_say_why(overrides: list[str], message: str) -> None:
    model = build_empty(compose("preset=tiny", *overrides, job="language_model"))
    refusal(lambda: to_published(model), match=message)
    with pytest.raises(MetaTTTError, match="JAX trainer has both or neither"):
        to_published(build_empty(compose("preset=tiny", "layer.gate=false", job="language_model")), "jax")


def test_token_steps_keep_their_values() -> None:
    """A model of ours has its token steps from another parametrisation than the release."""
    model = instantiate_model(compose("preset=tiny", job="language_model"))
    offsets = [block.layer.optimizer.token_step_offset for block in model.blocks]
    with torch.no_grad():
        for offset in offsets:
            offset.uniform_(-3, 3)
    state, settings = to_published(model)
    back = from_published(state, settings)
    for block, again in zip(model.blocks, back.blocks, strict=True):
        assert again.layer.optimizer.token_step_map == "relu"
        torch.testing.assert_close(again.layer.optimizer.token_steps(), block.layer.optimizer.token_steps())
    ids = torch.arange(24).view(1, -1)
    with torch.no_grad():
        torch.testing.assert_close(back(ids)[0], model.eval()(ids)[0], rtol=1e-4, atol=1e-4)


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "name"), [("mlp_mamba", "model.safetensors"), ("linear_transformer", "pytorch_model.bin")],
)  # fmt: skip
def test_convert_and_back(kind: str, name: str, tmp_path: Path) -> None:
    tensors = write_checkpoint(tmp_path / "theirs", kind, name)
    assert main(["convert", f"source={tmp_path}/theirs", f"target={tmp_path}/ours=1"]) == 0
    check_golden(load_model(tmp_path / "ours=1")[0], kind)
    check_golden(load_model(tmp_path / "theirs")[0], kind)

    assert main(["convert", f"source={tmp_path}/ours=1", f"target={tmp_path}/back", "direction=to_published"]) == 0
    assert same(load_file(tmp_path / "back/model.safetensors"), tensors)
    assert config(kind).items() <= json.loads((tmp_path / "back/config.json").read_text()).items()

    assert main(["convert", f"source={tmp_path}/ours=1", f"target={tmp_path}/jax", "direction=to_jax"]) == 0
    assert main(["convert", f"source={tmp_path}/jax", f"target={tmp_path}/again"]) == 0
    assert same(load_file(tmp_path / "again/model.safetensors"), load_file(tmp_path / "ours=1/model.safetensors"))

    mixed = {key: one if "norm" in key else one.bfloat16() for key, one in tensors.items()}
    save_file(mixed, tmp_path / "jax/model.safetensors")
    (tmp_path / "jax/config.json").write_text((tmp_path / "back/config.json").read_text())
    model = load_model(tmp_path / "jax")[0]
    assert {one.dtype for one in model.parameters()} == {one.dtype for one in tensors.values()}

    for folder in ("theirs", "back"):
        file = tmp_path / folder / "config.json"
        file.write_text(file.read_text().replace("1e-06", "1e-05"))
    load_model(tmp_path / "theirs")  # where nobody has written a checksum, a number may be any
    refusal(lambda: load_model(tmp_path / "back"), "config.json is not the one that was written with model.safetensors")


def test_any_model_of_ours_is_loaded_from_a_folder(tmp_path: Path) -> None:
    cfg = compose("preset=tiny", "layer=retnet", job="language_model")
    model = instantiate_model(cfg)
    write_model(tmp_path / "model", make_record(cfg), dict(model.named_parameters()), None)
    ids = torch.randint(257, (1, 20))
    assert torch.equal(load_model(tmp_path / "model")[0](ids), model(ids))
    save_file({name: value.detach() for name, value in model.named_parameters()}, tmp_path / "model.safetensors")
    refusal(lambda: load_model(tmp_path / "model.safetensors"), "holds weights by our names without a configuration")


class Code:
    def __reduce__(self) -> tuple[Any, ...]:
        return (pytest.fail, ("code of a file has run",))


def test_files_that_cannot_be_read_cost_one_line(tmp_path: Path, told: Callable[..., str]) -> None:
    tensors = write_checkpoint(tmp_path / "whole", "linear_mamba")
    data = (tmp_path / "whole/model.safetensors").read_bytes()
    torch.save(tensors, tmp_path / "whole.pt")
    (tmp_path / "half.pt").write_bytes((tmp_path / "whole.pt").read_bytes()[:9000])
    torch.save({"weight": torch.ones(3)}, tmp_path / "foreign.pt")
    torch.save({"model.embed_tokens.weight": Code()}, tmp_path / "code.pt")
    torch.save(tensors | {"model.norm.weight": torch.full_like(tensors["model.norm.weight"], torch.nan)}, tmp_path / "whole/nan.pt")
    (tmp_path / "occupied").mkdir()
    (tmp_path / "occupied/file").touch()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/model.safetensors").write_bytes(data)
    (tmp_path / "broken/config.json").write_text("{")
    for source, target, direction, message in (
        ("half.pt", "new", None, "truncated"),
        ("foreign.pt", "new", None, "neither published names"),
        ("code.pt", "new", None, "could run any code"),
        ("whole.pt", "new", None, "config.json is missing"),
        ("broken", "new", None, "is damaged"),
        ("whole/nan.pt", "new", None, "final_norm.weight that are not finite"),
        ("whole", "new", "from_jax", "names of direction=from_published"),
        ("whole", "occupied", None, "not empty"),
    ):
        chosen = [f"direction={direction}"] if direction else []
        assert message in told("convert", f"source={tmp_path / source}", f"target={tmp_path / target}", *chosen)
        assert not (tmp_path / "new").exists()


# -- sizes -------------------------------------------------------------------------------------------------------------

MILLIONS = {"125m": (110.4, 114.6), "350m": (337.7, 348.8), "760m": (733.6, 758.5), "1b": (1285.6, 1307.9)}


@pytest.mark.parametrize("preset", MILLIONS)
def test_presets_have_the_published_numbers_of_parameters(preset: str) -> None:
    for layer, millions in zip(("ttt_linear", "ttt_mlp"), MILLIONS[preset], strict=True):
        model = build_empty(compose(f"preset={preset}", f"layer={layer}", "model=mamba_backbone", job="language_model"))
        assert round(model.num_parameters() / 1e6, 1) == millions

