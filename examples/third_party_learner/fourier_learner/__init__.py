"""A learner of another package: learned Fourier features of the token, read by a linear map."""

from fourier_learner.learner import Fourier

__all__ = ["Fourier"]
