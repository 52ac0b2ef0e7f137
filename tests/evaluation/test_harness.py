"""Tasks of the evaluation harness, offline, from files of a few questions: the figures are those of a direct computation."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hf_for_tests import made, write_made, write_published

pytest.importorskip("lm_eval")

import datasets

import metattt
from metattt.cli import main
from metattt.composition.compose import compose
from metattt.data.text import ByteTokenizer
from metattt.data.tokenizers import load_tokenizer
from metattt.errors import NotFinite
from metattt.evaluation.evaluate import evaluate
from metattt.evaluation.harness import MetaTTTLM
from metattt.generation.text import generate_text

TEXTS = ["the key is under the stone", "a b c", "inner loops learn while they read", "one more"]
QUESTIONS = [
    {"question": "The sky is", "choices": ["blue", "a very long and wrong answer", "x"], "label": 0},
    {"question": "Two and two are", "choices": ["five", "four"], "label": 1},
    {"question": "", "choices": ["nothing", "all"], "label": 0},
]
PAGES = ["a page of some words. " * 9, "short", "wörds ünd möre"]

TASKS = {
    "lambada": """
output_type: loglikelihood
doc_to_text: "{{text.split(' ')[:-1]|join(' ')}}"
doc_to_target: "{{' '+text.split(' ')[-1]}}"
metric_list:
  - {metric: perplexity, aggregation: perplexity, higher_is_better: false}
  - {metric: acc, aggregation: mean, higher_is_better: true}
""",
    "choices": """
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_target: label
doc_to_choice: choices
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
  - {metric: acc_norm, aggregation: mean, higher_is_better: true}
""",
    "pages": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{page}}"
metric_list:
  - {metric: word_perplexity, aggregation: weighted_perplexity, higher_is_better: false}
  - {metric: byte_perplexity, aggregation: weighted_perplexity, higher_is_better: false}
  - {metric: bits_per_byte, aggregation: bits_per_byte, higher_is_better: false}
""",
    "answers": """
output_type: generate_until
doc_to_text: "{{text}}"
doc_to_target: "{{wanted}}"
generation_kwargs: {until: ["\\n"], do_sample: false, max_gen_toks: 6}
metric_list:
  - {metric: exact_match, aggregation: mean, higher_is_better: true}
""",
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models, tasks, and their data."""
    folder = tmp_path_factory.mktemp("harness")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "cache")
        (folder / "tasks").mkdir()
        model = write_made(folder / "linear", "layer=ttt_linear", "model.num_layers=1")
        write_made(folder / "mlp", "layer=ttt_mlp", "model.num_layers=1")
        wanted = generate_text(model, ByteTokenizer(), TEXTS, 6, temperature=0, stop=["\n"])
        rows = {
            "lambada": [{"text": text} for text in TEXTS],
            "choices": QUESTIONS,
            "pages": [{"page": page} for page in PAGES],
            "answers": [{"text": text, "wanted": one if i else "no"} for i, (text, one) in enumerate(zip(TEXTS, wanted, strict=True))],
        }
        for name, text in TASKS.items():
            file = folder / f"{name}.jsonl"
            file.write_text("".join(json.dumps(row) + "\n" for row in rows[name]))
            head = f"task: our_{name}\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {file}}}}}\ntest_split: test"
            (folder / "tasks" / f"{name}.yaml").write_text(head + text)
        yield folder


def figures(home: Path, *words: str) -> Any:
    """What the command returns."""
    names = ",".join(f"our_{name}" for name in TASKS)
    given = (f"tasks=[{names}]", f"task_path={home / 'tasks'}", "device=cpu", f"output_dir={home / 'out'}")
    return evaluate(compose(*given, *words, job="eval"))


def score(model: Any, context: str, following: str) -> tuple[float, bool]:
    """Directly: one text, one call, from the separator on."""
    ids = torch.tensor([[256, *(context + following).encode()]])
    with torch.no_grad():
        logits = model(ids)[0, :-1].double().log_softmax(-1)
    count = len(following.encode())
    found = logits.gather(1, ids[0, 1:, None])[-count:]
    return found.sum().item(), bool((logits[-count:].argmax(-1) == ids[0, -count:]).all())


@pytest.mark.parametrize(("name", "words"), [
    pytest.param("linear", (), id="whole"),
    pytest.param("mlp", ("batch_size=2", "segment=5"), id="in segments, state carried"),  # nor do they depend on the batches
])  # fmt: skip
def test_the_figures_are_those_of_a_direct_computation(name: str, words: tuple[str, ...], home: Path) -> None:
    model, _ = metattt.load_model(home / name)
    found = figures(home, f"checkpoint={home / name}", *words)[name]

    last = [score(model, text.rpartition(" ")[0], " " + text.rpartition(" ")[2]) for text in TEXTS]
    assert found["our_lambada"]["acc,none"] == sum(same for _, same in last) / len(last)
    perplexity = math.exp(-sum(value for value, _ in last) / len(last))
    assert found["our_lambada"]["perplexity,none"] == pytest.approx(perplexity, rel=1e-4)

    right = normed = 0
    for one in QUESTIONS:
        scores = [score(model, one["question"], " " + choice)[0] for choice in one["choices"]]
        by_length = [value / len(choice) for value, choice in zip(scores, one["choices"], strict=True)]
        right += scores.index(max(scores)) == one["label"]
        normed += by_length.index(max(by_length)) == one["label"]
    assert found["our_choices"]["acc,none"] == pytest.approx(right / len(QUESTIONS))
    assert found["our_choices"]["acc_norm,none"] == pytest.approx(normed / len(QUESTIONS))

    total = sum(score(model, "", page)[0] for page in PAGES)
    size, words_ = sum(len(page.encode()) for page in PAGES), sum(len(page.split()) for page in PAGES)
    assert found["our_pages"]["bits_per_byte,none"] == pytest.approx(-total / size / math.log(2), rel=1e-5)
    assert found["our_pages"]["byte_perplexity,none"] == pytest.approx(math.exp(-total / size), rel=1e-5)
    assert math.log(found["our_pages"]["word_perplexity,none"]) == pytest.approx(-total / words_, rel=0.2)  # it splits at every space

    if name == "linear":
        assert found["our_answers"]["exact_match,none"] == (len(TEXTS) - 1) / len(TEXTS)


def test_several_models_as_a_table_and_files(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    both = f"checkpoint=[{home / 'linear'},{home / 'mlp'}]"
    words = ["tasks=[our_lambada]", f"task_path={home / 'tasks'}", "device=cpu", "limit=2", f"output_dir={tmp_path}"]
    for _ in range(2):
        assert main(["eval", both, *words]) == 0
    shown = capsys.readouterr().out
    assert "perplexity" in shown and "linear: our_lambada perplexity " in shown and "mlp" in shown
    assert {file.name for file in tmp_path.iterdir()} == {"tasks.csv", "tasks.json", "tasks-2.csv", "tasks-2.json"}
    rows = list(csv.DictReader((tmp_path / "tasks.csv").open()))
    assert [(row["model"], row["metric"]) for row in rows] == [(m, k) for m in ("linear", "mlp") for k in ("perplexity", "acc")]
    model, _ = metattt.load_model(home / "mlp")
    last = [score(model, text.rpartition(" ")[0], " " + text.rpartition(" ")[2])[0] for text in TEXTS[:2]]
    assert float(rows[2]["value"]) == pytest.approx(math.exp(-sum(last) / 2), rel=1e-4)
    held = json.loads((tmp_path / "tasks.json").read_text())
    assert held["mlp"]["our_lambada"]["perplexity,none"] == float(rows[2]["value"])


# -- the model, asked directly -----------------------------------------------------------------------------------------


def request(*args: Any) -> Any:
    return SimpleNamespace(args=args)


def test_a_tokenizer_file(tmp_path: Path) -> None:
    write_published(tmp_path / "published")
    lm = MetaTTTLM.load(tmp_path / "published", torch.device("cpu"))
    tokenizer = load_tokenizer(str(tmp_path / "published" / "tokenizer.json"))
    assert (lm.prefix_token_id, lm.eot_token_id) == (0, 1)
    ids = torch.tensor([[0, *tokenizer.encode("inner loop").tolist()]])
    with torch.no_grad():
        wanted = lm.model.model(ids)[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None]).sum().item()
    assert lm.loglikelihood_rolling([request("inner loop")])[0] == pytest.approx(wanted, rel=1e-5)


def test_continuations() -> None:
    model, config = made("layer=ttt_linear", "model.num_layers=1")
    lm = MetaTTTLM(model, config, ByteTokenizer(), batch_size=2)
    free = generate_text(model, ByteTokenizer(), TEXTS, 8, temperature=0)
    asked: list[Any] = [{"until": [], "max_gen_toks": 8}, {"until": ["zzz", ""], "do_sample": False, "max_gen_toks": 2}]
    for options in asked:
        found = lm.generate_until([request(text, options) for text in TEXTS])
        assert found == generate_text(model, ByteTokenizer(), TEXTS, options["max_gen_toks"], temperature=0)
    mixed = lm.generate_until([request(text, asked[i % 2]) for i, text in enumerate(TEXTS)])
    assert mixed[::2] == free[::2]
    named = ["<|endoftext|>a", *TEXTS]  # the separator's name in letters, which is text
    assert lm.generate_until([request(text, asked[0]) for text in named])[1:] == free
    found = lm.loglikelihood([request(named[0], "b")])[0][0]
    assert found == pytest.approx(score(model, named[0], "b")[0], rel=1e-5)


def test_predictions_that_are_not_finite() -> None:
    model, config = made("model.num_layers=1")
    with torch.no_grad():
        model.head.weight[5] = float("nan")
    with pytest.raises(NotFinite, match="its run diverged"):
        MetaTTTLM(model, config, ByteTokenizer()).loglikelihood_rolling([request("abc")])


# -- commands ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("words", "message"), [
    pytest.param(["tasks=[our_lambda]"], "Did you mean our_lambada?", marks=pytest.mark.slow),  # looks at all tasks of lm_eval
    (["tasks=[3]"], "tasks=[3] is not allowed"),
    (["tasks=[our_lambada]", "task_path=/nowhere"], "task_path=/nowhere does not exist"),
    (["tasks=[our_lambada]", "limit=0"], "limit=0 is not allowed"),
    (["tasks=[our_lambada]", "data.context_length=8"], "data.context_length=8 does not apply"),
    (["tasks=[our_broken]"], "nowhere.jsonl"),
])  # fmt: skip
def test_mistakes_are_one_line(words: list[str], message: str, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = (home / "tasks" / "lambada.yaml").read_text().replace("our_lambada", "our_broken").replace("lambada.jsonl", "nowhere.jsonl")
    (home / "tasks" / "broken.yaml").write_text(broken)
    given = [f"checkpoint={home / 'linear'}", "device=cpu", f"task_path={home / 'tasks'}", f"output_dir={home / 'out'}"]
    assert main(["eval", *given, *words]) == 2
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(said) == 1 and message in said[0], said
