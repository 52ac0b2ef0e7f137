"""Overrides as they are typed, made ready for Hydra: texts and paths without quotes, null that leaves an entry out, and
what no command can mean, refused without composing anything."""

import re
from collections.abc import Sequence
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType, Quote, QuotedString
from hydra.errors import HydraException

from metattt.composition.aliases import IN_FULL, NOT_SET_THERE
from metattt.composition.choices import files_of, groups, keys_of
from metattt.composition.components import trainer_keys
from metattt.composition.messages import not_chosen, refused_value
from metattt.errors import MetaTTTError

SEARCH_PATH = "hydra.searchpath"

FREE_TEXT = (
    "prompt", "checkpoint", "data.path", "data.validation_path", "data.train_split", "data.validation_split", "resume",
    "init_from", "output_dir", "source", "target", "dataset_files", "tokenizer", "name", "folder", "output", "family",
)  # fmt: skip
"""Keys whose value is text or a path: taken as written, without Hydra's rules for `=`, `(`, quotes or spaces."""

LISTS = ("data.path", "checkpoint", "source", "dataset_files")
"""Those of them that may also be a list, [a,b]."""

QUOTED = r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\""

NOTHING = {"preset=null": "preset=none", "~preset": "preset=none"}
"""Choices of nothing, as they are by default."""

LEFT_OUT = ("callbacks", "logger", "preset", "recipe", "experiment")
"""Groups that a job can do without."""

ENTRIES = ("callbacks", "logger")
"""Groups whose entries are left out with null."""


def prepare(overrides: Sequence[str], job: str, sweep: bool = False) -> list[str]:
    """Overrides in Hydra's syntax.

    Args:
        overrides: as they were typed.
        job: the command.
        sweep: they may name several values, and Hydra's own settings.

    Raises:
        MetaTTTError: an override that cannot be read, names several values, or chooses what there is not.
    """
    for override in overrides:
        if not isinstance(override, str):
            raise MetaTTTError(f"{override!r:.100} is not an override: they are texts, such as 'dim=64'")
    prepared = [quote_free_text(in_full(left_out(NOTHING.get(x, x))), sweep) for x in without_null(overrides)]
    parsed = [_parse(override) for override in prepared]
    opened = {one.key_or_group for one in parsed if one.value() == "custom"}
    for one in parsed:
        _refuse_nothing(one)
        if not (sweep and (one.is_sweep_override() or is_of_hydra(one.key_or_group))):
            _check(one, job, opened)
    return [_open(one, text, opened) for one, text in zip(parsed, prepared, strict=True)]


def without_null(overrides: Sequence[str]) -> list[str]:
    """Overrides without `experiment=null`, and without the experiments that were chosen before it."""
    last = max((place for place, one in enumerate(overrides) if one == "experiment=null"), default=-1)
    return [one for place, one in enumerate(overrides) if place > last or key_of(str(one)) != "experiment"]


def key_of(override: str) -> str:
    """The key of an override, or its group."""
    return override.partition("=")[0].lstrip("+~").partition("@")[0]


def left_out(override: str) -> str:
    """`callbacks.<name>=null`, `logger.<name>=null` and null for a whole group or recipe, as `~callbacks.<name>`."""
    match = re.fullmatch(rf"(({'|'.join(ENTRIES)})(\.\w+)?|recipe)=null", override)
    return f"~{match[1]}" if match else override


def quote_free_text(override: str, sweep: bool = False) -> str:
    """Quote the value of an override of a free-text key, so that Hydra takes it as written.

    Left as they are: `null`, a value that is in quotes already, a list for a key of `LISTS`, and interpolations in
    paths. In a sweep, commas outside quotes stand between several texts.
    """
    match = re.fullmatch(r"(\+{0,2}([\w.]+)=)(.*)", override, flags=re.DOTALL)
    if match is None or match[2] not in FREE_TEXT:
        return override
    start, key, value = match.groups()
    if value == "null" or re.fullmatch(QUOTED, value, flags=re.DOTALL):
        return override
    if key in LISTS and value.startswith("[") and value.endswith("]"):
        texts = _between_commas(value[1:-1])
        if "${" in value or any(text[0] in "[{" for text in texts):
            return override
        texts = [text if re.fullmatch(QUOTED, text, flags=re.DOTALL) else quoted(text) for text in texts]
        return f"{start}[{','.join(texts)}]"  # a path may hold `=`, or spaces
    lists = r"|\[.*\],|.*,\[.*\]$" if key in LISTS else ""
    if sweep and re.match(r"(choice|glob|range|interval|sort|shuffle|tag)\(" + lists, value):
        return override
    if sweep and len(texts := _between_commas(value)) > 1:
        texts = [text if text == "null" or re.match("['\"]", text) else quoted(text) for text in texts]
        return f"{start}{','.join(texts)}"
    if key == "prompt":
        value = re.sub(r"(\\*)\$\{", r"\1\1\\${", value)  # source code has `${`, which is no interpolation there
    return f"{start}{quoted(value)}"


def _between_commas(value: str) -> list[str]:
    """The texts between the commas of a value that are outside quotes."""
    found = re.finditer(rf"({QUOTED}|[^,])+", value, flags=re.DOTALL)
    return [one[0].strip() for one in found if one[0].strip()]


def quoted(text: str) -> str:
    """A text in the quotes of Hydra's syntax."""
    return QuotedString(text=text, quote=Quote.single).with_quotes()


def searched(overrides: Sequence[str]) -> list[Traversable]:
    """The folders of configurations that overrides add (`hydra.searchpath`)."""
    given = [one for one in overrides if key_of(one) == SEARCH_PATH]
    urls = (str(url).rpartition("://") for one in given for url in _parse(one).value())  # type: ignore[union-attr]
    return [files(place) if scheme == "pkg" else Path(place) for scheme, _, place in urls]


def is_of_hydra(key: str) -> bool:
    """Whether a key is a setting of Hydra's; where files are is one of every job."""
    return re.match(r"hydra\b", key) is not None and key != SEARCH_PATH


def in_full(override: str) -> str:
    """An override with the whole key that a short one stands for."""
    key, equals, value = override.partition("=")
    return f"{IN_FULL.get(key, key)}{equals}{value}"


def _parse(override: str) -> Override:
    try:
        return OverridesParser.create().parse_override(override)
    except HydraException as error:
        raise MetaTTTError(_unreadable(override)) from error


def _unreadable(override: str) -> str:
    key, equals, value = override.partition("=")
    if not equals or not re.fullmatch(r"[+~]{0,2}[\w./@:-]*\w", key):  # quotes of the value would not help
        return f"`{override}` is not an override: write <key>=<value>, a value with spaces in quotes, 'prompt=a b'"
    text = value.replace("\\", "\\\\").replace("'", "\\'")
    return f"`{override}` cannot be read: if the value is a text, write it in quotes of its own, \"{key}='{text}'\""


def _check(override: Override, job: str, opened: set[str]) -> None:
    """Refuses what is wrong whatever is chosen."""
    key, text, known = override.key_or_group, str(override.input_line), groups(job)
    given = text.partition("=")[2]
    if override.is_sweep_override():
        texts = "" if key in known else f", a text with a comma \"{key}='{given}'\""
        syntax = f'. A list is written "{key}=[{given}]"{texts}'
        plain = (key not in known or key in ENTRIES) and "(" not in given
        raise MetaTTTError(
            f"`{text}` names several values: add -m (--multirun) to run `metattt {job}` once for "
            f"each{syntax if plain else ''}"
        )
    if key not in known and key in groups() and "/" not in key:
        raise MetaTTTError(not_chosen(key, job))
    if override.type == OverrideType.DEL:
        if key in {*known, *keys_of(job)} - {*LEFT_OUT}:
            raise MetaTTTError(f"`~{key}` removes what `metattt {job}` needs: choose or set another with {key}=<value>")
        return
    if not key:
        raise MetaTTTError(_unreadable(text))
    if key == "given":
        raise MetaTTTError("`given` is filled in by the program: leave it out")
    if is_of_hydra(key):
        folder = "; the folder of a single run is output_dir" if key.endswith(".dir") else ""
        raise MetaTTTError(f"`{key}` is a setting of sweeps, and has no effect without -m (--multirun){folder}")
    if key in NOT_SET_THERE and (part := key.partition(".")[0]) in known and part not in opened:
        raise MetaTTTError(f"`{key}={given}` is not set there: {NOT_SET_THERE[key]}")
    value = override.value()
    named = isinstance(value, str) or (key in ENTRIES and isinstance(value, list) and value)
    if key in known and not named:  # null and numbers; names are Hydra's to find
        raise MetaTTTError(refused_value(key, value, sorted(files_of(key))))


def _refuse_nothing(override: Override) -> None:
    """For the value that an unset variable of the shell gives: the default in its place would be another run."""
    key, given = override.key_or_group, str(override.input_line).partition("=")[2]
    if override.type == OverrideType.DEL or key in ("", "prompt"):
        return
    value = override.value()
    values = value if isinstance(value, list) else [value]
    blank = key in FREE_TEXT and (not values or any(isinstance(one, str) and not one.strip() for one in values))
    if blank or not given.strip():
        raise MetaTTTError(f"`{key}={given}` has no value, as from an unset variable: give one, or leave it out")


def _open(override: Override, text: str, opened: set[str]) -> str:
    """Where there is no schema a key needs no `+`: in `learner=custom` (task, optimizer), and for arguments of
    Lightning's Trainer."""
    part, _, key = override.key_or_group.partition(".")
    free = part in opened or (part == "trainer" and key in trainer_keys())
    return f"++{text}" if free and key and override.type == OverrideType.CHANGE else text
