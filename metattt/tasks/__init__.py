"""Tasks: what is learned from a token."""

from metattt.tasks.base import Task, Views
from metattt.tasks.gated import GatedViews
from metattt.tasks.lact import LaCTViews
from metattt.tasks.mttt import DecodedReconstruction
from metattt.tasks.next_token import NextToken
from metattt.tasks.pairs import Pairs
from metattt.tasks.reconstruction import Reconstruction
from metattt.tasks.rwkv7 import RWKV7Views
from metattt.tasks.window import WindowViews

__all__ = [
    "DecodedReconstruction",
    "GatedViews",
    "LaCTViews",
    "NextToken",
    "Pairs",
    "RWKV7Views",
    "Reconstruction",
    "Task",
    "Views",
    "WindowViews",
]
