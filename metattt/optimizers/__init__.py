"""Inner optimizers: how a gradient moves the hidden state."""

from metattt.ops.linear_rule import Coefficients
from metattt.optimizers.append import Append
from metattt.optimizers.base import Gates, InnerOptimizer
from metattt.optimizers.block import Adam, BlockMomentum, BlockRule, Sign
from metattt.optimizers.bounded import Bounded
from metattt.optimizers.channel_decay import ChannelDecay
from metattt.optimizers.delta_gradient import DeltaGradientDescent
from metattt.optimizers.gradient_descent import GradientDescent, StepSize
from metattt.optimizers.key_step import KeyStep
from metattt.optimizers.mirror import MirrorDescent
from metattt.optimizers.momentum import Momentum
from metattt.optimizers.preconditioned import Preconditioned
from metattt.optimizers.state_gated import StateGated
from metattt.optimizers.whole import WholeSequence

__all__ = [
    "Adam",
    "Append",
    "BlockMomentum",
    "BlockRule",
    "Bounded",
    "ChannelDecay",
    "Coefficients",
    "DeltaGradientDescent",
    "Gates",
    "GradientDescent",
    "InnerOptimizer",
    "KeyStep",
    "MirrorDescent",
    "Momentum",
    "Preconditioned",
    "Sign",
    "StateGated",
    "StepSize",
    "WholeSequence",
]
