"""Mixers: sequence layers with their own recurrence, without task, learner and inner optimizer."""

from metattt.mixers.base import Mixer
from metattt.mixers.longhorn import Longhorn
from metattt.mixers.mamba import Mamba
from metattt.mixers.mamba2 import Mamba2

__all__ = ["Longhorn", "Mamba", "Mamba2", "Mixer"]
