"""What is built on Transformers takes our models: Trainer, LoRA of peft."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hf_for_tests import write_made
from refusals_for_tests import refusal

pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments
from transformers.data import DataCollatorForLanguageModeling, DataCollatorWithFlattening

import metattt
import metattt.hf
from metattt.cli import main
from metattt.hf import MetaTTTForCausalLM

PROMPTS = ["the key is", "a", "one two three four five"]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for layer in ("ttt_mlp", "delta_net"):
        write_made(folder / f"{layer} source", f"layer={layer}", "model.num_layers=1")
        assert main(["export", f"source={folder / f'{layer} source'}", f"target={folder / layer}"]) == 0
    return folder


@pytest.fixture
def model(exported: Path) -> MetaTTTForCausalLM:
    found: MetaTTTForCausalLM = AutoModelForCausalLM.from_pretrained(exported / "ttt_mlp")
    return found


@pytest.fixture(scope="module")
def tokenizer(exported: Path) -> Any:
    return AutoTokenizer.from_pretrained(exported / "ttt_mlp")


# -- Trainer -----------------------------------------------------------------------------------------------------------


def texts(tokenizer: Any) -> list[dict[str, Any]]:
    """Documents of different lengths: the batches are padded."""
    return [dict(tokenizer(f"document {i} " + "alpha beta gamma " * (1 + i % 3))) for i in range(8)]


def arguments(folder: Path, **changes: Any) -> TrainingArguments:
    settings: dict[str, Any] = {
        "output_dir": str(folder), "per_device_train_batch_size": 4, "per_device_eval_batch_size": 3, "learning_rate": 3e-3, "max_steps": 6,
        "report_to": [], "use_cpu": True, "logging_steps": 1, "save_strategy": "no", "disable_tqdm": True, "seed": 3,
    }  # fmt: skip
    return TrainingArguments(**(settings | changes))


def trainer(model: Any, tokenizer: Any, folder: Path, **changes: Any) -> Trainer:
    collate = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    data: Any = texts(tokenizer)
    return Trainer(model, arguments(folder, **changes), train_dataset=data, eval_dataset=data, data_collator=collate)


def test_trainer_trains_and_what_it_saves_is_loaded(model: MetaTTTForCausalLM, tokenizer: Any, tmp_path: Path) -> None:
    one = trainer(model, tokenizer, tmp_path / "run", save_strategy="steps", save_steps=3)
    before = one.evaluate()["eval_loss"]
    one.train()
    losses = [entry["loss"] for entry in one.state.log_history if "loss" in entry]
    assert len(losses) == 6 and losses[-1] < losses[0] - 0.2 and one.evaluate()["eval_loss"] < before - 0.2
    one.save_model(str(tmp_path / "saved"))
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    second = trainer(AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "checkpoint-3"), tokenizer, tmp_path / "run")
    second.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-3"))
    torch.testing.assert_close(second.model.state_dict(), model.state_dict())  # type: ignore[union-attr]


def test_the_loss_of_padded_and_packed_batches_is_that_of_single_texts(model: MetaTTTForCausalLM, tokenizer: Any, tmp_path: Path) -> None:
    collate = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    data = texts(tokenizer)[:3]
    batch = dict(collate([dict(one) for one in data]))
    assert not batch["attention_mask"].all()
    loss = model(**batch).loss
    sums = [model(**collate([dict(one)])).loss * (len(one["input_ids"]) - 1) for one in data]
    count = sum(len(one["input_ids"]) - 1 for one in data)
    torch.testing.assert_close(loss, torch.stack(sums).sum() / count)
    torch.testing.assert_close(model(**batch, num_items_in_batch=torch.tensor(2 * count)).loss, loss / 2)
    packed = DataCollatorWithFlattening(return_tensors="pt")([{"input_ids": one["input_ids"]} for one in data])
    assert packed["position_ids"].shape[0] == 1
    torch.testing.assert_close(model(**packed).loss, loss)
    told_twice = DataCollatorWithFlattening(return_seq_idx=True, return_flash_attn_kwargs=True)
    twice = told_twice([{"input_ids": one["input_ids"]} for one in data])
    torch.testing.assert_close(model(**twice).loss, loss)
    refusal(lambda: model(**twice | {"position_ids": None}), "return_position_ids=True")
    smoothed = trainer(model, tokenizer, tmp_path, label_smoothing_factor=1e-9)  # which shifts the labels itself
    torch.testing.assert_close(smoothed.compute_loss(model, dict(batch)), loss)


@pytest.mark.parametrize("columns", [(0, 1, 2), (9, 10, 11), (0, 4, 11)], ids=["left", "right", "mixed"])
@pytest.mark.parametrize("label", ["ids", -100])
def test_padding_does_not_change_the_loss(columns: tuple[int, ...], label: Any, model: MetaTTTForCausalLM) -> None:
    ids = torch.randint(256, (2, 9))
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[:, list(columns)] = 0
    padded = torch.zeros(2, 12, dtype=torch.long).masked_scatter(mask.bool(), ids)
    labels = padded if label == "ids" else padded.masked_fill(mask == 0, label)
    wanted = model(ids, labels=ids)
    found = model(padded, attention_mask=mask, labels=labels)
    torch.testing.assert_close(found.loss, wanted.loss)
    torch.testing.assert_close(*(torch.autograd.grad(one.loss, list(model.parameters())) for one in (found, wanted)))


def test_gradient_checkpointing_takes_the_same_steps(exported: Path, tokenizer: Any, tmp_path: Path) -> None:
    found = []
    for checkpointing in (False, True):
        model = AutoModelForCausalLM.from_pretrained(exported / "ttt_mlp")
        trainer(model, tokenizer, tmp_path, max_steps=2, gradient_checkpointing=checkpointing).train()
        assert model.is_activation_checkpointing == checkpointing
        found.append([parameter.detach().clone() for parameter in model.parameters()])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


# -- peft --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("layer", "targets"), [("ttt_mlp", ["q", "v", "out"]), ("delta_net", "all-linear")])
def test_lora_on_the_projections(layer: str, targets: Any, exported: Path, tokenizer: Any, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    base = AutoModelForCausalLM.from_pretrained(exported / layer)
    frozen = {name: parameter.detach().clone() for name, parameter in base.named_parameters()}
    given = tokenizer(PROMPTS, return_tensors="pt", padding=True)
    with torch.no_grad():
        plain = base(**given).logits
    tuned = peft.get_peft_model(base, peft.LoraConfig(r=4, lora_alpha=16, target_modules=targets, task_type="CAUSAL_LM"))
    adapted = {name.split(".lora_A")[0].removeprefix("base_model.model.") for name, _ in tuned.named_parameters() if ".lora_A" in name}
    assert {"model.blocks.0.layer.task.q", "model.blocks.0.layer.out"} <= adapted and "model.head" not in adapted
    with torch.no_grad():  # an adapter begins at 0
        torch.testing.assert_close(tuned(**given).logits, plain)
    one = trainer(tuned, tokenizer, tmp_path / "run", max_steps=4, learning_rate=2e-2)
    one.train()
    losses = [entry["loss"] for entry in one.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0] - 0.1
    held = {name.replace(".base_layer", "").removeprefix("base_model.model."): one for name, one in tuned.named_parameters()}
    assert all(torch.equal(held[name], before) for name, before in frozen.items())
    tuned.eval()
    with torch.no_grad():
        wanted = tuned(**given).logits
    assert (wanted - plain).abs().max() > 1e-2
    tuned.save_pretrained(tmp_path / "adapter")
    loaded = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(exported / layer), tmp_path / "adapter").eval()
    with torch.no_grad():
        assert torch.equal(loaded(**given).logits, wanted)
        texts_ = tuned.generate(**given, max_new_tokens=7, do_sample=False)
        merged = loaded.merge_and_unload()
        torch.testing.assert_close(merged(**given).logits, wanted, rtol=1e-3, atol=1e-4)
        assert torch.equal(merged.generate(**given, max_new_tokens=7, do_sample=False), texts_)
    merged.save_pretrained(tmp_path / "merged")  # a model of ours again, for our commands as well
    ours, _ = metattt.load_model(tmp_path / "merged")
    ids = given.input_ids[-1:]
    with torch.no_grad():
        torch.testing.assert_close(ours(ids), merged(ids).logits)


@pytest.mark.parametrize(("name", "settings", "message"), [
    ("LoraConfig", {"target_modules": ["embedding"]}, "an adapter on `embedding` cannot be merged"),
    ("LoraConfig", {"target_modules": ["head"]}, "an adapter on `head` cannot be merged"),
    ("PrefixTuningConfig", {"num_virtual_tokens": 3}, "past_key_values is a DynamicCache.*\n.*prefix tuning"),
    ("PromptTuningConfig", {"num_virtual_tokens": 3}, "inputs_embeds is not supported.*\n.*prompt tuning"),
])  # fmt: skip
def test_adapters_that_do_not_fit(name: str, settings: dict[str, Any], message: str, model: MetaTTTForCausalLM) -> None:
    peft = pytest.importorskip("peft")
    tuned = peft.get_peft_model(model, getattr(peft, name)(task_type="CAUSAL_LM", **settings))
    refusal(lambda: tuned(torch.zeros(1, 3, dtype=torch.long)), match=message)
