"""MetaTTT: sequence layers whose hidden state is a model that learns while it reads."""

from importlib.metadata import PackageNotFoundError, version

from metattt.errors import MetaTTTError
from metattt.layer import TTTLayer
from metattt.state import State

try:
    __version__ = version("metattt")
except PackageNotFoundError:  # run from a checkout that was never installed
    __version__ = "0+unknown"

__all__ = ["MetaTTTError", "State", "TTTLayer", "__version__"]
