"""The options of a command line that begin with dashes: they are Hydra's, and Hydra does what they say."""

from __future__ import annotations

import logging
import os
import re
import sys
import threading
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn
from unittest import mock

import hydra
from hydra._internal.hydra import Hydra
from hydra._internal.utils import get_args_parser
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf

from metattt.composition.components import COMPONENTS, JOB_COMPONENTS, load_components
from metattt.composition.overrides import SEARCH_PATH, key_of, prepare, quoted
from metattt.errors import MetaTTTError, shown

ALONE = threading.RLock()
"""Held by the thread that changes what is of the whole process: Hydra's settings, or torch's generator for a while."""


@contextmanager
def application(job: str) -> Iterator[Hydra]:
    """Hydra with our configurations, as `@hydra.main` would make it; whatever was there before is there again."""
    with ALONE:
        outer = GlobalHydra.instance().hydra  # set if the caller is itself a Hydra application
        GlobalHydra.instance().clear()
        try:
            with hydra.initialize_config_module("metattt.configs", job_name=job, version_base="1.3"):
                inner = GlobalHydra.instance().hydra
                assert inner is not None
                yield inner
        finally:
            GlobalHydra.instance().hydra = outer


def parse(words: Sequence[str], command: str) -> Namespace:
    """The options of a command, and its `overrides`, that of `--config-dir` among them.

    Raises:
        MetaTTTError: an option that there is not, without its value, or that does not go with another.
    """

    def refuse(message: str) -> NoReturn:
        word = message.removeprefix("unrecognized arguments: ").split(" ")[0]
        key, _, value = word.lstrip("-").partition("=")
        settings = f"settings are given as {key.replace('-', '_')}={value or '<value>'}, without dashes"
        raise MetaTTTError(f"`{word}` is not an option: {settings}" if message.startswith("unrec") else message)

    parser = get_args_parser()
    parser.error, parser.allow_abbrev = refuse, False  # type: ignore[method-assign]
    shown = ("job", "hydra", "all")
    pairs = zip(words, [*words[1:], ""], strict=False)
    full = [f"{one}=job" if one == "--cfg" and after not in shown else one for one, after in pairs]
    options = parser.parse_intermixed_args(full)
    if sum((options.run, options.multirun, options.cfg is not None, options.info is not None)) > 1:
        raise MetaTTTError("--run, --multirun (-m), --cfg and --info exclude each other: give one of them")
    if (options.resolve or options.package) and options.cfg is None:
        raise MetaTTTError("--resolve and --package say what --cfg prints: add --cfg job")
    if options.config_path or options.config_name or options.experimental_rerun:
        raise MetaTTTError(f"`metattt {command}` has its configuration; --config-dir <folder> adds files of your own")
    if options.config_dir is not None:
        folder = Path(options.config_dir).expanduser().absolute()
        if not folder.is_dir():
            raise MetaTTTError(
                f"--config-dir: there is no folder {options.config_dir}; give one that holds e.g. experiment/mine.yaml"
            )
        others = [one.partition("=")[2].strip("[] ") for one in options.overrides if key_of(one) == SEARCH_PATH]
        rest = [one for one in options.overrides if key_of(one) != SEARCH_PATH]
        options.overrides = [f"{SEARCH_PATH}=[{','.join([quoted(f'file://{folder}'), *others])}]", *rest]
    return options


def show(options: Namespace, command: str, cfg: DictConfig) -> None:
    """Prints what `--cfg` or `--info` asks for.

    Args:
        options: as `parse` returns them.
        command: the command.
        cfg: its configuration.

    Raises:
        MetaTTTError: a package that it has not.
    """
    missing = f"--package {options.package}: the configuration has no such key"
    if options.cfg == "job":  # of what `compose` makes: with a pattern of blocks filled in
        whole = options.package in (None, "_global_")
        found = cfg if whole else OmegaConf.select(cfg, options.package, throw_on_missing=True, default=missing)
        if found is missing:
            raise MetaTTTError(missing)
        if options.resolve:
            OmegaConf.resolve(cfg)
        if not OmegaConf.is_config(found):
            print(shown(found))
            return
        print("" if whole else f"# @package {options.package}\n", OmegaConf.to_yaml(found), sep="", end="")
        return
    with application(command) as app:
        overrides = prepare(options.overrides, command)
        if options.info:
            root = logging.getLogger()  # which Hydra has print everything
            with mock.patch.multiple(root, handlers=list(root.handlers), level=root.level):
                app.show_info(options.info, command, overrides)
            return
        try:
            app.show_cfg(command, overrides, options.cfg, options.package, options.resolve)
        except SystemExit as error:
            raise MetaTTTError(missing) from error


def complete(words: Sequence[str], commands: Sequence[str]) -> None:
    """Prints what Hydra's `--shell-completion` prints: a script for a shell, or the words that may follow.

    Args:
        words: `install=bash`, `uninstall=bash` or `query=bash`.
        commands: of metattt, the first words of a line.

    Raises:
        MetaTTTError: another word.
    """
    typed_line = os.environ.get("COMP_LINE", "")
    typed = typed_line.split(maxsplit=2)
    query = words[0].startswith("query=") if words else False
    if query and (len(typed) < 2 or (len(typed) == 2 and not typed_line.endswith(" "))):
        print(*(command for command in commands if command.startswith(typed[1] if len(typed) == 2 else "")))
        return
    job = typed[1] if query else "train"
    if job not in commands:
        return
    load_components(COMPONENTS + JOB_COMPONENTS.get(job, ()))
    rest = re.sub(r"(--config-dir|-cd)[ =](\S+)", rf"{SEARCH_PATH}=[file://\2]", typed[2] if len(typed) > 2 else "")
    line = {"COMP_LINE": f"metattt {rest}"}
    with application(job) as app, mock.patch.object(sys, "argv", ["metattt"]), mock.patch.dict(os.environ, line):
        try:
            app.shell_completion(job, list(words))
        except ValueError as error:
            raise MetaTTTError(" ".join(str(error).split())) from error
        except SystemExit:  # of options that are half typed
            return
