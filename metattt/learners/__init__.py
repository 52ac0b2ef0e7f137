"""Learners: the models whose weights are the hidden state."""

from metattt.learners.base import Learner, Weight
from metattt.learners.channel_memory import Oja, Slots
from metattt.learners.chebyshev_ridge import ChebyshevRidge
from metattt.learners.convolution import Convolution
from metattt.learners.depthwise import Depthwise
from metattt.learners.fast_weights import FastWeights
from metattt.learners.global_estimator import GlobalEstimator
from metattt.learners.glu import GLU
from metattt.learners.kernel_estimator import KernelEstimator
from metattt.learners.kernel_ridge import KernelRidge
from metattt.learners.linear import Linear
from metattt.learners.log_linear import LogLinear
from metattt.learners.mlp import MLP
from metattt.learners.module.adapter import ModuleLearner
from metattt.learners.nested import NestedTTT
from metattt.learners.non_parametric import NonParametric
from metattt.learners.recurrent_ridge import RecurrentRidge
from metattt.learners.swiglu import SwiGLU
from metattt.learners.transformer import Transformer

__all__ = [
    "GLU",
    "MLP",
    "ChebyshevRidge",
    "Convolution",
    "Depthwise",
    "FastWeights",
    "GlobalEstimator",
    "KernelEstimator",
    "KernelRidge",
    "Learner",
    "Linear",
    "LogLinear",
    "ModuleLearner",
    "NestedTTT",
    "NonParametric",
    "Oja",
    "RecurrentRidge",
    "Slots",
    "SwiGLU",
    "Transformer",
    "Weight",
]
