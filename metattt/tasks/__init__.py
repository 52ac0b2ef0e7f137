"""Tasks: what is learned from a token."""

from metattt.tasks.base import Task, Views
from metattt.tasks.reconstruction import Reconstruction

__all__ = ["Reconstruction", "Task", "Views"]
