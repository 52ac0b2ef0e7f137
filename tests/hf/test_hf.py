"""Models of ours in Hugging Face Transformers: the same numbers and texts, in a process that knows nothing else."""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from compositions_for_tests import OWN_LEARNER
from hf_for_tests import LAYERS, made, write_made, write_published
from omegaconf import OmegaConf
from refusals_for_tests import refusal
from torch import Tensor

pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

import metattt
import metattt.hf
from metattt.checkpoints.convert import convert
from metattt.checkpoints.trained import open_trained, read_weights
from metattt.cli import main
from metattt.composition.compose import compose
from metattt.data.text import ByteTokenizer
from metattt.data.tokenizers import FileTokenizer, load_tokenizer, tokenizer_of
from metattt.errors import MetaTTTError
from metattt.generation import static_step
from metattt.generation.text import generate_text
from metattt.hf import MetaTTTCache, MetaTTTConfig, MetaTTTForCausalLM
from metattt.nested import tensors_of

ROOT = Path(__file__).resolve().parents[2]
PROMPTS = ["hello wörld", "a", "def read(text):\n    return"]
TOKENS = 12

FRESH = """
import json, sys, torch, metattt.hf
from transformers import AutoModelForCausalLM, AutoTokenizer
torch.set_num_threads(1)
found = {}
for name, (folder, prompts, tokens) in json.loads(sys.argv[1]).items():
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    given = tokenizer(prompts, return_tensors="pt", padding=True)
    alone = [tokenizer(one, return_tensors="pt") for one in prompts]
    greedy = lambda given: model.generate(**given, max_new_tokens=tokens, do_sample=False)[:, given.input_ids.shape[1]:]
    with torch.no_grad():
        found[name] = {
            "logits": [model(**one).logits[0].tolist() for one in alone],
            "padded": [model(**given).logits[i, -one.input_ids.shape[1]:].tolist() for i, one in enumerate(alone)],
            "texts": tokenizer.batch_decode(greedy(given), skip_special_tokens=True),
            "single": [tokenizer.decode(greedy(one)[0], skip_special_tokens=True) for one in alone],
        }
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models of ours, a published checkpoint, and that one converted."""
    folder = tmp_path_factory.mktemp("models")
    for name, overrides in LAYERS.items():
        write_made(folder / name, *overrides)
    write_published(folder / "published")
    convert(compose(f"source={folder / 'published'}", f"target={folder / 'converted'}", job="convert"))
    return folder


@pytest.fixture(scope="module")
def exported(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All of them, exported."""
    folder = tmp_path_factory.mktemp("exported")
    for source in sorted(sources.iterdir()):
        assert main(["export", f"source={source}", f"target={folder / source.name}"]) == 0
    return folder


@pytest.fixture(scope="module")
def fresh(exported: Path) -> Any:
    """What a new process gets from the folders."""
    asked = {one.name: (str(one), _prompts(one.name), TOKENS) for one in sorted(exported.iterdir())}
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", FRESH, json.dumps(asked)], env=environment, cwd=exported, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def _prompts(name: str) -> list[str]:
    return ["hello world", "a", "the inner loop"] if name in ("published", "converted") else PROMPTS


def _tokenizer(source: Path) -> Any:
    file = source / "tokenizer.json"
    return load_tokenizer(str(file)) if file.exists() else ByteTokenizer()


def test_an_export_of_a_model_of_bytes_is_one(exported: Path) -> None:
    """To compare it with its run, both must have one tokenizer; others keep theirs."""
    for name, kind in ((next(iter(LAYERS)), ByteTokenizer), ("converted", FileTokenizer)):
        about = open_trained(exported / name)
        assert type(tokenizer_of(name, about.tokenizer, about.config.model.vocab_size)) is kind


@pytest.mark.slow
@pytest.mark.parametrize("name", [*LAYERS, "published", "converted"])
def test_a_fresh_process_has_our_logits_and_texts(name: str, sources: Path, fresh: Any) -> None:
    model, _ = metattt.load_model(sources / name)
    tokenizer, found = _tokenizer(sources / name), fresh[name]
    for prompt, alone, padded in zip(_prompts(name), found["logits"], found["padded"], strict=True):
        ids = torch.tensor([[tokenizer.separator, *tokenizer.encode(prompt).tolist()]])
        for logits in (alone, padded):
            torch.testing.assert_close(torch.tensor(logits), model(ids)[0], rtol=0, atol=1e-5)
    wanted = generate_text(model, tokenizer, _prompts(name), TOKENS, temperature=0)
    assert found["texts"] == found["single"] == wanted
    assert len(set(wanted)) == len(wanted) and max(map(len, wanted)) > TOKENS // 2  # texts that tell models apart


def load(folder: Path, **options: Any) -> MetaTTTForCausalLM:
    found = AutoModelForCausalLM.from_pretrained(folder, **options)
    assert type(found) is MetaTTTForCausalLM and not found.training
    return found


# -- what is written ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ttt_mlp", "converted"])
def test_save_pretrained_keeps_every_bit(name: str, sources: Path, exported: Path, tmp_path: Path) -> None:
    load(exported / name).save_pretrained(tmp_path)
    for file in ("config.json", "generation_config.json"):
        assert (tmp_path / file).read_bytes() == (exported / name / file).read_bytes()
    first, again = (load_file(folder / "model.safetensors") for folder in (exported / name, tmp_path))
    model, _ = metattt.load_model(sources / name)
    assert first.keys() == again.keys() == {f"model.{key}" for key, _ in model.named_parameters()}
    for key, parameter in model.named_parameters():
        for held in (first[f"model.{key}"], again[f"model.{key}"]):
            assert held.dtype == parameter.dtype and torch.equal(held, parameter)
    back, _ = metattt.load_model(tmp_path)  # what Transformers has written is a checkpoint for our commands as well
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), back.parameters(), strict=True))


def test_the_files_and_the_card(exported: Path) -> None:
    from huggingface_hub import ModelCard

    found = {file.name for file in (exported / "ttt_mlp").iterdir()}
    described = {f"{name}.json" for name in ("config", "generation_config", "tokenizer", "tokenizer_config")}
    assert found == described | {"README.md", "model.safetensors"}

    card = ModelCard.load(exported / "ttt_mlp" / "README.md")
    assert card.data.library_name == "transformers" and "metattt" in card.data.tags
    assert "257 tokens" in card.text
    config = json.loads((exported / "ttt_mlp" / "config.json").read_text())
    assert config["metattt"]["config"]["layer"]["learner"]["_component_"] == "learner=mlp"
    assert config["model_type"] == "metattt" and config["vocab_size"] == 257 and config["architectures"] == ["MetaTTTForCausalLM"]
    generation = json.loads((exported / "converted" / "generation_config.json").read_text())
    assert (generation["bos_token_id"], generation["eos_token_id"], generation["pad_token_id"]) == (0, [0, 1], 0)


def test_a_run_is_exported_without_what_it_was_trained_on(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    (tmp_path / "secret.txt").write_text("alpha beta gamma " * 60)
    small = ("dim=16", "num_heads=2", "model.num_layers=1", "data.batch_size=2", "data.context_length=24", "trainer.max_steps=1")
    rest = ("sample=false", "trainer.accelerator=cpu", f"data.path={tmp_path / 'secret.txt'}", f"output_dir={tmp_path / 'run'}")
    assert main(["train", *small, *rest, "trainer.precision=64-true"]) == 0
    assert main(["export", f"source={tmp_path / 'run'}", f"target={tmp_path / 'out'}", "dtype=bfloat16"]) == 0
    text = (tmp_path / "out" / "config.json").read_text()
    assert "secret" not in text and "max_steps" not in text and "output_dir" not in text
    model, ids = load(tmp_path / "out"), torch.randint(257, (1, 20))
    assert model.dtype == torch.bfloat16
    ours, _ = metattt.load_model(tmp_path / "run")
    assert torch.equal(ours.embedding.weight, read_weights(tmp_path / "run").tensors["embedding.weight"])  # in double precision
    torch.testing.assert_close(model(ids).logits, ours.to(torch.bfloat16)(ids), rtol=0, atol=0)
    wide = load(tmp_path / "out", dtype=torch.float32)
    assert wide.dtype == torch.float32 and torch.equal(wide.model.embedding.weight, model.model.embedding.weight.float())


def test_byte_tokens(exported: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(exported / "ttt_linear")
    ours = ByteTokenizer()
    for text in ("", "a", "wörld 你好 \U0001f600\r\n\t\x00", "<|endoftext|> is text", "  two  spaces "):
        assert tokenizer(text).input_ids == [256, *ours.encode(text).tolist()]
        assert tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True) == text
    assert [tokenizer.convert_tokens_to_ids(tokenizer.convert_ids_to_tokens(number)) for number in range(257)] == list(range(257))
    for data in (b"\xff", b"a\xc3", b"\xe4\xbd", bytes(range(256))):  # what is no UTF-8 is shown as our command shows it
        assert tokenizer.decode(list(data)) == data.decode(errors="replace")
    assert tokenizer(["a", "long"], padding=True).input_ids == [[256, 256, 256, 256, 97], [256, *b"long"]]
    again = load_tokenizer(str(exported / "ttt_linear"))
    assert again.separator == 256 and again.end is None and again.decode([104, 105, 256]) == b"hi"


def test_a_tokenizer_file(sources: Path, exported: Path) -> None:
    tokenizer, ours = AutoTokenizer.from_pretrained(exported / "converted"), _tokenizer(sources / "converted")
    assert tokenizer("inner <s> loop").input_ids == [0, *ours.encode("inner <s> loop").tolist()]
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == ("<s>", "</s>", "<s>")


# -- generation --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(exported: Path) -> MetaTTTForCausalLM:
    return load(exported / "ttt_mlp")


@pytest.fixture(scope="module")
def tokenizer(exported: Path) -> Any:
    return AutoTokenizer.from_pretrained(exported / "ttt_mlp")


@pytest.mark.parametrize("options", [{}, {"do_sample": True, "top_k": 20}, {"num_beams": 3}])
def test_generation_with_the_state_is_that_without(options: Any, model: MetaTTTForCausalLM, tokenizer: Any) -> None:
    """Without: every token from the beginning. Padding may be on either side."""
    found = []
    for side, cached in (("left", True), ("left", False), ("right", True)):
        given = tokenizer(PROMPTS, return_tensors="pt", padding=True, padding_side=side)
        torch.manual_seed(3)
        drawn = model.generate(**given, max_new_tokens=9, use_cache=cached, **options)
        found.append(drawn[:, given.input_ids.shape[1] :])
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@pytest.mark.parametrize("hidden", [float("-inf"), torch.finfo(torch.float32).min])
def test_masks_of_other_kinds(model: MetaTTTForCausalLM, hidden: float) -> None:
    ids = torch.randint(257, (2, 9))
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[0, :3] = False
    wanted = model(ids, attention_mask=mask).logits
    for same in (mask.long(), mask.float(), mask.half()):
        assert torch.equal(model(ids, attention_mask=same).logits, wanted)
    for additive in (torch.zeros(2, 9).masked_fill(~mask, hidden), torch.zeros(2, 9)):
        refusal(partial(model, ids, attention_mask=additive), "attention_mask is additive")


def test_a_conversation_goes_on_from_the_cache(model: MetaTTTForCausalLM, tokenizer: Any) -> None:
    first = tokenizer(PROMPTS[0], return_tensors="pt").input_ids
    turn = model.generate(first, max_new_tokens=5, return_dict_in_generate=True)
    longer = torch.cat([turn.sequences, tokenizer("and then?", return_tensors="pt", add_special_tokens=False).input_ids], 1)
    kept = copy.deepcopy(turn.past_key_values)
    assert isinstance(kept, MetaTTTCache) and kept.get_seq_length() == turn.sequences.shape[1] - 1
    found = model.generate(longer, max_new_tokens=5, past_key_values=turn.past_key_values)
    assert torch.equal(found, model.generate(longer, max_new_tokens=5))
    assert torch.equal(found, model.generate(longer, max_new_tokens=5, past_key_values=kept))  # the copy stayed as it was


def test_a_long_text_is_drawn_by_a_recorded_step(
    model: MetaTTTForCausalLM, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    given = tokenizer(PROMPTS, return_tensors="pt", padding=True)
    options = {"max_new_tokens": 60, "do_sample": False, "return_dict_in_generate": True}
    with caplog.at_level("DEBUG", "metattt"):
        found = model.generate(**given, **options)
        assert "step is a recording" in caplog.text
        copied, more = copy.deepcopy(found.past_key_values), torch.tensor([[7, 8]] * len(PROMPTS))
        after = torch.cat([found.sequences, more], 1)
        going_on = [model.generate(after, max_new_tokens=4, past_key_values=one) for one in (found.past_key_values, copied)]
    monkeypatch.setitem(static_step.WORTH, "cpu", 1000)
    plain = model.generate(**given, **options)
    assert torch.equal(plain.sequences, found.sequences)
    whole = model.generate(after, max_new_tokens=4, past_key_values=plain.past_key_values)
    assert all(torch.equal(one, whole) for one in going_on)
    with ThreadPoolExecutor(2) as pool:  # the second begins before the first ends, and ends after it
        list(pool.map(lambda count: model.generate(**given, **options | {"max_new_tokens": count}), (20, 60)))
    monkeypatch.setattr(MetaTTTCache, "advance", None)  # calls by hand record nothing
    assert model(more[:, 1:], past_key_values=model(more[:, :1]).past_key_values).logits.shape[1] == 1


def test_a_state_learned_elsewhere(model: MetaTTTForCausalLM, tokenizer: Any) -> None:
    document, question = (tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids for text in PROMPTS[::2])
    _, state = model.model.step(document)
    before = state.map(torch.clone)
    whole = model.generate(torch.cat([document, question], 1), max_new_tokens=20)[:, -20:]
    for _ in range(2):  # what is read and drawn after it does not change it
        assert torch.equal(model.generate(question, max_new_tokens=20, past_key_values=MetaTTTCache(state))[:, -20:], whole)
    assert all(torch.equal(a, b) for a, b in zip(tensors_of(before), tensors_of(state), strict=True))


def test_the_cache(model: MetaTTTForCausalLM) -> None:
    ids = torch.randint(257, (3, 9))
    with torch.no_grad():
        cache = model(ids).past_key_values
    assert (len(cache), cache.batch_size, cache.get_seq_length(), cache.get_max_length()) == (1, 3, 9, -1)
    assert cache.is_initialized and not cache.is_compileable and not cache.is_croppable
    state = cache.state
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([4, 0]))
    cache.reorder_cache(torch.tensor([1, 0]))
    following = torch.randint(257, (2, 4))
    with torch.no_grad():
        found = model(following, past_key_values=cache).logits
        wanted = model.model.step(following, state.select(torch.tensor([0, 2])))[0]
    torch.testing.assert_close(found, wanted)
    padded = torch.ones(2, 4, dtype=torch.long)
    padded[0, 3] = 0
    with torch.no_grad():
        model(following, padded, cache)
        cache.batch_select_indices((1, 0))
        seen = torch.cat([torch.ones(2, 13, dtype=torch.long), padded.flip(0), torch.ones(2, 2, dtype=torch.long)], 1)
        model(following[:, :2], seen, cache)
        seen[0, 0] = 0  # which was read as a token
        more = torch.cat([seen, seen[:, -2:]], 1)
        refusal(lambda: model(following[:, :2], more, cache), "hides columns that the cache has read")
        refusal(lambda: model.generate(more[:, 1:], attention_mask=more[:, :-1], past_key_values=cache), "hides columns")
        refusal(lambda: model(following[[0, 0, 0], :2], more[[0, 0, 0]], cache), "state.select")
    cache.batch_select_indices(torch.tensor([False, True]))
    assert cache.batch_size == 1
    refusal(lambda: cache.crop(1), "cannot be taken back")
    refusal(lambda: cache.update(ids, ids, 0), "no keys and values")
    refusal(lambda: metattt.attach(model, "*.down", layer="in_place"), "not a MetaTTTForCausalLM")  # blocks see no cache
    cache.crop(0)
    cache.reset()
    assert (cache.batch_size, len(cache), cache.get_seq_length(), cache.state) == (-1, 0, 0, None)
    refusal(lambda: MetaTTTCache(ids), "expected a LanguageModelState")  # type: ignore[arg-type]


def test_calls(model: MetaTTTForCausalLM) -> None:
    ids = torch.randint(257, (2, 11))
    with torch.no_grad():
        whole = model(ids)
        assert torch.equal(model(ids, logits_to_keep=3).logits, whole.logits[:, -3:])
        torch.testing.assert_close(model(ids, logits_to_keep=1).logits, whole.logits[:, -1:])
        assert torch.equal(model(ids, logits_to_keep=torch.tensor([0, 4])).logits, whole.logits[:, [0, 4]])
        logits, cache = model(ids, return_dict=False)
        assert torch.equal(logits, whole.logits) and isinstance(cache, MetaTTTCache)
        assert model(ids, use_cache=False).past_key_values is None
        pieces = model(ids[:, :4])
        rest = model(ids[:, 4:], attention_mask=torch.ones_like(ids), past_key_values=pieces.past_key_values)
    torch.testing.assert_close(torch.cat([pieces.logits, rest.logits], 1), whole.logits, rtol=0, atol=1e-5)
    loss = model(ids, labels=ids).loss
    wanted = torch.nn.functional.cross_entropy(whole.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    torch.testing.assert_close(loss, wanted)


REFUSED: dict[str, Callable[[MetaTTTForCausalLM, Tensor], object]] = {
    "past_key_values is a DynamicCache": lambda model, ids: model(ids, past_key_values=DynamicCache()),
    r"attention_mask is \[2, 5\]": lambda model, ids: model(ids, attention_mask=torch.ones(2, 5)),
    "0 to 256": lambda model, ids: model(ids + 300),
    "output_hidden_states is not supported.*leave it out$": lambda model, ids: model(ids, output_hidden_states=True),
    "a row without a real token": lambda model, ids: model.generate(ids, attention_mask=torch.ones(2, 11).tril(-1), max_new_tokens=2),
    "inputs_embeds is not supported": lambda model, ids: model.generate(inputs_embeds=torch.zeros(1, 3, 16), max_new_tokens=2),
    "ids are token ids": lambda model, ids: model(ids[0]),
    "has read all of input_ids": lambda model, ids: model.generate(ids, past_key_values=model(ids).past_key_values),
    "stateful": lambda model, ids: model.generate(ids[:1], max_new_tokens=4, prompt_lookup_num_tokens=2),
}


@pytest.mark.parametrize("message", REFUSED)
def test_calls_that_are_refused(message: str, model: MetaTTTForCausalLM) -> None:
    with pytest.raises(ValueError, match=message):
        REFUSED[message](model, torch.randint(257, (2, 11)))


# -- mistakes, damage and files that mean harm -------------------------------------------------------------------------


def changed(folder: Path, target: Path, change: Any) -> Path:
    """A copy with another config.json."""
    shutil.copytree(folder, target)
    config = json.loads((target / "config.json").read_text())
    change(config)
    (target / "config.json").write_text(json.dumps(config))
    return target


def put(path: str, value: Any) -> Any:
    def change(config: Any) -> None:
        *before, last = path.split("/")
        for key in before:
            config = config[key]
        config[last] = value

    return change


LAYER, MODEL = "metattt/config/layer", "metattt/config/model"


@pytest.mark.parametrize(("change", "message"), [
    (put(f"{LAYER}/learner", {"_target_": "os.system", "command": "true"}), "no component of an installed package"),
    (put(f"{LAYER}/dim", "${oc.env:HOME}"), "nothing is computed"),
    (put(f"{MODEL}/num_layers", 10**9), "num_layers=1,000,000,000, and [0-9]+ at most"),
    (put(f"{MODEL}/dim", 48), r"mismatched: \('model.blocks.0.*48"),
    (put("vocab_size", 300), None),
    (put("metattt", None), "no `metattt`"),
    (put("metattt/config", {"layer": {}}), "a model without vocab_size"),
    (put("trust", ["os"]), None),
])  # fmt: skip
def test_what_a_configuration_may_say(change: Any, message: str | None, exported: Path, tmp_path: Path) -> None:
    folder = changed(exported / "ttt_linear", tmp_path / "other", change)
    if message is None:
        assert load(folder).config.vocab_size == 257
        return
    assert re.search(message, refusal(lambda: load(folder)))


SHARING = """
from metattt.models import LanguageModel
class Sharing(LanguageModel):
    def __init__(self, *given, **more):
        super().__init__(*given, **more)
        self.blocks[1].ffn.up.weight = self.blocks[0].ffn.up.weight
"""


def test_classes_of_the_users_need_his_word_and_may_share_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_learner.py").write_text(OWN_LEARNER + SHARING)
    monkeypatch.syspath_prepend(tmp_path)
    own = ("learner=custom", "learner._target_=own_learner.Own", "model._target_=own_learner.Sharing", "model.tie_embeddings=false")
    model = write_made(tmp_path / "model", *own, "layer=custom", "optimizer=minibatch")
    ids = torch.randint(257, (1, 9))
    export = ["export", f"source={tmp_path / 'model'}", f"target={tmp_path / 'out'}"]
    assert main(export) == 2 and not (tmp_path / "out").exists()
    assert main([*export, "trust=own_learner"]) == 0 and ", trust=['own_learner'])" in (tmp_path / "out" / "README.md").read_text()
    refusal(lambda: load(tmp_path / "out"), "add trust=own_learner")
    changed(tmp_path / "out", tmp_path / "sly", put("trust", ["own_learner"]))
    refusal(lambda: load(tmp_path / "sly"), "add trust=own_learner")  # a file cannot give it
    found = load(tmp_path / "out", trust=["own_learner"])
    torch.testing.assert_close(found(ids).logits, model(ids))
    found.save_pretrained(tmp_path / "again")
    blocks = load(tmp_path / "again", trust=["own_learner"]).model.blocks
    assert blocks[1].ffn.up.weight is blocks[0].ffn.up.weight


def test_damaged_weights(exported: Path, tmp_path: Path) -> None:
    file = tmp_path / "cut" / "model.safetensors"
    shutil.copytree(exported / "ttt_mlp", file.parent)
    whole = file.read_bytes()
    flipped = whole[:-9] + bytes([whole[-9] ^ 64]) + whole[-8:]
    for content, message in ((whole[:-40], "truncated"), (flipped, "checksum"), (b"", "truncated")):
        file.write_bytes(content)
        refusal(lambda: load(file.parent), message)
    file.unlink()
    for _ in range(2):  # a pickle is not read
        with pytest.raises(OSError, match=r"model\.safetensors"):
            load(file.parent)
        torch.save({"model.embedding.weight": torch.zeros(257, 16)}, file.parent / "pytorch_model.bin")


@pytest.mark.parametrize(("change", "message"), [
    (lambda held: held.pop("model.blocks.0.ffn.up.weight"), "missing: model.blocks.0.ffn.up.weight"),
    (lambda held: held.update({"model.more": torch.zeros(1)}), "unexpected: model.more"),
    (lambda held: held["model.embedding.weight"].fill_(float("nan")), "not finite"),
])  # fmt: skip
def test_weights_of_another_model(change: Any, message: str, exported: Path, tmp_path: Path) -> None:
    shutil.copytree(exported / "ttt_mlp", tmp_path / "other")
    held = load_file(exported / "ttt_mlp" / "model.safetensors")
    change(held)
    save_file(held, tmp_path / "other" / "model.safetensors", metadata={"format": "pt"})
    refusal(lambda: load(tmp_path / "other"), message)


@pytest.mark.parametrize(("words", "message"), [
    ([], "no source is given: metattt export source="),
    (["source=@ttt_mlp"], "no target is given"),
    (["source=@ttt_mlp", "target=@ttt_mlp"], "exists and is not empty"),
    (["source=@ttt_mlp", "target=@new", "dtype=int8"], "dtype=int8 is not allowed"),
    (["source=@published", "target=@new", "tokenizer=bytes"], "257 tokens"),
    (["source=@ttt_mlp", "target=/proc/nobody"], "/proc/nobody"),
])  # fmt: skip
def test_mistakes_are_one_line(words: list[str], message: str, sources: Path, told: Callable[..., str]) -> None:
    assert message in told("export", *(word.replace("@", f"{sources}/") for word in words))
    assert not (sources / "new").exists()


def test_a_model_of_another_kind_is_refused() -> None:
    refusal(lambda: MetaTTTConfig.of(OmegaConf.create({"model": {"img_size": 8}})), "for images")
    model = made("model.num_layers=1")[0]
    other = made("model.num_layers=2")[1]
    refusal(lambda: MetaTTTForCausalLM.of(model, other), "of another model")  # type: ignore[arg-type]


def test_an_export_that_is_stopped_leaves_nothing(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import metattt.hf.export as module

    for error in (KeyboardInterrupt(), OSError(28, "No space left on device")):
        with monkeypatch.context() as patch:
            patch.setattr(module, "write_whole", Mock(side_effect=error))
            assert main(["export", f"source={sources / 'ttt_mlp'}", f"target={tmp_path / 'out'}"]) in (2, 130)
        assert list(tmp_path.iterdir()) == []


def test_another_vocabulary(exported: Path, tmp_path: Path) -> None:
    model, ids = load(exported / "ttt_mlp"), torch.randint(257, (1, 9))
    wanted = model(ids).logits
    model.resize_token_embeddings(260)
    model.save_pretrained(tmp_path)
    again = load(tmp_path)
    assert again.config.vocab_size == again.model.vocab_size == 260
    refusal(lambda: load(tmp_path, vocab_size=257), match="vocab_size=257 cannot be set: .* has 260")
    torch.testing.assert_close(again(ids).logits[..., :257], wanted)
    model.resize_token_embeddings(400, mean_resizing=False)  # then rows are drawn as those of a new model
    assert 0.01 < model.model.embedding.weight[260:].std() < 0.03
    torch.testing.assert_close(model(ids).logits[..., :257], wanted)


def test_an_export_of_an_export_keeps_what_was_set_there(exported: Path, tmp_path: Path) -> None:
    model, tokenizer = load(exported / "ttt_mlp"), AutoTokenizer.from_pretrained(exported / "ttt_mlp")
    model.generation_config.max_new_tokens, tokenizer.chat_template = 77, "{{ messages[0].content }}"
    model.save_pretrained(tmp_path / "one")
    tokenizer.save_pretrained(tmp_path / "one")
    assert main(["export", f"source={tmp_path / 'one'}", f"target={tmp_path / 'two'}", "dtype=bfloat16"]) == 0
    assert load(tmp_path / "two").generation_config.max_new_tokens == 77
    assert AutoTokenizer.from_pretrained(tmp_path / "two").chat_template == tokenizer.chat_template


def test_weights_in_several_files(exported: Path, tmp_path: Path) -> None:
    model, ids = load(exported / "ttt_mlp", device_map="auto"), torch.randint(257, (1, 9))
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 1
    with torch.no_grad():
        wanted = model(ids.to(model.device)).logits.cpu()
        assert torch.equal(load(tmp_path)(ids).logits, wanted)
        assert torch.equal(metattt.load_model(tmp_path)[0](ids), wanted)
    files[0].unlink()
    with pytest.raises((MetaTTTError, OSError)):
        load(tmp_path)
    refusal(lambda: metattt.load_model(tmp_path), "names files that do not exist")
