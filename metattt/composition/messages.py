"""One or two lines for whatever is wrong with a configuration: what, what is allowed, and the nearest right name.

Hydra and OmegaConf raise chains of exceptions whose innermost link knows the node that refused a key or a value. The
functions here walk the chain to that link and return the message of a `MetaTTTError`; they raise nothing.
"""

import difflib
import inspect
import re
import traceback
import typing
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from hydra.errors import MissingConfigException
from hydra.utils import get_class
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    InterpolationValidationError,
    MissingMandatoryValue,
    OmegaConfBaseException,
    ValidationError,
)

from metattt.composition.aliases import IN_FULL, NOT_SET_THERE, NUMBERS, OUTER_OPTIMIZERS, alias, inner_counterpart
from metattt.composition.choices import choice_of_schema, groups
from metattt.errors import MetaTTTError
from metattt.registry import PARAMETERS, REGISTERED

CUSTOM = ("learner", "task", "optimizer")  # groups with a choice `custom`
COMMON_NAMES = ("none", "custom", "default")  # of choices in several groups

MOST_LISTED = 400  # characters of choices in a message

TYPE_NAMES = {int: "an integer", float: "a number", bool: "true or false", str: "a text"}


def nearest(name: object, candidates: Iterable[object], cutoff: float = 0.6) -> str | None:
    """The candidate that looks most like `name` (or contains it), if any looks like it."""
    names = [str(candidate) for candidate in candidates]
    close = difflib.get_close_matches(str(name), names, n=1, cutoff=cutoff)
    containing = [candidate for candidate in names if len(str(name)) > 2 and str(name) in candidate]
    return next(iter(close + containing), None)


def refused_value(key: str, value: object, allowed: Iterable[object]) -> str:
    """For a value that is not among the choices of a parameter."""
    choices = [shown(choice) for choice in allowed]
    guess, number = nearest(value, choices), NUMBERS.get(key)
    if isinstance(value, int | float | str) and number and re.fullmatch(r"[\d.e+-]+", str(value)):
        hint = f" Did you mean `{number}={value}`?"
    else:
        hint = f" Did you mean `{key}={guess}`?" if guess else ""
    return f"`{key}={shown(value)}` is not allowed: choose one of {', '.join(choices)}.{hint}"


def not_a_field(parent: Any, full_key: str, job: str) -> str:
    """For a key that `parent` does not have: where it is, or what is nearest to it.

    In this order: under the other names of `aliases`, in another choice of the same part, the nearest name in the part,
    and the same name, or nearly so, in another part.
    """
    owner, _, key = full_key.rpartition(".")
    if full_key in IN_FULL.values():
        owner = "trainer=fsdp or trainer=time_parallel_fsdp" if key == "tensor_ranks" else "trainer=time_parallel"
        return (
            f"`trainer.{key}` belongs to {owner}, where several processes read one sequence: choose that, and as many "
            "processes, e.g. trainer=time_parallel trainer.time_ranks=2 trainer.devices=2."
        )
    fields = [field for field in _fields(parent) if field != key and f"{owner}.{field}" not in NOT_SET_THERE]
    command = "metattt.build()" if job == "build" else f"`metattt {job}`"
    where = f"a field of {owner}" if owner else f"a key of {command}"
    known = known_keys(parent)
    keys = set(known.values())
    suggestion = alias(full_key, keys) or _in_another_choice(owner, key)
    suggestion = suggestion or (
        alias(key, [one for one in keys if one.startswith(f"{owner}.")]) if owner else known.get(key)
    )
    if not suggestion and (guess := nearest(key, fields)):
        suggestion = ".".join(filter(None, (owner, guess)))
    suggestion = suggestion or alias(key, keys) or _elsewhere(owner, key, known)
    if suggestion:
        return f"`{key}` is not {where}. Did you mean `{suggestion}`?{inner_counterpart(suggestion, keys)}"
    return f"`{key}` is not {where}. It has: {', '.join(sorted(fields)) or 'none'}."


def bad_interpolation(node: DictConfig, full_key: str, error: OmegaConfBaseException) -> str:
    """For a key that takes its value from another key, which is missing or has the wrong type."""
    key = full_key.rpartition(".")[2]
    source = re.fullmatch(r"\$\{([\w.]+)\}", str(node._get_node(key)))
    if source and isinstance(error, InterpolationValidationError):
        value = OmegaConf.select(node._get_root(), source[1])
        return f"`{source[1]}={shown(value)}` is not allowed: expected {_expected(node, key)}."
    return f"{full_key}: {_first_line(error)}"


def unknown_key(cfg: DictConfig, key: str, job: str) -> str | None:
    """The message for a dotted key that a configuration does not have; None if it is there."""
    parent: Any = cfg
    parts = key.split(".")
    for count, part in enumerate(parts, start=1):
        if not isinstance(parent, DictConfig) or parent._is_none():
            return None
        if parent._is_interpolation():  # `layer.learner` only points at `learner`
            return not_a_field(parent, key, job)
        if parent._get_node(part, validate_access=False) is None and part not in _fields(parent):
            return not_a_field(parent, ".".join(parts[:count]), job)
        parent = parent._get_node(part, validate_access=False)
    return None


def not_taken_away(cfg: DictConfig, key: str) -> str | None:
    """The message for `~key` where a constructor has the parameter; None elsewhere."""
    owner, _, name = key.rpartition(".")
    part = OmegaConf.select(cfg, owner) if owner else None
    if not isinstance(part, DictConfig) or name not in PARAMETERS.get(str(part.get("_target_")), ()):
        return None
    return f"`{key}` cannot be taken away: set it with {key}=<value>, or leave it as it is"


def explain_composition(error: BaseException, job: str) -> str:
    """The message for an exception of `hydra.compose`."""
    chain = list(_chain(error))
    for link in chain:
        if isinstance(link, MissingConfigException):
            return _unknown_choice(link, job)
        if isinstance(link, (ConfigKeyError, ConfigAttributeError)) and link.full_key:
            setter = re.match(r"In '(.+?)': ", str(error))
            if setter:  # a config file, not the user, names the key: two choices that do not go together
                return _do_not_go_together(setter[1], str(link.full_key))
            return not_a_field(link.parent_node, str(link.full_key), job)
        if isinstance(link, ValidationError) and link.full_key:
            return _wrong_type(link)
    return _first_line(chain[-1])


def explain_instantiation(error: BaseException, part: str) -> str:
    """The message for an exception of `hydra.utils.instantiate` on the node `part`."""
    chain = list(_chain(error))
    for link in chain:
        if isinstance(link, MetaTTTError):
            return str(link)
    text, cause = str(error), chain[-1]
    found = re.search(r"full_key: (\S+)", text)
    key = re.sub(r"^layer\.(?=task|learner|optimizer)", "", found[1] if found else part)
    if isinstance(cause, MissingMandatoryValue):
        missing = re.sub(r"^layer\.(?=task|learner|optimizer)", "", str(cause.full_key or key))
        return f"`{missing}` has no value: give {missing}={'package.Class' if missing.endswith('_target_') else '...'}"
    located = re.search(r"Error locating target '(.*?)'", text)
    if located:
        return f"`{key}._target_={located[1]}` cannot be imported: {_first_line(cause)}"
    called = re.search(r"Error in call to target '(.*?)'", text)
    if called is None:
        return f"{key}: {_first_line(cause)}"
    unknown = re.search(r"unexpected keyword argument '(\w+)'", str(cause))
    if unknown and isinstance(cause, TypeError):
        guess = nearest(unknown[1], _parameters(called[1]))
        other = (
            f"Add {key}=custom, which sets nothing but what you give"
            if key in CUSTOM
            else f"Leave it out with ~{key}.{unknown[1]}"
        )
        hint = f"Did you mean `{key}.{guess}`?" if guess else other
        return f"`{unknown[1]}` is not a parameter of {called[1]}. {hint}"
    required = re.search(r"missing \d+ required .*?arguments?: (.*)", str(cause))
    if required and isinstance(cause, TypeError):
        names = re.findall(r"'(\w+)'", required[1])
        return f"{called[1]} needs {', '.join(names)}: give {' '.join(f'+{key}.{name}=...' for name in names)}"
    frame = traceback.extract_tb(cause.__traceback__)[-1]
    return f"{key}: {called[1]} raised {type(cause).__name__}: {_first_line(cause)} ({frame.filename}:{frame.lineno})"


def shown(value: object) -> str:
    """A value as it is written in an override."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _fields(node: Any) -> list[str]:
    """Keys of a node that a user may set."""
    if not isinstance(node, DictConfig) or node._is_none() or node._is_interpolation():
        return []
    target = None if OmegaConf.is_missing(node, "_target_") else node.get("_target_")
    keys = list(PARAMETERS.get(str(target)) or map(str, node))
    return [key for key in keys if not key.startswith("_") and key != "hydra"]


def known_keys(node: Any) -> dict[str, str]:
    """Every key of the configuration that a node is in, by itself, and by its last word if that stands in one part
    alone or first."""
    if not isinstance(node, DictConfig):
        return {}
    root = node._get_root()
    known = {key: key for key in _fields(root)}
    for part in _fields(root):
        for field in _fields(root._get_node(part)):
            if f"{part}.{field}" in NOT_SET_THERE:
                continue
            known[f"{part}.{field}"] = f"{part}.{field}"
            known.setdefault(field, f"{part}.{field}")
    return known


def _in_another_choice(owner: str, name: str) -> str | None:
    """A field called `name` of another choice of the same group."""
    having = [schema for (group, schema), target in REGISTERED.items() if group == owner and name in PARAMETERS[target]]
    schema = next((one for one in having if one == name), next(iter(having), None))
    choice = choice_of_schema(owner, schema) if schema else None
    return f"{owner}={choice} {owner}.{name}" if choice else None


def _elsewhere(owner: str, name: str, known: dict[str, str]) -> str | None:
    """Where else a field called `name`, or nearly so, is."""
    if owner.startswith("layer."):  # `layer.learner` only points at `learner`
        return f"{owner.removeprefix('layer.')}.{name}"
    guess = name if name in known else nearest(name, known, cutoff=0.8)
    return known[guess] if guess else None


def _do_not_go_together(file: str, full_key: str) -> str:
    """For a file of a group that sets a key which the choice for another group has not."""
    group, _, name = file.partition("/")
    owner, _, key = full_key.rpartition(".")
    ways = {
        "layer": "Choose another layer: layer=custom leaves every part as it is.",
        "preset": f"Leave out {group}={name}, whose sizes are those of language models, and set the sizes yourself: {owner}.<key>=<value>.",
    }
    advice = ways.get(group, f"Leave out {group}={name}, or choose another {owner or 'one'}.")
    return f"{group}={name} sets `{full_key}`, but the chosen {owner or 'configuration'} has no `{key}`.\n{advice}"


def _unknown_choice(error: MissingConfigException, job: str) -> str:
    group, _, name = str(error.missing_cfg_file).rpartition("/")
    if not group or error.options is None:
        return f"there is no config `{error.missing_cfg_file}`"
    known = groups(job)
    others = [
        other for other, names in known.items() if name in names and group != "training" and name not in COMMON_NAMES
    ]
    guess, hint = nearest(name, error.options), ""
    if group == "optimizer" and name in OUTER_OPTIMIZERS and "training" in known:
        choice = (
            f"`training={name}`"
            if name in known["training"]
            else f"`training=<{', '.join(sorted(known['training']))}>`"
        )
        hint = f", the inner optimizer. The outer one is {choice}"
    elif others:
        hint = f". Did you mean `{others[0]}={name}`?"
    elif guess:
        hint = f". Did you mean `{group}={guess}`?"
    if group == "experiment" and not hint:
        hint = (
            "; one of your own: --config-dir <folder>, or hydra.searchpath=[<folder>], where the folder has "
            f"experiment/{name}.yaml"
        )
    return (
        f"`{name or 'nothing'}` is not a choice of {group}{hint or '.'}\nChoices: "
        f"{_choices(group, name, error.options)}"
    )


def _choices(group: str, name: str, options: Sequence[str]) -> str:
    """The choices of a group; of very many, those that are nearest to a name."""
    listed = ", ".join(options)
    if len(listed) <= MOST_LISTED:
        return listed
    some = difflib.get_close_matches(name, options, 8, 0.0)
    where = "; `metattt layers` shows them" if group == "layer" else ""
    return f"{', '.join(some)} and {len(options) - len(some)} more{where}"


def unreadable(override: str) -> str:
    """For an override that is not in Hydra's syntax."""
    key, equals, value = override.partition("=")
    if not equals:
        return f"`{override}` is not an override: write <key>=<value>, e.g. learner=mlp or learner.depth=3"
    quoted = value.replace("\\", "\\\\").replace("'", "\\'")
    return f"`{override}` cannot be read: if the value is a text, write it in quotes of its own, \"{key}='{quoted}'\""


def wrong_type(full_key: str, value: object, parent: DictConfig, key: Any) -> str:
    """For a value of another type than `parent` has for `key`."""
    return f"`{full_key}={shown(value)}` is not allowed: expected {_expected(parent, key)}."


def _wrong_type(error: ValidationError) -> str:
    parent, key = error.parent_node, error.key
    if isinstance(parent, DictConfig) and key is not None:
        return wrong_type(str(error.full_key), error.value, parent, key)
    return f"{error.full_key}: {_first_line(error)}"


def _expected(parent: DictConfig, key: Any) -> str:
    """The type of a field, in words."""
    node = parent._get_node(key)
    metadata = getattr(node, "_metadata", None)
    if metadata is None:
        return "another type"
    return _type_name(metadata.ref_type) + (" or null" if metadata.optional and metadata.ref_type is not Any else "")


def _type_name(kind: Any) -> str:
    if typing.get_origin(kind) is list:
        return f"a list, each element {_type_name(typing.get_args(kind)[0])}"
    if typing.get_origin(kind) is typing.Union:
        return " or ".join(_type_name(member) for member in typing.get_args(kind) if member is not type(None))
    return TYPE_NAMES.get(kind, getattr(kind, "__name__", str(kind)))


def _parameters(target: str) -> list[str]:
    """Names of the constructor's parameters of the class at a dotted path; none if it is not a class."""
    try:
        return list(inspect.signature(get_class(target)).parameters)
    except (ImportError, ValueError, TypeError):
        return []
