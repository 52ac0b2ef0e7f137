"""What Hydra itself tells of a configuration: `--info`, `--cfg hydra`, and the completion of shells."""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from io import StringIO
from unittest import mock

import hydra
from hydra._internal.hydra import Hydra
from hydra.core.global_hydra import GlobalHydra

from metattt.composition.components import COMPONENTS, JOB_COMPONENTS, load_components
from metattt.composition.flags import SHELLS
from metattt.composition.overrides import prepare
from metattt.errors import MetaTTTError


@contextmanager
def application(job: str) -> Iterator[Hydra]:
    """Hydra with our configurations, as `@hydra.main` would make it; whatever was there before is there again."""
    load_components(COMPONENTS + JOB_COMPONENTS.get(job, ()))
    outer = GlobalHydra.instance().hydra  # set if the caller is itself a Hydra application
    GlobalHydra.instance().clear()
    try:
        with hydra.initialize_config_module("metattt.configs", job_name=job, version_base="1.3"):
            inner = GlobalHydra.instance().hydra
            assert inner is not None
            yield inner
    finally:
        GlobalHydra.instance().hydra = outer


def show_info(what: str, overrides: Sequence[str], job: str) -> str:
    """What `--info` prints.

    Args:
        what: one of `metattt.composition.flags.INFO`.
        overrides: of a configuration that composes.
        job: the command.
    """
    root, out = logging.getLogger(), StringIO()
    before, level = list(root.handlers), root.level
    with application(job) as app, redirect_stdout(out):
        try:
            app.show_info(what, job, prepare(overrides, job))
        finally:
            root.handlers[:] = before
            root.setLevel(level)
    return out.getvalue()


def show_hydra(what: str, overrides: Sequence[str], job: str, package: str | None, resolve: bool) -> str:
    """What `--cfg hydra` and `--cfg all` print, of a configuration that composes.

    Raises:
        MetaTTTError: a package that it has not.
    """
    out = StringIO()
    with application(job) as app, redirect_stdout(out):
        try:
            app.show_cfg(job, prepare(overrides, job), what, package, resolve)
        except SystemExit as error:
            raise MetaTTTError(f"--package {package}: the configuration has no such key") from error
    return out.getvalue()


def complete(words: Sequence[str], commands: Sequence[str]) -> str:
    """What `--shell-completion` prints: a script for a shell, or the words that may follow.

    Args:
        words: `install=bash`, `uninstall=bash` or `query=bash`.
        commands: of metattt.

    Raises:
        MetaTTTError: another word.
    """
    action, _, shell = words[0].partition("=") if len(words) == 1 else ("", "", "")
    if action not in ("install", "uninstall", "query") or shell not in SHELLS:
        raise MetaTTTError(f"--shell-completion needs install=<shell> or uninstall=<shell>, one of {', '.join(SHELLS)}")
    line = os.environ.get("COMP_LINE", "")
    typed = line.split(maxsplit=2)
    if action == "query" and (len(typed) < 2 or (len(typed) == 2 and not line.endswith(" "))):
        begun = typed[1] if len(typed) == 2 else ""
        return " ".join(command for command in commands if command.startswith(begun)) + "\n"
    job = typed[1] if action == "query" else "train"
    if job not in commands:
        return "\n"
    out = StringIO()
    with application(job) as app, redirect_stdout(out):
        plugin = app.get_shell_to_plugin_map(app.config_loader)[shell][0]
        with mock.patch.object(sys, "argv", ["metattt"]), suppress(SystemExit):  # of options that are half typed
            if action != "query":
                getattr(plugin, action)()
            else:
                rest = re.sub(
                    r"(--config-dir|-cd)[ =](\S+)", r"hydra.searchpath=[file://\2]", typed[2] if len(typed) > 2 else ""
                )
                with mock.patch.dict(os.environ, COMP_LINE=f"metattt {rest}"):
                    plugin.query(config_name=job)
    return out.getvalue() or "\n"
