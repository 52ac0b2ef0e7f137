"""Threads that are inside of one fast module at once."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import hf_for_tests
import pytest
import torch
from torch import Tensor, nn

from metattt import Adapter
from metattt.optimizers import Adam

IDS = torch.arange(12).unsqueeze(0)


@pytest.mark.parametrize("batch", [1, 2])
def test_a_module_that_two_threads_are_in_has_the_weights_of_each(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = Adapter(hf_for_tests.llama(vocab_size=12), "norms", Adam(base_lr=0.1, mini_batch_size=4))
    adapter.read(IDS.repeat(batch, 1)), adapter.next_documents()
    expected = adapter.score(IDS.repeat(batch, 1)).nats
    norm: Any = type(adapter.base.model.norm)
    plain, both, left, been = norm.forward, threading.Barrier(2), threading.Event(), threading.local()

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        if not hasattr(been, "here"):
            been.here = True
            if both.wait(10) == 1:  # who came later stays until the other has finished
                left.wait(10)
        y: Tensor = plain(self, x)
        return y

    def score(_: int) -> Tensor:
        nats = adapter.score(IDS.repeat(batch, 1)).nats
        left.set()
        return nats

    monkeypatch.setattr(norm, "forward", forward)
    with ThreadPoolExecutor(2) as pool:
        for found in pool.map(score, range(2)):
            torch.testing.assert_close(found, expected, equal_nan=True)
