"""`optimizer.mini_batch_size=null`: all tokens of a call, or of each document in it, are one mini-batch."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from metattt.inner.packing import ColumnLayout
from metattt.inner.parts import Parts

P = TypeVar("P", bound=Parts)


def sized(loop: P, count: int) -> P:
    """The loop for a call of `count` tokens: mini-batches have as many."""
    plan = replace(loop.plan, period=count if loop.plan.period else None, block=count)
    return loop._replace(rule=loop.rule.bound(mini_batch_size=count), plan=plan)


def closed(layout: ColumnLayout) -> ColumnLayout:
    """The layout with every mini-batch committed at its last token, also one that padding, or the end of its document,
    leaves shorter than the call."""
    return layout._replace(blocks=[block._replace(commit=block.filled > 0) for block in layout.blocks], phase=0)
