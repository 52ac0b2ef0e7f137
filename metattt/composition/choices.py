"""What can be chosen by name: the YAML files of a configuration group, ours and those of other packages."""

from importlib.metadata import entry_points
from importlib.resources import files
from importlib.resources.abc import Traversable


def choices(group: str) -> dict[str, str]:
    """Name -> one-line description (the first comment of its file), from our configs and those of other packages."""
    found: dict[str, str] = {}
    packages = ["metattt.configs", *(entry.value for entry in entry_points(group="metattt.configs"))]
    for package in packages:
        try:
            folder = files(package) / group
            listed = [file for file in folder.iterdir() if file.name.endswith(".yaml")] if folder.is_dir() else []
        except ImportError:  # a package that is broken is reported when something is run
            continue
        for file in listed:
            found.setdefault(file.name.removesuffix(".yaml"), _description(file))
    return found


def _description(file: Traversable) -> str:
    for line in file.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            return ""
        if not line.startswith("# @package"):
            return line.lstrip("# ")
    return ""
