"""A tokenizer.json that is damaged or unusual: one line, and never ids or bytes that are not its own."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from refusals_for_tests import refusal

from metattt.data.text import ByteTokenizer
from metattt.data.tokenizers import PROBE, FileTokenizer, load_tokenizer, read_tokenizer, tokenizer_of

tokenizers = pytest.importorskip("tokenizers")


def content(**changes: Any) -> dict[str, Any]:
    """The JSON of a small tokenizer."""
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    model = {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
        "fuse_unk": False, "byte_fallback": False, "vocab": {"<s>": 0, "a": 1, "b": 2, "aa": 3}, "merges": [["a", "a"]],
    }  # fmt: skip
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [{"id": 0, "content": "<s>", **special}],
        "normalizer": None, "pre_tokenizer": None, "post_processor": None, "decoder": None, "model": model,
    } | changes  # fmt: skip


def model(**changes: Any) -> dict[str, Any]:
    return content(model={**content()["model"], **changes})


def split(expression: str) -> dict[str, Any]:
    return content(pre_tokenizer={"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False})


def made(given: dict[str, Any]) -> FileTokenizer:
    return FileTokenizer(json.dumps(given), "./its.json")


def cut(length: int, stride: int) -> dict[str, Any]:
    return {"direction": "Right", "max_length": length, "strategy": "LongestFirst", "stride": stride}


@pytest.mark.parametrize(("given", "message"), [
    (json.dumps(split("(a")), "is not a tokenizer"),
    (json.dumps(model(dropout=0.5)), "is random"),
    (json.dumps(content(added_tokens=[], model={**content()["model"], "vocab": {"a": 0, "aa": 1}})), "no token for the start"),
    ("[]", "is not a tokenizer"),
    (json.dumps(content())[:200], "is not a tokenizer"),
])  # fmt: skip
def test_harm_is_one_line(given: str, message: str) -> None:
    refusal(lambda: FileTokenizer(given, "./its.json"), message, "./its.json", lines=1, longest=400)


@pytest.mark.parametrize("changes", [
    {"truncation": cut(2, 0)}, {"truncation": cut(2, 2)}, {"truncation": cut(0, 0)},
    {"padding": {"strategy": {"Fixed": 50}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 99999, "pad_type_id": 0,
                 "pad_token": "x"}},
])  # fmt: skip
def test_texts_are_never_cut_or_filled_up(changes: dict[str, Any]) -> None:
    np.testing.assert_array_equal(made(content(**changes)).encode("aaab" * 20), [3, 1, 2] * 20)


def test_a_text_that_cannot_be_encoded() -> None:
    given = content(model={"type": "WordLevel", "unk_token": "[UNK]", "vocab": {"<s>": 0, "a": 1}})
    for text in ("\ud800", "b"):
        refusal(partial(made(given).encode, text), "cannot encode a text")
    refusal(lambda: made(split("(a+)+$")).encode("a" * 40 + "!"), "retry-limit-in-match over")  # where the library panics


def test_bytes_and_surrogates() -> None:
    text = "naïve 文字 \x00".encode()
    assert ByteTokenizer().decode([256, *ByteTokenizer().encode(text).tolist()]) == text
    assert ByteTokenizer().token_bytes.tolist() == [1] * 256 + [0]
    assert ByteTokenizer().encode("a\udcff").tolist() == [97, 255]  # a byte of the command line that is no text
    refusal(lambda: ByteTokenizer().encode("a\ud800"), "half a surrogate pair at character 1")


@pytest.mark.parametrize(("names", "bounds"), [
    (("<s>", "</s>"), (0, 1)), (("<|endoftext|>", "<|bos|>"), (0, None)), (("<BOS_TOKEN>", "<EOS_TOKEN>"), (0, 1)),
    (("<|eos|>", "x"), (0, None)),
])  # fmt: skip
def test_tokens_before_and_after_a_document(names: tuple[str, str], bounds: tuple[int, int | None]) -> None:
    added = [{**content()["added_tokens"][0], "id": place, "content": name} for place, name in enumerate(names)]
    vocabulary = {names[0]: 0, names[1]: 1, "a": 2, "aa": 3}
    for more in ({}, {"[SEP]": 4}):  # which is an ordinary token
        tokenizer = made(content(added_tokens=added, model={**content()["model"], "vocab": vocabulary | more}))
        assert (tokenizer.separator, tokenizer.end) == bounds


def test_names_of_bytes_that_are_none() -> None:
    tokenizer = made(model(vocab={"<s>": 0, "a": 1, "<0xZZ>": 2, "<0x41>": 3, "aa": 4}))
    assert tokenizer.texts == [b"", b"a", b"<0xZZ>", b"A", b"aa"]


# -- kinds of tokenizers -----------------------------------------------------------------------------------------------


def trained(kind: str, pre_tokenizer: Any, decoder: Any = None, **options: Any) -> FileTokenizer:
    """A tokenizer of the library that has learned the probe."""
    made = tokenizers.Tokenizer(getattr(tokenizers.models, kind)(**options))
    made.pre_tokenizer = pre_tokenizer
    if decoder is not None:
        made.decoder = decoder
    trainer = getattr(tokenizers.trainers, "BpeTrainer" if kind == "BPE" else f"{kind}Trainer")
    suffix = {key: value for key, value in options.items() if key == "end_of_word_suffix"}
    made.train_from_iterator([PROBE], trainer(special_tokens=["<s>", "[UNK]"], show_progress=False, **suffix))
    return FileTokenizer(made.to_str(), "./its.json")


def test_bytes_are_those_of_the_text_or_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    before, after = tokenizers.pre_tokenizers, tokenizers.decoders
    for exact in (
        trained("BPE", before.ByteLevel(add_prefix_space=False)),  # without its decoder
        trained("BPE", before.Metaspace("_", prepend_scheme="never"), after.Metaspace("_")),
        trained("BPE", before.Sequence([before.Digits(), before.Metaspace(prepend_scheme="never")])),
    ):
        ids = exact.encode(PROBE).astype(np.int64)
        assert exact.decode(ids.tolist()).decode() == PROBE and exact.token_bytes[ids].sum() == len(PROBE)
    assert not caplog.records
    words = trained("BPE", before.WhitespaceSplit(), after.BPEDecoder("</w>"), end_of_word_suffix="</w>")
    assert words.decode(words.encode("(No: it's as").tolist()) == b"(No: it's as "
    for lossy in (
        words,
        trained("WordPiece", before.BertPreTokenizer(), after.WordPiece(), unk_token="[UNK]"),
        trained("WordLevel", before.Whitespace(), unk_token="[UNK]"),
    ):
        caplog.clear()
        assert lossy.token_bytes.tolist() == lossy.token_bytes.tolist() == [0] * lossy.vocab_size
        assert [one.getMessage() for one in caplog.records] == [
            "tokenizer=./its.json does not keep every character of a text: there are no bits per byte"
        ]


def test_added_tokens_stand_for_the_bytes_of_their_text() -> None:
    made = tokenizers.Tokenizer.from_str(trained("BPE", tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)).content)
    made.add_tokens([tokenizers.AddedToken("µm", normalized=False), tokenizers.AddedToken("  ", normalized=False)])
    tokenizer, text = FileTokenizer(made.to_str(), "./its.json"), "a  µm"
    ids = tokenizer.encode(text).astype(np.int64)
    assert len(ids) == 3 and tokenizer.decode(ids.tolist()).decode() == text and tokenizer.token_bytes[ids].sum() == 6


SPECIAL = content()["added_tokens"][0]


def test_special_tokens_go_before_ordinary_ones(tmp_path: Path) -> None:
    given = model(vocab={"<|endoftext|>": 0, "<s>": 1, "</s>": 2, "a": 3}, merges=[])
    given["added_tokens"] = [{**SPECIAL, "content": "<|endoftext|>"}]
    tokenizer = made(given)
    assert (tokenizer.separator, tokenizer.end) == (0, None)
    (tmp_path / "tokenizer.json").write_text(json.dumps(given))  # tokens that were prepared before keep theirs
    before = read_tokenizer(tmp_path, {**tokenizer.identity, "separator": 1, "end": 2})
    assert (before.separator, before.end) == (1, 2)
    ordinary = made({**given, "added_tokens": []})
    assert (ordinary.separator, ordinary.end) == (1, 2)


def test_special_tokens_in_a_text_are_text_for_every_model() -> None:
    added = [{**SPECIAL, "id": number, "content": name} for number, name in enumerate(("<unk>", "<s>"))]
    pieces = ["<unk>", "<s>", "<", "s", ">", "a"]
    vocab = [[piece, 0.0 if number < 2 else -1.0] for number, piece in enumerate(pieces)]
    unigram = content(model={"type": "Unigram", "unk_id": 0, "vocab": vocab}, added_tokens=added)
    tokenizer = made(unigram)
    assert tokenizer.encode("a<s>é").tolist() == [5, 2, 3, 4, 0] and tokenizer.separator == 1
    assert tokenizer.decode([1, 5, 2]) == b"a<"
    words = {"type": "WordLevel", "unk_token": "<unk>", "vocab": {piece: number for number, piece in enumerate(pieces)}}
    given = content(model=words, added_tokens=added, pre_tokenizer={"type": "WhitespaceSplit"})
    assert made(given).encode("a <s> a").tolist() == [5, 0, 5]


def test_what_is_around_a_text_does_not_make_another_tokenizer() -> None:
    tokenizer = made(content())
    around = {"type": "TemplateProcessing", "single": [{"Sequence": {"id": "A", "type_id": 0}}], "pair": [], "special_tokens": {}}
    for other in map(made, (content(post_processor=around), content(truncation=cut(2, 0)))):
        assert tokenizer.equals(other) and tokenizer.identity != other.identity
    for differs in (content(normalizer={"type": "Lowercase"}), model(merges=[]), split("a")):
        assert not tokenizer.equals(made(differs))
    assert not tokenizer.equals(ByteTokenizer()) and ByteTokenizer().equals(ByteTokenizer())


# -- files -------------------------------------------------------------------------------------------------------------


def test_files(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_bytes(b"\xff\xfe" * 50)
    for name, message in ((str(file), "not UTF-8"), ("", "is not a path"), ("~nobody-of-that-name/x", "is not a path")):
        refusal(lambda name=name: load_tokenizer(name), message, lines=1)
    refusal(lambda: tokenizer_of("model", "{}", 300), "model/tokenizer.json is not a tokenizer")
    file.write_text(json.dumps(content()))
    refusal(lambda: tokenizer_of("model", file.read_text(), 3), "has 4 tokens and model 3")
    assert load_tokenizer(str(file)).vocab_size == load_tokenizer(str(tmp_path)).vocab_size == 4
