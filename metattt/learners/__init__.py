"""Learners: the models whose weights are the hidden state."""

from metattt.learners.base import Learner, NonParametric, Weight
from metattt.learners.fast_weights import FastWeights
from metattt.learners.kernel_estimator import KernelEstimator
from metattt.learners.linear import Linear
from metattt.learners.mlp import MLP

__all__ = ["MLP", "FastWeights", "KernelEstimator", "Learner", "Linear", "NonParametric", "Weight"]
