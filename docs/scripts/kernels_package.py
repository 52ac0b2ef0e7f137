"""Lets the reference find `metattt.kernels`, which has no `__init__.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import griffe


class KernelsPackage(griffe.Extension):
    """Loads `metattt/kernels` by itself and makes it a part of `metattt`."""

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        if pkg.path == "metattt" and "kernels" not in pkg.members:
            folder = Path(str(pkg.filepath)).parent
            pkg.set_member("kernels", griffe.GriffeLoader(search_paths=[folder]).load("kernels"))
