"""Mixers: sequence layers with a recurrence of their own, in the place of one made of task, learner and inner
optimizer."""

from metattt.mixers.base import Mixer
from metattt.mixers.longhorn import Longhorn
from metattt.mixers.mamba import Mamba
from metattt.mixers.mamba2 import Mamba2

__all__ = ["Longhorn", "Mamba", "Mamba2", "Mixer"]
