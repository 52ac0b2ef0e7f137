"""Lets the reference see the constructors that are made of declared settings (`metattt.component`)."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

import griffe


class Constructors(griffe.Extension):
    """Gives a class without an `__init__` in its source the one that it has."""

    def on_class(self, *, cls: griffe.Class, **kwargs: Any) -> None:
        if not cls.path.startswith("metattt.") or "__init__" in cls.members:
            return
        module, _, name = cls.path.rpartition(".")
        found = getattr(import_module(module), name, None)
        made = getattr(found, "__init__", None)
        if not hasattr(made, "made_of_settings"):
            return
        settings = {one.alias or attribute: one for attribute, one in found._settings.items()}
        parameters = [griffe.Parameter("self", kind=griffe.ParameterKind.positional_only)]
        for one in list(inspect.signature(made).parameters.values())[1:]:
            default = None if one.default is inspect.Parameter.empty else repr(one.default)
            kind = griffe.ParameterKind[one.kind.name.lower()]
            annotation = inspect.formatannotation(settings[one.name].annotation)
            parameters.append(griffe.Parameter(one.name, annotation=annotation, kind=kind, default=default))
        cls.set_member("__init__", griffe.Function("__init__", parameters=griffe.Parameters(*parameters), parent=cls))
