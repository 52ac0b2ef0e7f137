"""Every test starts alike: one thread per worker, float32, and the same random numbers."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _same_start() -> Iterator[None]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)
