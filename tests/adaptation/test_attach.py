"""Fast weights inside models of Transformers: nothing changes at the start, and every way of reading gives the same."""

from __future__ import annotations

import copy
import io
import json
import pickle
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import hf_for_tests
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from refusals_for_tests import refusal
from torch import Tensor, nn

from metattt import MetaTTTError, attach, build
from metattt.adaptation.attach import FORMAT, Attached, load_attached
from metattt.adaptation.in_place import InPlaceLinear
from metattt.checkpoints.tensors import write_tensors

transformers = pytest.importorskip("transformers")

V = 40
IDS = torch.randint(0, V, (2, 21), generator=torch.Generator().manual_seed(2))
ATTENTION, DOWN = "model.layers.*.self_attn", "model.layers.*.mlp.down_proj"
KINDS: dict[str, tuple[str | list[str], dict[str, Any]]] = {
    "ttt_linear": (ATTENTION, {}),
    "gated_delta_net": ("model.layers.1.self_attn", {"num_heads": 4}),
    "mamba+ttt_linear": (ATTENTION, {}),
    "window_attention": (["model.layers.0.self_attn", "model.layers.1.*attn"], {"learner.window": 4}),
    "in_place": (DOWN, {"chunk": 4, "lr": 0.7}),
    "in_place_embeddings": (DOWN, {"chunk": 5, "labels": "embeddings", "project": False}),
}
OTHERS: dict[str, tuple[str, dict[str, int]]] = {  # that call their blocks in other ways
    "GPT2LMHeadModel": ("transformer.h.*.attn", {"n_embd": 16, "n_layer": 2, "n_head": 2}),
    "GPTNeoXForCausalLM": ("gpt_neox.layers.*.attention", {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}),
    "OPTForCausalLM": (
        "model.decoder.layers.*.self_attn",
        {"hidden_size": 16, "ffn_dim": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "word_embed_proj_dim": 16},
    ),
}


def llama(kind: str = "Llama") -> Any:
    return hf_for_tests.llama(kind, vocab_size=V, num_key_value_heads=1, max_position_embeddings=64).double()


def attached(model: Any, kind: str, **settings: Any) -> Attached:
    pattern, given = KINDS[kind]
    return attach(model, pattern, layer=kind.removesuffix("_embeddings"), **given | settings)


def trained(made: Attached) -> None:
    """Other parameters than those at the start, where nothing shows."""
    generator = torch.Generator().manual_seed(3)
    for parameter in made.parameters():
        parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)


CACHE = "cache" if hasattr(transformers.modeling_outputs.CausalLMOutputWithPast(), "cache") else "past_key_values"


def cache_of(output: Any) -> Any:
    return getattr(output, CACHE)


def read_in_pieces(made: Any, *lengths: int) -> tuple[Tensor, Any]:
    """Logits of calls that hand their cache on, and the last cache."""
    parts, cache = [], {}
    for part in IDS.split(lengths, dim=1):
        output = made(part, use_cache=True, **cache)
        parts, cache = [*parts, output.logits], {CACHE: cache_of(output)}
    return torch.cat(parts, dim=1), cache[CACHE]


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("model", "kind"), [*(("Llama", kind) for kind in KINDS), ("Qwen2", "ttt_linear")])
def test_nothing_changes_at_the_start_and_streams_equal_one_pass(model: str, kind: str, tmp_path: Path) -> None:
    made = llama(model)
    before = made(IDS).logits
    own = attached(made, kind)
    assert torch.equal(made(IDS).logits, before)
    trained(own)
    logits = made(IDS).logits
    assert not torch.allclose(logits, before)
    assert torch.allclose(made(torch.cat([IDS[:, :13], IDS[:, :8]], 1)).logits[:, :13], logits[:, :13])  # causal

    close(read_in_pieces(made, 6, 1, 1, 8, 5)[0], logits)
    options = {"attention_mask": torch.ones(2, 5), "do_sample": False, "max_new_tokens": 9, "min_new_tokens": 9}
    for beams in (1, 3):
        found = [made.generate(IDS[:, :5], **options, num_beams=beams, use_cache=use) for use in (True, False)]
        assert torch.equal(*found)  # with a cache and without

    own.save(tmp_path / "layers")
    own.detach()
    assert torch.equal(made(IDS).logits, before)
    again = load_attached(tmp_path / "layers", made)
    assert torch.equal(made(IDS).logits, logits)
    assert dict(again.named_parameters()).keys() == dict(own.named_parameters()).keys()


def test_a_module_that_two_blocks_share_has_a_state_in_each() -> None:
    made = llama()
    made.model.layers[1].mlp = made.model.layers[0].mlp
    trained(attached(made, "in_place"))
    close(read_in_pieces(made, 6, 1, 9, 5)[0], made(IDS, use_cache=False).logits)


def test_in_place_equals_the_published_computation() -> None:
    golden = np.load(Path(__file__).parents[1] / "golden" / "in_place_mlp.npz")
    held: dict[str, Tensor] = {name: torch.from_numpy(golden[name]) for name in golden.files}
    linear = nn.Linear(24, 12, bias=False).double()
    linear.weight.data = held["Wd"].clone()
    layer = InPlaceLinear(linear, int(held["chunk"]), float(held["lr"]))
    layer.conv.data, layer.project.data = held["conv"].clone(), held["P"].clone()  # type: ignore[union-attr]
    x = held["x"].clone().requires_grad_()
    y, _ = layer(F.silu(x @ held["Wg"].T) * (x @ held["Wu"].T), held["t"])
    (y * held["k"]).sum().backward()
    torch.testing.assert_close(y, held["y"], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(x.grad, held["gx"], rtol=1e-12, atol=1e-12)
    given = torch.randn(1, 2 * layer.chunk, 24), torch.randn(1, 2 * layer.chunk, 12)
    expected = layer.float()(*given)[1].change
    with torch.autocast("cpu"):  # what is carried is not rounded
        assert torch.equal(layer(*given)[1].change, expected)


def test_the_pretrained_map_maps_each_token_once_and_alone_at_the_start() -> None:
    linear, read, state = nn.Linear(24, 12), [], None
    layer, whole = InPlaceLinear(linear, 4), torch.randn(1, 21, 24)
    linear.register_forward_hook(lambda _, given, y: read.append(y))
    for part in whole.split([9, 1, 1, 10], dim=1):
        y, state = layer(part, part[..., :12], state)
        assert torch.equal(y, read[-1])
    assert [one.shape[1] for one in read] == [9, 1, 1, 10]


def test_in_place_in_an_mlp_that_is_called_by_name() -> None:
    made = llama()
    trained(attached(made, "in_place"))
    expected = made(IDS).logits
    for block in made.model.layers:
        block.mlp.__class__ = type("ByName", (type(block.mlp),), {"__call__": lambda self, x: nn.Module.__call__(self, x=x)})
    assert torch.equal(made(IDS).logits, expected)


def test_in_place_learns_in_no_map_of_rows_of_all_sequences() -> None:
    sizes = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8}
    made = hf_for_tests.llama("Qwen2Moe", vocab_size=V, num_key_value_heads=1, **sizes)
    attach(made, "model.layers.*.mlp.shared_expert.down_proj", layer="in_place", chunk=16)
    refusal(lambda: made(IDS), "mixture of experts")


def test_padding_changes_nothing_beside_an_attention() -> None:
    made = llama()
    trained(attached(made, "ttt_linear"))
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    alone = made.generate(IDS[:1, :4], attention_mask=torch.ones(1, 4), **options)
    ids = torch.cat([F.pad(IDS[:1, :4], (3, 0)), IDS[1:, :7]])
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    both = made.generate(ids, attention_mask=mask, **options)
    assert both[0, 7:].tolist() == alone[0, 4:].tolist()
    trained(attached(made, "in_place"))
    refusal(lambda: made(ids, attention_mask=mask), "pad on the right")


def test_in_place_takes_padding_after_the_tokens() -> None:
    made = llama()
    own = attached(made, "in_place")
    trained(own)
    mask = torch.arange(21) < torch.tensor([[21], [10]])
    for cached in (False, True):
        output = made(IDS, attention_mask=mask, use_cache=cached)
        alone = made(IDS[1:, :10], use_cache=False).logits
        close(output.logits[1:, :10], alone)
        parameters = [*own.parameters()]
        found, expected = (torch.autograd.grad(y.square().sum(), parameters) for y in (output.logits[1:, :10], alone))
        for one, other in zip(found, expected, strict=True):
            close(one, other)
    refusal(lambda: made(IDS[:, :1], **{CACHE: cache_of(output)}), "begin with a new cache")
    refusal(lambda: made.generate(IDS, attention_mask=mask, max_new_tokens=2), "padding", "texts of one length")


@pytest.mark.parametrize("name", OTHERS)
def test_states_and_masks_reach_the_layers_of_other_models(name: str) -> None:
    pattern, sizes = OTHERS[name]
    kind = getattr(transformers, name)
    torch.manual_seed(0)
    made = kind(kind.config_class(vocab_size=V, bos_token_id=1, eos_token_id=2, **sizes)).double().eval()
    trained(attach(made, pattern, layer="ttt_linear"))
    logits = made(IDS).logits
    close(read_in_pieces(made, 9, 12)[0], logits)
    mask = F.pad(torch.ones_like(IDS), (3, 0))
    places = {} if "OPT" in name else {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    close(made(F.pad(IDS, (3, 0)), attention_mask=mask, **places).logits[:, 3:], logits)


def test_a_layer_beside_a_mixer_whose_cache_counts_no_tokens() -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "bos_token_id": 1, "eos_token_id": None}
    made = transformers.MambaForCausalLM(transformers.MambaConfig(vocab_size=V, **sizes)).eval()
    with pytest.raises(MetaTTTError, match="is a MambaMixer: how=replace takes attentions"):
        attach(made, "backbone.layers.*.mixer", layer="ttt_linear", how="replace")
    trained(attach(made, "backbone.layers.*.mixer", layer="ttt_linear"))
    one, two = (made.generate(IDS, max_new_tokens=8, do_sample=False, use_cache=cached) for cached in (True, False))
    assert torch.equal(one, two)


def test_packed_documents_a_mask_by_place_and_embeddings() -> None:
    made = llama()
    own = attached(made, "ttt_linear")
    trained(own)
    places = torch.arange(21).remainder(9)[None].expand(2, -1)  # documents of 9, 9 and 3 tokens
    packed = made(IDS, position_ids=places, use_cache=False).logits
    close(packed, torch.cat([made(part, use_cache=False).logits for part in IDS.split(9, 1)], 1))
    refusal(lambda: made(IDS, seq_idx=places // 9, use_cache=False), "need position_ids")
    mask = F.pad(torch.ones_like(IDS), (3, 0))
    given = F.pad(IDS, (3, 0)), mask, (mask.cumsum(1) - 1).clamp(min=0)
    close(made.model(*given)[0][:, 3:], made.model(IDS)[0])
    own.detach()
    trained(attached(made, "in_place_embeddings"))
    logits, other = made(IDS).logits, copy.deepcopy(made)
    made(IDS.flip(1))
    assert torch.equal(made(inputs_embeds=made.get_input_embeddings()(IDS)).logits, logits)
    assert torch.equal(other(IDS).logits, logits)  # a copy stands alone
    refusal(lambda: made(IDS, position_ids=places), "no packed documents")
    torch.save(made, io.BytesIO())


def test_threads_do_not_see_each_other() -> None:
    made = llama()
    trained(attached(made, "ttt_linear"))
    masks = [(torch.arange(21) < length).long().expand(2, -1) for length in (21, 12)]
    with torch.no_grad():
        alone = [made(IDS, attention_mask=mask).logits for mask in masks]
        with ThreadPoolExecutor(2) as pool:
            found = [*pool.map(lambda at: made(IDS, attention_mask=masks[at % 2]).logits, range(40))]
    assert all(torch.equal(one, alone[at % 2]) for at, one in enumerate(found))


@pytest.mark.parametrize("kind", ["ttt_linear", "in_place_embeddings"])
def test_blocks_that_are_run_again_see_their_own_call(kind: str) -> None:
    """Gradient checkpointing with two calls before one backward pass, a loss on features of a block included."""
    found = []
    for checkpointing in (False, True):
        made = llama()
        own = attached(made, kind)
        trained(own)
        if checkpointing:
            made.train().gradient_checkpointing_enable({"use_reentrant": False})
        total = 0
        for row, sign in ((0, 1), (1, -1)):
            mask = torch.arange(21) < torch.tensor([[21], [13 + row]])
            out = made(IDS.roll(row), attention_mask=mask, use_cache=False, output_hidden_states=True)
            total = total + sign * (out.logits.square().mean() + out.hidden_states[1].square().sum())
        with torch.no_grad():
            made(IDS[:, :7])
        total.backward()
        found.append({name: one.grad for name, one in own.named_parameters()})
    torch.testing.assert_close(found[1], found[0], rtol=1e-9, atol=1e-11)


def test_a_layer_in_place_of_all_attentions() -> None:
    made = llama()
    own = attached(made, "ttt_linear", how="replace")
    trained(own)
    logits, cache = read_in_pieces(made, 9, 12)
    close(logits, made(IDS).logits)
    assert cache.get_seq_length() == 21


@pytest.mark.parametrize("kind", ["ttt_linear", "in_place"])
def test_five_steps_of_the_trainer_change_the_chosen_weights_alone(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    made = llama().float()
    own = attached(made, kind)
    made.requires_grad_(False)
    for parameter in own.parameters():
        parameter.requires_grad_()
    before = {name: value.clone() for name, value in made.state_dict().items()}
    arguments = transformers.TrainingArguments(
        tmp_path, max_steps=5, per_device_train_batch_size=2, learning_rate=1e-2, report_to=[], use_cpu=True,
        save_strategy="no", disable_tqdm=True, logging_strategy="no",
    )  # fmt: skip
    rows = [{"input_ids": row, "labels": row} for row in IDS.repeat(5, 1)]
    transformers.Trainer(made, arguments, train_dataset=rows).train()
    new = {name for name, _ in own.named_parameters()}
    moved = {name for name, value in made.state_dict().items() if not torch.equal(value, before[name])}
    assert moved and moved <= new


def test_what_an_optimizer_gets_leaves_a_fixed_w0_where_it_is() -> None:
    own = attach(llama(), ATTENTION, layer="delta_net")
    fixed = {name for name, parameter in own.named_parameters() if not parameter.requires_grad}
    assert fixed and all(name.endswith("learner.init.w1") for name in fixed)
    own.model.requires_grad_(False)
    for parameter in own.parameters():
        parameter.requires_grad_()
    assert fixed == {name for name, parameter in own.named_parameters() if not parameter.requires_grad}


@pytest.mark.parametrize(("targets", "whole"), [(["q_proj", "v_proj", "up_proj"], ["layer"]), ("all-linear", None)])
@pytest.mark.parametrize("kind", ["ttt_linear", "in_place"])
def test_peft_beside_it(kind: str, targets: Any, whole: Any, tmp_path: Path) -> None:
    """Adapters inside of what is attached and beside it: saved by peft, and read again by it."""
    peft = pytest.importorskip("peft")
    made = llama()
    trained(layers := attached(made, kind))
    logits = made(IDS).logits
    config = peft.LoraConfig(r=2, target_modules=targets, modules_to_save=whole, task_type="CAUSAL_LM")
    tuned = peft.get_peft_model(made, config)
    torch.testing.assert_close(tuned(IDS).logits, logits)
    for name, parameter in tuned.named_parameters():
        if "lora_B" in name or "modules_to_save" in name:
            parameter.data += 0.1
    logits = tuned(IDS).logits
    tuned.save_pretrained(tmp_path / "adapter")
    layers.save(tmp_path / "layers.safetensors")
    other = llama()
    load_attached(tmp_path / "layers.safetensors", other)
    torch.testing.assert_close(peft.PeftModel.from_pretrained(other, tmp_path / "adapter")(IDS).logits, logits)


@pytest.mark.parametrize(("name", "target"), [("mamba", "dt_proj"), ("longhorn", "dt_head")])
def test_what_stands_in_place_of_a_map_of_steps_is_called(name: str, target: str) -> None:
    layer, x = build(name, dim=16, num_heads=2, seed=0), torch.randn(1, 9, 16)
    before, plain = layer(x)[0], getattr(layer, target)
    with plain.register_forward_hook(lambda _, given, made: 0 * made):
        assert not torch.allclose(layer(x)[0], before)
    assert torch.equal(layer(x)[0], before)
    called: list[nn.Module] = []
    with plain.register_full_backward_pre_hook(lambda module, _: called.append(module)):
        layer(x)[0].sum().backward()
    assert called == [plain]
    setattr(layer, target, nn.Sequential(plain))
    torch.testing.assert_close(layer(x)[0], before)
    setattr(layer, target, nn.Sequential(nn.ReLU(), plain))
    assert not torch.allclose(layer(x)[0], before)


def test_a_cache_is_copied_and_pickled_with_its_states() -> None:
    made = llama()
    trained(attached(made, "ttt_linear"))
    with torch.no_grad():
        whole, cache = made(IDS).logits, cache_of(made(IDS[:, :13], use_cache=True))
        for other in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
            close(made(IDS[:, 13:], use_cache=True, **{CACHE: other}).logits, whole[:, 13:])
        cache.batch_select_indices(torch.tensor([False, True]))
        cache.batch_repeat_interleave(2)
        close(made(IDS[[1, 1], 13:], use_cache=True, **{CACHE: cache}).logits, whole[[1, 1], 13:])
        cache.reset()
        assert not cache.metattt_states


def test_detaching_once_more_leaves_what_was_attached_since() -> None:
    made = llama()
    (first := attached(made, "ttt_linear")).detach()
    trained(attach(made, ATTENTION, layer="mamba"))
    logits = made(IDS).logits
    first.detach()
    assert torch.equal(made(IDS).logits, logits)


def test_mistakes_are_named() -> None:
    made = llama()
    hooks = [len(one._forward_hooks | one._forward_pre_hooks) for one in made.modules()]
    for pattern, layer, settings, message in (
        ("layers.*.attn", "ttt_linear", {}, "are called model.layers.0.self_attn, model.layers.0.mlp.down_proj"),
        ([ATTENTION, "layers.*.attn"], "ttt_linear", {}, "layers.*.attn names no module"),
        ([], "ttt_linear", {}, "names no module"),
        ("*", "ttt_linear", {}, "model is in no list of blocks"),
        (ATTENTION, "ttt_lineer", {}, "ttt_linear"),
        (DOWN, "ttt_linear", {}, "goes beside an attention"),
        (ATTENTION, "in_place", {}, "takes linear maps"),
        ("model.layers.*.mlp.[du]*_proj", "in_place", {"lr": 1.0}, "takes linear maps of MLPs"),
        (ATTENTION, "ttt_linear", {"dim": 8}, "dim is no setting"),
        (ATTENTION, "mttt_linear", {}, "must not see it: optimizer.read=final"),
        (ATTENTION, "ttt_linear", {"direction": "both"}, "must not see it: Bidirectional"),
        (DOWN, "in_place", {"chunks": 4}, "chunk, lr, project"),
        (DOWN, "in_place", {"labels": "tokens"}, "labels=tokens"),
        (DOWN, "in_place", {"chunk": 0}, "chunk=0"),
        (DOWN, "in_place", {"how": "replace"}, "how=replace"),
        (DOWN, "in_place", {"lr": "a"}, "lr=a"),
        ("model.layers.*.mlp.up_proj", "in_place", {}, "the last of each, which makes the 16 features"),
        ("model.layers.*.self_attn.o_proj", "in_place", {}, "takes linear maps of MLPs"),
    ):
        refusal(partial(attach, made, pattern, layer=layer, **settings), message)
        assert hooks == [len(one._forward_hooks | one._forward_pre_hooks) for one in made.modules()]
    no_config = type("Embedded", (nn.Linear,), {"get_input_embeddings": None})(2, 2)
    refusal(lambda: attach(no_config, "*", layer="ttt_linear"), "not a Embedded")
    bloom = transformers.BloomForCausalLM(transformers.BloomConfig(hidden_size=16, n_layer=1, n_head=2, vocab_size=V))
    with pytest.raises(MetaTTTError, match="adds the residual connection itself"):
        attach(bloom, "transformer.h.*.self_attention", layer="ttt_linear", how="replace")
    refusal(lambda: attach(bloom, "attn", layer="ttt_linear"), "are called transformer.h.0.self_attention")
    refusal(lambda: attach(nn.Linear(3, 3), "", layer="in_place"), "and not a Linear")
    own = attached(made, "ttt_linear")
    refusal(lambda: cache_of(made(IDS, use_cache=True)).crop(3), "assisted generation")
    own.detach()
    full = made(IDS, use_cache=True)
    attached(made, "ttt_linear")
    refusal(lambda: made(IDS, **{CACHE: cache_of(full)}), "begin with a new cache")


@pytest.mark.parametrize("kind", ["ttt_linear", "in_place"])
def test_what_transformers_saves_is_still_the_pretrained_model(kind: str, tmp_path: Path) -> None:
    """Its tensors keep their names, and the new ones stand beside them; both are read back into the model."""
    made = llama()
    before, names = made(IDS).logits, set(made.state_dict())
    own = attached(made, kind)
    made.save_pretrained(tmp_path)
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    assert torch.equal(copy.deepcopy(plain)(IDS).logits, before)  # a copy: tensors of a file lie otherwise
    held = {name: x.clone() for name, x in made.state_dict().items()}
    assert held.keys() - names == {name for name, _ in own.named_parameters()}
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(1)
    made.load_state_dict(held)
    assert torch.equal(made(IDS).logits, before)
    refusal(lambda: attached(made, kind), "has an attached layer already: call its `detach()` first")


def test_a_file_that_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    made, file = llama(), tmp_path / "layers"
    own = attached(made, "in_place")
    trained(own)
    own.save(file)
    own.detach()
    before = made(IDS).logits
    other = hf_for_tests.llama(vocab_size=V, hidden_size=24)
    refusal(lambda: load_attached(file, other), "is of another model")
    refusal(lambda: load_attached(file, llama("Mistral")), "of the type llama, and this is a mistral")
    refusal(lambda: load_attached(file), "had no name: give model=")
    made.config._name_or_path = str(tmp_path / "gone")
    own.save(file)
    refusal(lambda: load_attached(file), "which cannot be read: give model=")
    assert type(other.model.layers[0].mlp.down_proj) is nn.Linear
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)
    refusal(lambda: load_attached(file, made), "damaged")
    file.write_bytes(b"junk")
    refusal(lambda: load_attached(file, made))
    about = {"format": FORMAT, "base": "", "pattern": "*", "layer": "in_place", "how": "beside"}
    for text in ("", "[]", *(json.dumps(about | more) for more in ({"layer": 3}, {"settings": {"layer": "mamba"}}))):
        write_tensors(file, {"a": torch.zeros(2)}, text)
        refusal(lambda: load_attached(file, made), match=r"holds no attached layers|is damaged")
    assert torch.equal(made(IDS).logits, before)


@pytest.mark.parametrize("settings", [{"learner._target_": "os.x"}, {"task": "custom"}, {"dim": "${oc.env:A}"}, {"hydra.searchpath": "x"}])
def test_a_file_cannot_run_code(settings: dict[str, str], tmp_path: Path) -> None:
    about = {"format": FORMAT, "base": "", "pattern": ATTENTION, "layer": "ttt_linear", "how": "beside"}
    write_tensors(tmp_path / "layers", {"a": torch.zeros(2)}, json.dumps(about | {"settings": settings}))
    refusal(lambda: load_attached(tmp_path / "layers", llama()), "names classes of its own", "load_state_dict")
