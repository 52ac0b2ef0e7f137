"""Inner optimizers: how a gradient moves the hidden state."""

from metattt.optimizers.append import Append
from metattt.optimizers.base import Coefficients, Gates, InnerOptimizer
from metattt.optimizers.block import Adam, BlockMomentum, BlockRule, Sign
from metattt.optimizers.gradient_descent import GradientDescent, StepSize
from metattt.optimizers.mirror import MirrorDescent
from metattt.optimizers.momentum import Momentum
from metattt.optimizers.state_gated import StateGated
from metattt.optimizers.whole import WholeSequence

__all__ = [
    "Adam",
    "Append",
    "BlockMomentum",
    "BlockRule",
    "Coefficients",
    "Gates",
    "GradientDescent",
    "InnerOptimizer",
    "MirrorDescent",
    "Momentum",
    "Sign",
    "StateGated",
    "StepSize",
    "WholeSequence",
]
