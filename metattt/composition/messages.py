"""One or two lines for whatever is wrong with a configuration: what, what is allowed, and the nearest right name.

Hydra and OmegaConf raise chains of exceptions whose innermost link knows the node that refused a key or a value. The
functions here walk the chain to that link and return the message of a `MetaTTTError`; they raise nothing.
"""

import difflib
import re
import sys
import traceback
import typing
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from hydra.errors import MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, MissingMandatoryValue, ValidationError

from metattt.composition.aliases import IN_FULL, NOT_SET_THERE, OF_THE_INNER_LOOP, OUTER_OPTIMIZERS, alias
from metattt.composition.choices import choice_of_schema, groups
from metattt.errors import MetaTTTError, shown
from metattt.registry import PARAMETERS, REGISTERED
from metattt.setting import members

CUSTOM, OWN = ("learner", "task", "optimizer"), ("data", "layer", "model")  # with a choice `custom`; of a user's files
COMMON_NAMES = ("none", "custom", "default")  # of choices in several groups
MOST_LISTED = 400  # characters of choices in a message
TYPE_NAMES = {int: "an integer", float: "a number", bool: "true or false", str: "a text", type(None): "null"}


def nearest(name: object, candidates: Iterable[object], cutoff: float = 0.6) -> str | None:
    """The candidate that looks most like `name` (or contains it), if any looks like it."""
    names = [str(candidate) for candidate in candidates]
    close = difflib.get_close_matches(str(name), names, n=1, cutoff=cutoff)
    containing = [candidate for candidate in names if len(str(name)) > 2 and str(name) in candidate]
    return next(iter(close + containing), None)


# -- values ------------------------------------------------------------------------------------------------------------


def refused_value(key: str, value: object, allowed: Iterable[object]) -> str:
    """For a value that is not among the choices of a parameter."""
    choices = [shown(choice) for choice in allowed]
    guess = f"{key}={near}" if (near := nearest(value, choices)) else None
    if key == "optimizer.lr" and re.fullmatch(r"[\d.e+-]+", str(value)):  # a word, where papers have the number
        guess = f"optimizer.base_lr={value}"
    hint = f" Did you mean `{guess}`?" if guess else ""
    return f"`{key}={shown(value)}` is not allowed: choose one of {', '.join(choices)}.{hint}"


def wrong_type(full_key: str, value: object, hint: Any) -> str:
    """For a value of another type than `hint`, an annotation."""
    return f"`{full_key}={shown(value)}` is not allowed: expected {_type_name(hint)}."


def _type_name(hint: Any) -> str:
    if typing.get_origin(hint) is list:
        return f"a list, each element {_type_name(typing.get_args(hint)[0])}"
    if len(kinds := members(hint)) > 1:
        return " or ".join(map(_type_name, kinds))
    return TYPE_NAMES.get(hint, str(hint))


# -- keys --------------------------------------------------------------------------------------------------------------


def not_a_field(parent: Any, full_key: str, job: str) -> str:
    """For a key that `parent` does not have: where it is, or what is nearest to it.

    In this order: under the other names of `aliases`, in another choice of the same part, the nearest name in the part,
    and the same name, or nearly so, in another part.
    """
    owner, _, key = full_key.rpartition(".")
    if full_key in IN_FULL.values():
        chosen = "trainer=fsdp or trainer=time_parallel_fsdp" if key == "tensor_ranks" else "trainer=time_parallel"
        return (
            f"`trainer.{key}` belongs to {chosen}, where several processes read one sequence: choose that, and as many "
            "processes, e.g. trainer=time_parallel trainer.time_ranks=2 trainer.devices=2."
        )
    if not owner and key in CUSTOM and key in groups(job):
        return f"this layer has no {key}: leave out what sets it, or choose a layer that has one, e.g. layer=ttt_linear"
    known = known_keys(parent)
    part = _key_of_a_part(owner)
    if part != owner and part in known and f"{part}.{key}" not in known:
        return not_a_field(parent._get_root()._get_node(part), f"{part}.{key}", job)
    fields = [field for field in _fields(parent) if field != key and f"{owner}.{field}" not in NOT_SET_THERE]
    near = nearest(key, fields)
    own = parent.get("_target_") if owner in (*CUSTOM, *OWN) and isinstance(parent, DictConfig) else None
    if own and own not in PARAMETERS:  # which a file has chosen: in the place of its own `_target_`
        way = f"did you mean `{owner}.{near}`? For another setting, write" if near else "write"
        return f"`{full_key}` is in no file, and {own} has no schema: {way} `++{full_key}=<value>`."
    keys = set(known.values())
    suggestion = (
        (part != owner and known.get(f"{part}.{key}"))
        or alias(full_key, keys)
        or _in_another_choice(owner, key)
        or (alias(key, [one for one in keys if one.startswith(f"{owner}.")]) if owner else known.get(key))
        or (near and f"{owner}.{near}".lstrip("."))
        or alias(key, keys)
        or known.get(key)
        or known.get(str(nearest(key, known, cutoff=0.8)))
    )
    command = "metattt.build()" if job == "build" else f"`metattt {job}`"
    said = f"`{key}` is not {f'a field of {owner}' if owner else f'a key of {command}'}."
    if suggestion and suggestion == key:  # a key of the command, not of a part
        return f"{said} It stands by itself: `{key}=`, without `{owner}.`."
    if suggestion:
        inner = OF_THE_INNER_LOOP.get(suggestion)
        other = f" (`{inner}` is that of the inner loop.)" if inner in keys else ""
        return f"{said} Did you mean `{suggestion}`?{other}"
    added = f" To add one, write `+{full_key}._target_=<class>`." if owner in ("callbacks", "logger") else ""
    if owner.startswith(("callbacks.", "logger.")):
        added = f" For another argument of its class, write `+{full_key}=<value>`."
    return f"{said} It has: {', '.join(sorted(fields)) or 'none'}.{added}"


def known_keys(node: Any) -> dict[str, str]:
    """Every key of the configuration that a node is in, by itself, and by its last word if that stands in one part
    alone or first."""
    root = node._get_root() if isinstance(node, DictConfig) else None
    known = {key: key for key in _fields(root)}
    for part in list(known):
        for field in _fields(root._get_node(part)):  # type: ignore[union-attr]
            if (key := f"{part}.{field}") not in NOT_SET_THERE:
                known[key] = key
                known.setdefault(field, key)
    return known


def _fields(node: Any) -> list[str]:
    """Keys of a node that a user may set."""
    if not isinstance(node, DictConfig) or node._is_none() or node._is_interpolation():
        return []
    target = None if OmegaConf.is_missing(node, "_target_") else node.get("_target_")
    keys = PARAMETERS.get(str(target)) or map(str, node)
    return [key for key in keys if not key.startswith("_") and key != "hydra"]


def _in_another_choice(owner: str, name: str) -> str | None:
    """A field called `name` of another choice of the same group."""
    having = [schema for (group, schema), target in REGISTERED.items() if group == owner and name in PARAMETERS[target]]
    choice = choice_of_schema(owner, name if name in having else having[0]) if having else None
    return f"{owner}={choice} {owner}.{name}" if choice else None


# -- choices -----------------------------------------------------------------------------------------------------------


def unknown_choice(group: str, name: str, options: Sequence[str], job: str) -> str:
    """For a name that is not among the choices of a group."""
    known = groups(job)
    others = [other for other, names in known.items() if name in names and name not in COMMON_NAMES]
    if group == "optimizer" and name in OUTER_OPTIMIZERS and "training" in known:
        choices = known["training"]
        outer = name if name in choices else f"<{', '.join(sorted(choices))}>"
        hint = f", the inner optimizer. The outer one is `training={outer}`"
    elif group in ("callbacks", "logger") and name.lower() in ("none", "false"):
        hint = f": ~{group} leaves it out"
    elif others and group != "training":
        hint = f". Did you mean `{others[0]}={name}`?"
    elif guess := nearest(name, options):
        hint = f". Did you mean `{group}={guess}`?"
    else:
        file = f"{group}/{name}.yaml"
        hint = f"; one of your own: --config-dir <folder>, or hydra.searchpath=[<folder>], where the folder has {file}"
    listed = ", ".join(options)
    if len(listed) > MOST_LISTED:
        some = difflib.get_close_matches(name, options, 8, 0.0)
        where = "; `metattt layers` shows them" if group == "layer" else ""
        listed = f"{', '.join(some)} and {len(options) - len(some)} more{where}"
    return f"`{name or 'nothing'}` is not a choice of {group}{hint}\nChoices: {listed}"


def not_chosen(group: str, job: str) -> str:
    """For a group that a job does not choose from."""
    command, helps = ("metattt.build()", "check") if job == "build" else (f"`metattt {job}`", job)
    of_a_checkpoint = job in ("eval", "generate", "predict") and group in groups()
    reason = "the checkpoint says what it is" if of_a_checkpoint else f"`metattt {helps} --help` lists what is"
    return f"`{group}` is not chosen by name in {command}: {reason}"


def _do_not_go_together(file: str, full_key: str) -> str:
    """For a file of a group that sets a key which the choice for another group has not."""
    group, _, name = file.partition("/")
    owner, _, key = full_key.rpartition(".")
    file = f"{group}={name}" if name else f"`metattt {group}`"
    advice = f"Leave out {file}, or choose another {owner or 'one'}." if name else f"Choose another {owner or 'one'}."
    if group == "layer":  # which may be that of the default
        advice = "Choose another layer: layer=custom leaves every part as it is."
    return f"{file} sets `{full_key}`, but the chosen {owner or 'configuration'} has no `{key}`.\n{advice}"


# -- what Hydra and OmegaConf raise ------------------------------------------------------------------------------------


def explain_composition(error: BaseException, job: str) -> str:
    """The message for an exception of `hydra.compose`."""
    chain = list(_chain(error))
    for link in chain:
        if isinstance(link, MissingConfigException):
            group, _, name = str(link.missing_cfg_file).rpartition("/")
            if group and link.options is not None:
                return unknown_choice(group, name, link.options, job)
        if isinstance(link, ConfigKeyError | ConfigAttributeError) and link.full_key:
            setter = re.match(r"In '(.+?)': ", str(error))
            if setter:  # a config file, not the user, names the key: two choices that do not go together
                return _do_not_go_together(setter[1], str(link.full_key))
            return not_a_field(link.parent_node, str(link.full_key), job)
        if isinstance(link, ValidationError) and link.full_key:
            node: Any = link.parent_node._get_node(link.key) if isinstance(link.parent_node, DictConfig) else None
            if node is None:
                return f"{link.full_key}: {first_line(link)}"
            known = node._metadata
            hint = known.ref_type | None if known.optional else known.ref_type
            return wrong_type(str(link.full_key), link.value, hint)
    line = first_line(chain[-1])
    if named := re.match(r"Could not override '([\w/]+)'", line):
        return not_chosen(named[1], job)
    if named := re.match(r"Multiple values for ([\w/]+)", line):
        return f"{named[1]} is chosen twice. Did you mean `{named[1]}`? In a file, write `override /{named[1]}:`"
    if re.match("In '.*Could not override .*@", line):  # the file's own group is the package of what it sets
        line += " Begin the file with the line `# @package _global_`"
    return line


def explain_instantiation(error: BaseException, part: str) -> str:
    """The message for an exception of `hydra.utils.instantiate` on the node `part`."""
    chain = list(_chain(error))
    for link in chain:
        if isinstance(link, MetaTTTError):
            return str(link)
    text, cause = str(error), chain[-1]
    found = re.search(r"full_key: (\S+)", text)
    key = _key_of_a_part(found[1] if found else part)
    if isinstance(cause, MissingMandatoryValue):
        missing = _key_of_a_part(cause.full_key or key)
        return f"`{missing}` has no value: give {missing}={'package.Class' if missing.endswith('_target_') else '...'}"
    if located := re.search(r"Error locating target '(.*?)'", text):
        module, _, name = located[1].rpartition(".")
        there = vars(sys.modules[module]) if module in sys.modules else None
        if there is None or name in there:
            return f"`{key}._target_={located[1]}` cannot be imported: {first_line(cause)}"
        own = [one for one, value in there.items() if isinstance(value, type) and value.__module__ == module]
        hint = f" Did you mean `{key}._target_={module}.{near}`?" if (near := nearest(name, own)) else ""
        return f"`{key}._target_={located[1]}` cannot be imported: {module} has no {name}.{hint}"
    called = re.search(r"Error in call to target '(.*?)'", text)
    if called is None:
        return f"{key}: {first_line(cause)}"
    if isinstance(cause, MemoryError | RuntimeError) and (line := out_of_memory(cause)):
        return f"{key}: {line}"
    leave = f"; {key}=custom has no settings but yours" if key in CUSTOM and "keyword argument" in str(cause) else ""
    frame = traceback.extract_tb(cause.__traceback__)[-1]
    said = f"{called[1]} raised {type(cause).__name__}: {first_line(cause)}"
    return f"{key}: {said} ({frame.filename}:{frame.lineno}){leave}"


def out_of_memory(error: BaseException) -> str | None:
    """The message for tensors that do not fit into memory; None for other errors."""
    said = str(error)
    known = "out of memory|(can't allocate|not enough) memory|Storage size calculation overflowed"  # beyond 64 bits
    if not isinstance(error, MemoryError) and not re.search(known, said):
        return None
    tried = re.search(r"[Tt]ried to allocate ([\d.]+ ?\w+)", said)
    more = f" for another {tried[1]}" if tried else ""
    return f"there is not enough memory{more}: make the batch, the sequences or the model smaller"


def first_line(error: BaseException) -> str:
    """The first line of what a library says."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _key_of_a_part(key: object) -> str:
    """`layer.learner` only points at `learner`."""
    return re.sub(r"^layer\.(?=task|learner|optimizer)", "", str(key))


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error and its causes. (With a debugger, OmegaConf makes circles of them.)"""
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        yield error
        seen.append(error)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
