"""Every law of the framework, checked on this learner."""

from fourier_learner import Fourier

from metattt.testing import LearnerConformance


class TestFourier(LearnerConformance):
    make = staticmethod(lambda: Fourier())
