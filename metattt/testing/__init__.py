"""The conformance suite: properties that every component must have, checked by three lines of pytest or `metattt
check`.

```python
from metattt.testing import LearnerConformance

class TestFourier(LearnerConformance):
    make = staticmethod(lambda: Fourier())
```
"""

from metattt.testing.conformance import Conformance, LearnerConformance, OptimizerConformance, TaskConformance
from metattt.testing.laws import LAWS, Law
from metattt.testing.report import check
from metattt.testing.specimen import NotApplicable, Specimen

__all__ = [
    "LAWS",
    "Conformance",
    "Law",
    "LearnerConformance",
    "NotApplicable",
    "OptimizerConformance",
    "Specimen",
    "TaskConformance",
    "check",
]
