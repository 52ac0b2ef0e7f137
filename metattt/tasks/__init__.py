"""Tasks: what is learned from a token."""

from metattt.tasks.base import Task, Views
from metattt.tasks.lact import LaCTViews
from metattt.tasks.mttt import DecodedReconstruction
from metattt.tasks.next_token import NextToken
from metattt.tasks.reconstruction import Reconstruction

__all__ = ["DecodedReconstruction", "LaCTViews", "NextToken", "Reconstruction", "Task", "Views"]
