"""A model that learns the text it reads: equal to a plain loop with torch's optimizers, and each token scored first."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import hf_for_tests
import pytest
import torch
import torch.nn.functional as F
from refusals_for_tests import refusal
from torch import Tensor, nn

import metattt
from metattt import Adapter, MetaTTTError
from metattt.adaptation.constant_gates import constant_gates
from metattt.models import LanguageModel
from metattt.optimizers import Adam, BlockMomentum, GradientDescent, Sign

V, SIZE = 40, 6
IDS = torch.randint(0, V, (2, 27), generator=torch.Generator().manual_seed(1))
FAST = ("lora", "mlp", "norms", "all")


def ours(layer: str = "ttt_linear") -> LanguageModel:
    model = LanguageModel(V, 16, 2, lambda: metattt.build(layer, dim=16, num_heads=2, seed=0), checkpoint_blocks=True)
    return model.double().eval()


def llama() -> nn.Module:
    return hf_for_tests.llama(vocab_size=V, max_position_embeddings=32).double()


def gpt2() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=V, n_positions=32, n_embd=16, n_layer=2, n_head=2)
    return transformers.GPT2LMHeadModel(config).double().eval()


MODELS = {
    "ours": ours, "attention": lambda: ours("attention"), "llama": llama, "gpt2": gpt2,
    "titans": lambda: ours("titans"),  # in its first mini-batch queries read W0 alone: keys and labels have no gradient
}  # fmt: skip


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9, equal_nan=True)


def adam(**settings: float) -> Adam:
    return Adam(**{"base_lr": 0.01, "beta2": 0.999, "eps": 1e-6, "mini_batch_size": SIZE} | settings)


def momentum(**settings: float) -> BlockMomentum:
    fixed = {"lr": "constant", "momentum": "constant", "base_lr": 0.05, "mini_batch_size": SIZE}
    return BlockMomentum(**fixed | settings)


RULES: dict[str, tuple[Callable[[], object], Callable[[list[Tensor]], torch.optim.Optimizer]]] = {
    # (the rule's moments are of η G: its eps is that of torch times η)
    "adam": (adam, lambda found: torch.optim.Adam(found, lr=0.01, betas=(0.9, 0.999), eps=1e-6 / 0.01)),
    "momentum": (momentum, lambda found: torch.optim.SGD(found, lr=0.05, momentum=0.9)),
}


def plain_loop(model: nn.Module, rule: str, fast: tuple[str, ...], context: int, clip: float | None) -> Tensor:
    """Nats of both documents, one after the other, by torch's optimizer on a copy of the model."""
    found = []
    for ids in IDS:
        own = copy.deepcopy(model)
        moved = [one for name, one in own.named_parameters() if any(part in name for part in fast)]
        optimizer, nats = RULES[rule][1](moved), [torch.tensor([torch.nan], dtype=torch.float64)]
        for start in range(0, len(ids), SIZE):
            labels = ids[max(start, 1) : start + SIZE]
            read = ids[max(0, start - 1 - context) : start + SIZE - 1][: len(ids) - 1 - max(0, start - 1 - context)]
            logits = own(read[None]).logits[0] if hasattr(own, "config") else own(read[None])[0]
            losses = F.cross_entropy(logits[-len(labels) :], labels, reduction="none")
            nats.append(losses.detach())
            optimizer.zero_grad()
            (losses.sum() / SIZE).backward()
            if clip is not None:  # (torch's own adds 1e-6 to the norm)
                norm = torch.stack([one.grad.square().sum() for one in moved]).sum().sqrt()
                for one in moved:
                    one.grad *= min(1.0, clip / float(norm))
            optimizer.step()
        found.append(torch.cat(nats))
    return torch.stack(found)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("model", "fast", "parts"), [
    ("llama", "norms", ("norm",)),
    ("llama", ["*.self_attn.q_proj.weight", "lm_head.weight"], ("q_proj", "lm_head")),
    ("gpt2", "mlp", ("mlp.c_fc", "mlp.c_proj")),
    ("gpt2", ["transformer.wte.weight"], ("wte",)),  # which is the head, too
    ("ours", "mlp", ("ffn.gate", "ffn.up", "ffn.down")),
])  # fmt: skip
def test_equals_a_plain_loop_with_torchs_optimizer(model: str, fast: object, parts: tuple[str, ...], rule: str) -> None:
    made = MODELS[model]()
    clip = 0.1 if rule == "adam" else None
    adapter = Adapter(made, fast, RULES[rule][0](), context=5, clip=clip)
    expected = plain_loop(made, rule, parts, 5, clip)
    close(adapter.read(IDS).nats, expected)


def test_the_padding_of_an_embedding_learns_in_no_document() -> None:
    made = hf_for_tests.llama(vocab_size=V, pad_token_id=int(IDS[1, 3])).double()
    adapter = Adapter(made, ["model.embed_tokens.weight"], momentum(), context=5, clip=None)
    expected = plain_loop(made, "momentum", ("embed_tokens",), 5, None)
    torch.testing.assert_close(adapter.read(IDS).nats, expected, rtol=1e-7, atol=1e-7, equal_nan=True)  # norms are in fp32


@pytest.mark.parametrize(
    ("model", "fast"), [*(("ours", fast) for fast in FAST), ("attention", "lora"), ("llama", "all"), ("gpt2", "lora"), ("titans", "lora")]
)
def test_documents_are_scored_as_if_alone_in_any_pieces(model: str, fast: str) -> None:
    made = MODELS[model]()
    before = {name: value.clone() for name, value in made.state_dict().items()}
    whole = Adapter(made, fast, adam())
    nats = whole.read(IDS).nats
    assert nats[:, 0].isnan().all() and nats[:, 1:].isfinite().all()
    frozen = Adapter(made, fast, adam()).score(IDS).nats
    assert torch.allclose(frozen[:, 1:SIZE], nats[:, 1:SIZE]) and not torch.allclose(frozen[:, SIZE:], nats[:, SIZE:])

    cut = Adapter(made, fast, adam())
    pieces = []
    for piece in IDS.split([1, 3, 9, 14], dim=1):
        cut.score(piece)  # changes nothing
        pieces.append(cut.read(piece).nats)
    close(torch.cat(pieces, dim=1), nats)
    learned = Adapter(made, fast, adam())
    learned.learn(IDS[:, :20])
    close(learned.read(IDS[:, 20:]).nats, nats[:, 20:])

    single = Adapter(made, fast, adam(mini_batch_size=1)).read(IDS[:, :4], logits=True).logits
    assert single is not None and single.shape == (2, 4, V)
    close(torch.cat([Adapter(made, fast, adam()).read(row[None]).nats for row in IDS]), nats)
    ended = nats.clone()
    ended[1, 15:] = torch.nan
    close(Adapter(made, fast, adam()).read([IDS[0], IDS[1, :15]]).nats, ended)
    assert all(torch.equal(value, before[name]) for name, value in made.state_dict().items())


@pytest.mark.parametrize("rule", [adam(steps=2), momentum(orthogonalize=True), Sign(base_lr=1e-3, lr="constant")])
def test_rules_of_the_inner_loop(rule: Adam) -> None:
    rule.mini_batch_size = SIZE
    adapter = Adapter(ours(), "lora", rule)
    nats = adapter.read(IDS).nats
    assert nats[:, 1:].isfinite().all() and adapter.state is not None
    assert any(value.abs().max() > 0 for name, value in adapter.state.weights["commit"].items() if name.endswith("/up"))


def test_weights_that_a_layer_finds_diverged_are_named() -> None:
    adapter = Adapter(ours(), "lora", adam())
    adapter.learn(IDS[:, :SIZE])
    for value in adapter.state.weights["commit"].values():
        value.fill_(torch.inf)
    refusal(lambda: adapter.read(IDS[:, :SIZE]), match="the fast weights have diverged; lower")


def test_repetition_is_learned_and_generated() -> None:
    model, text = ours(), torch.arange(8).repeat(40)[None]
    adapter = Adapter(model, "all", adam(base_lr=0.02, mini_batch_size=16))
    nats = adapter.read(text).nats
    assert nats[0, -16:].mean() < 0.3 * nats[0, 1:17].mean()
    continued = adapter.generate(text[:, :9], 7, temperature=0)
    assert continued.tolist() == [[0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7]]
    assert Adapter(model).generate(text[:, :9], 3, temperature=0).shape == (1, 12)


def test_copies_single_tokens_beams_and_inference_mode(tmp_path: Path) -> None:
    made = llama()
    adapter = Adapter(made, rule=adam())
    with torch.inference_mode():
        adapter.read(IDS), adapter.next_documents()
        adapter.save(tmp_path / "adapted.safetensors"), adapter.load(tmp_path / "adapted.safetensors")
        adapter.read(IDS[:, :20])
    nats, other = adapter.score(IDS).nats, copy.deepcopy(adapter)
    for one in (other, pickle.loads(pickle.dumps(adapter))):
        assert torch.equal(one.score(IDS).nats.nan_to_num(), nats.nan_to_num())
    other.learn(IDS)
    assert torch.equal(adapter.score(IDS).nats.nan_to_num(), nats.nan_to_num())
    options = {"max_new_tokens": 5, "num_beams": 3, "do_sample": False}
    together = adapter.generate(IDS[:, :4], **options)
    config = type(made.generation_config)(max_new_tokens=5)
    for length in ({"max_length": 9}, {"generation_config": config}):
        assert adapter.generate(IDS[:, :4], **length).shape[1] <= 9
    for row in range(2):
        alone = Adapter(made, rule=adam())
        alone.read(IDS[row : row + 1]), alone.next_documents(), alone.read(IDS[row : row + 1, :20])
        assert torch.equal(alone.generate(IDS[row : row + 1, :4], **options)[0], together[row])
    single = Adapter(made, rule=adam(mini_batch_size=1), context=5)
    assert single.read(IDS).nats[:, 1:].isfinite().all()


@pytest.mark.parametrize("model", ["ours", "llama"])
def test_saved_and_carried_on(model: str, tmp_path: Path) -> None:
    made = MODELS[model]()
    adapter = Adapter(made, "lora", adam())
    adapter.read(IDS)
    adapter.save(tmp_path / "adapted.safetensors")
    other = Adapter(made, "lora", adam())
    other.load(tmp_path / "adapted.safetensors")
    adapter.next_documents(), other.next_documents()
    one, two = adapter.read(IDS.flip(1)), other.read(IDS.flip(1))
    assert torch.equal(one.nats.nan_to_num(), two.nats.nan_to_num())
    fresh = Adapter(made, "lora", adam()).read(IDS.flip(1))
    assert not torch.allclose(one.nats[:, 1:SIZE], fresh.nats[:, 1:SIZE])
    alone, beside = Adapter(made, "lora", adam()), Adapter(made, "lora", adam())
    alone.read(IDS[:1, : SIZE + 3]), beside.read([IDS[0, : SIZE + 3], IDS[1]])  # the first ends, and the second goes on
    alone.next_documents(), beside.next_documents()
    close(beside.read(IDS.flip(1)).nats[:1], alone.read(IDS[:1].flip(1)).nats)
    with pytest.raises(MetaTTTError, match="made by another rule: make the adapter with the same rule"):
        Adapter(made, "lora", BlockMomentum(SIZE, lr="constant", momentum="constant")).load(tmp_path / "adapted.safetensors")
    slower = Adapter(made, "lora", BlockMomentum(SIZE, lr="constant", momentum="constant"))
    slower.read(IDS), slower.save(tmp_path / "momentum.safetensors")  # Adam has such a slot, and two more
    refusal(lambda: other.load(tmp_path / "momentum.safetensors"), "made by another rule")
    for given, own in ((None, 3), (3, None), (3, 5)):
        before = Adapter(made, "lora", adam(), context=given)
        before.read(IDS[:, :20]), before.save(tmp_path / "context.safetensors")
        Adapter(made, "lora", adam(), context=given).load(tmp_path / "context.safetensors")
        refusal(partial(Adapter(made, "lora", adam(), context=own).load, tmp_path / "context.safetensors"), "made with another context")
        before.next_documents(), before.save(tmp_path / "context.safetensors")
        Adapter(made, "lora", adam(), context=own).load(tmp_path / "context.safetensors")
    refusal(lambda: Adapter(made, "norms", adam()).load(tmp_path / "adapted.safetensors"), "other fast weights")
    other = Adapter(ours("linear_attention"), "lora", adam())
    refusal(lambda: other.load(tmp_path / "adapted.safetensors"), "another model")


@pytest.mark.parametrize(("settings", "message"), [
    ({"rule": BlockMomentum()}, "gates that depend on the token"),
    ({"rule": GradientDescent()}, "give one that moves the weights once per mini-batch"),
    ({"rule": momentum(read="committed")}, "read=committed"),
    ({"fast": "everything"}, "names no parameter"),
    ({"fast": ["blocks.0.ffn.*", "block.1.*"]}, "fast=block.1.*"),
    ({"fast": ["blocks.0.layer.learner.init.*"]}, "is not applied by its own module"),
    ({"fast": ["blocks.0.ffn_norm.weight"], "rank": 2}, "is no matrix"),
    ({"context": -1}, "context"),
    ({"rank": 0}, "rank=0"), ({"seed": "x"}, "seed=x"), ({"frozen_blocks": -1}, "frozen_blocks=-1"), ({"fast": None}, "fast=None"),
    ({"clip": -1.0}, "clip=-1.0"), ({"clip": float("nan")}, "clip=nan"),
])  # fmt: skip
def test_what_cannot_be_adapted_is_refused(settings: dict[str, object], message: str) -> None:
    refusal(lambda: Adapter(ours(), **settings), message)


class Experts(nn.Module):
    """Halves of all tokens to one of two maps each, as a mixture of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(16, 16).double() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        half = (len(rows) + 1) // 2
        return torch.cat([self.experts[0](rows[:half]), self.experts[1](rows[half:])]).view_as(x)


COMPILED: dict[str, Callable[[Any], object]] = {
    "module.compile": lambda block: block.compile(backend="eager"),
    "linear.compile": lambda block: block.ffn.down.compile(backend="eager"),
    "torch.compile": lambda block: setattr(block, "ffn", torch.compile(block.ffn, backend="eager")),
    "forward": lambda block: setattr(block, "forward", torch.compile(block.forward, backend="eager")),
}


@pytest.mark.parametrize("kind", COMPILED)
def test_a_model_with_compiled_modules_learns_as_without(kind: str) -> None:
    """A compiled module of the model's copy must not call that of the model, which has no fast weights."""
    model = ours("attention")
    expected = Adapter(model, "mlp", adam()).read(IDS).nats
    COMPILED[kind](model.blocks[1])
    close(Adapter(model, "mlp", adam()).read(IDS).nats, expected)


@pytest.mark.parametrize("rank", [2, None])
def test_rows_that_are_not_sorted_by_document_are_refused(rank: int | None) -> None:
    made = ours()
    for block in made.blocks:
        block.ffn = Experts()
    pattern = ["blocks.*.ffn.experts.*.weight"]
    assert Adapter(made, pattern, adam(), rank).read(IDS[:1]).nats[:, 1:].isfinite().all()
    refusal(lambda: Adapter(made, pattern, adam(), rank).read(IDS), "one document at a time")


def test_a_router_stays_as_it_is_and_all_others_learn() -> None:
    sizes = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "q_lora_rank": 8}
    made = hf_for_tests.llama("DeepseekV3", vocab_size=V, first_k_dense_replace=0, moe_intermediate_size=8, **sizes)
    adapter = Adapter(made, "all", adam())
    assert adapter.read(IDS).nats[:, 1:].isfinite().all()  # a router returns several tensors
    assert "model.embed_tokens.weight" in adapter.fast.start and not any("mlp.gate." in name for name in adapter.fast.start)


def test_linear_maps_that_are_left_out_are_named(caplog: pytest.LogCaptureFixture) -> None:
    sizes = {"hidden_size": 8, "word_embed_proj_dim": 8, "ffn_dim": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    transformers = pytest.importorskip("transformers")
    model = transformers.OPTForCausalLM(transformers.OPTConfig(vocab_size=V, **sizes))
    assert all("self_attn" in name for name in Adapter(model, "lora").fast.start)
    assert "leaves out 4 linear maps" in caplog.text and "model.decoder.layers.0.fc1.weight" in caplog.text
    caplog.clear()
    refusal(lambda: Adapter(model, "mlp"), match="fast=mlp names no parameter")
    assert "fast=mlp leaves out 4 linear maps" in caplog.text  # why there is none
    refusal(lambda: Adapter(model, "lora", frozen_blocks=2), match="frozen_blocks=2 may leave none")
    made = llama()  # as Zamba2 has them: blocks share maps, and each calls some of these
    made.model.layers[1].mlp.spare = nn.Linear(1, 1)
    made.model.layers[1].mlp.spare.weight = made.model.layers[0].mlp.up_proj.weight
    assert len(Adapter(made, "mlp", adam()).fast.start) == 5 and "leaves out 1 linear maps" in caplog.text


def test_a_quantised_map_learns_a_low_rank_change() -> None:
    made, nats = llama(), []
    for scale, kind in ((64, torch.float64), (1, torch.int8)):
        for one in (block.mlp.down_proj for block in made.model.layers):
            one.weight = nn.Parameter((scale * one.weight.data).round().to(kind), requires_grad=False)
            one.forward = lambda x, one=one: F.linear(x, one.weight.double() / 64)
        nats.append(Adapter(made, "lora", adam()).read(IDS).nats)
    close(*nats)


@pytest.mark.parametrize("fast", ["lora", "all"])
def test_experts_that_are_left_out_are_named(fast: str, caplog: pytest.LogCaptureFixture) -> None:
    made = hf_for_tests.llama("Mixtral", vocab_size=V, num_key_value_heads=1, num_local_experts=2)
    assert not any("experts" in name for name in Adapter(made, fast).fast.start)
    assert f"fast={fast} leaves out 4 linear maps" in caplog.text and "mlp.experts.gate_up_proj" in caplog.text


def test_the_maps_of_mlps_are_those_of_all_and_of_no_attention() -> None:
    settings = {"vocab_size": V, "num_key_value_heads": 1, "num_dense_layers": 2, "num_local_experts": 2, "num_experts_per_tok": 1}
    for kind, count in (("Afmoe", 6), ("GraniteMoeShared", 4)):
        found = Adapter(hf_for_tests.llama(kind, shared_intermediate_size=8, **settings), "mlp").fast.start
        assert len(found) == count and all("mlp." in name for name in found)


def test_a_list_of_modules_inside_of_a_block_is_not_the_blocks() -> None:
    model = LanguageModel(V, 8, 1, partial(metattt.build, "titans_mag", dim=8, num_heads=2), pre_conv=False).eval()
    assert any(name.startswith("blocks.0.ffn.") for name in Adapter(model, "lora").fast.start)


def seeing() -> Any:
    """A model of text and images, whose images have more blocks than its text."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
    torch.manual_seed(0)
    return transformers.LlavaForConditionalGeneration(transformers.LlavaConfig(
        vision_config={"model_type": "clip_vision_model", "num_hidden_layers": 3, "image_size": 16, "patch_size": 8, **sizes},
        text_config={"model_type": "llama", "vocab_size": V, "num_hidden_layers": 2, "max_position_embeddings": 90, **sizes},
        image_token_index=V - 1,
    )).eval()  # fmt: skip


def test_the_blocks_of_a_model_that_sees_images_are_those_of_its_text() -> None:
    model = seeing()
    adapter = Adapter(model, "lora", adam())
    assert all(name.startswith("model.language_model.layers.") for name in adapter.fast.start)
    assert adapter.read(IDS).nats[:, 1:].isfinite().all()
    refusal(lambda: adapter.score(IDS + V), "vocab")
    refusal(lambda: Adapter(model, "lora", adam(), context=90), "90 positions")
    metattt.attach(model, "model.language_model.layers.*.self_attn", layer="ttt_linear")
    model(IDS)


def test_a_module_that_has_other_values_during_a_call_learns_nothing(caplog: pytest.LogCaptureFixture) -> None:
    peft = pytest.importorskip("peft")
    settings = {"target_parameters": ["mlp.down_proj.weight"], "target_modules": [], "init_lora_weights": False}
    model = peft.get_peft_model(llama(), peft.LoraConfig(r=2, **settings)).eval()
    refusal(lambda: Adapter(model, "*down_proj*weight", adam()), "is not applied by its own module")
    adapter = Adapter(model, "mlp", adam())
    assert "leaves out 6 linear maps" in caplog.text and adapter.fast.start
    with torch.no_grad():
        logits = model(input_ids=IDS[:, :2]).logits[:, :1]
    close(adapter.score(IDS[:, :2]).nats[:, 1:], F.cross_entropy(logits.mT, IDS[:, 1:2], reduction="none"))


def test_what_all_learned_is_generated_with_and_without_a_cache() -> None:
    sizes = {"lru_width": 16, "num_hidden_layers": 3, "attention_window_size": 8, "eos_token_id": None}
    adapter = Adapter(hf_for_tests.llama("RecurrentGemma", vocab_size=V, **sizes), "all", adam(base_lr=0.3), clip=None)
    adapter.learn(IDS)
    one, two = (adapter.generate(IDS[:, :5], 12, do_sample=False, use_cache=cached) for cached in (True, False))
    assert torch.equal(one, two)  # with a cache, its convolutions are not called
    refusal(lambda: Adapter(adapter.base, ["*.conv_1d.weight"]), "conv_1d.weight is not applied by its own module")


@pytest.mark.parametrize("fast", ["lora", "mlp", "all"])
def test_hooks_of_modules_run_once_and_outside_of_transforms(fast: str) -> None:
    made = llama()
    made.gradient_checkpointing_enable()  # a hook makes embeddings require a gradient
    for block in made.model.layers:
        block.mlp.down_proj.register_forward_hook(lambda _, given, y: 2 * y)
    adapter = Adapter(made, fast, adam(), context=25)
    nats = F.cross_entropy(made(IDS[:, :25]).logits[:, :-1].mT, IDS[:, 1:25], reduction="none")
    torch.testing.assert_close(adapter.score(IDS[:, :25]).nats[:, 1:], nats, rtol=1e-9, atol=1e-9)
    assert adapter.read(IDS).nats[:, 1:].isfinite().all()


@pytest.mark.parametrize(
    ("kind", "message"),
    [("BertLMHeadModel", "changes what it predicts"), ("T5ForConditionalGeneration", "not a T5For"), ("", "not a Linear"),
     ("CpmAntForCausalLM", "changes what it predicts"),  # and sees no token 0
     *((f"Llama{end}", f"not a Llama{end}") for end in ("Model", "ForTokenClassification", "ForQuestionAnswering"))],
)  # fmt: skip
def test_models_that_see_the_token_they_predict_or_predict_none_are_refused(kind: str, message: str) -> None:
    transformers = pytest.importorskip("transformers")
    made: nn.Module = nn.Linear(2, 2)
    if kind:
        known = getattr(transformers, kind)
        made = known(known.config_class(vocab_size=V, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, d_ff=16))
    refusal(lambda: Adapter(made), message)


def test_calls_that_do_not_fit_are_refused() -> None:
    adapter = Adapter(ours(), "norms", adam())
    refusal(lambda: Adapter((adapter.base, None)), "and not a tuple")  # what `load_model` returns
    refusal(lambda: adapter.save("nowhere"), "nothing to save")
    for ids in (IDS[0], IDS.double(), "text", IDS - 1000, IDS + 1000, IDS.numpy()):
        refusal(partial(adapter.read, ids), "ids")
    adapter.read(IDS)
    refusal(lambda: adapter.read(IDS[:1]), "reads 2 documents")
    refusal(lambda: adapter.generate(IDS[:1].repeat(3, 1)), "holds 2 documents")
    adapter.read([IDS[0], IDS[1, :3]])
    refusal(lambda: adapter.read(IDS), "has ended")
    refusal(lambda: Adapter(llama(), rule=adam(mini_batch_size=20)), "32 positions")
    refusal(lambda: Adapter(ours(), "all", momentum(base_lr=1e30), clip=None).read(IDS), match=r"not finite|NaN")


def test_the_steps_of_a_model_in_float64_are_not_rounded() -> None:
    rule = BlockMomentum(base_lr=0.3, lr="constant", lr_scale="none", momentum="none")
    assert constant_gates(rule, ["w"], torch.zeros(1, dtype=torch.float64)).eta.item() == 0.3
