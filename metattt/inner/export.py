"""The inner loop for `torch.export`, and for the recording of a step: neither sees the operations of automatic
differentiation by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._guards import detect_fake_mode, tracing
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import _pop_mode_temporarily
from torch.utils._python_dispatch import _disable_current_modes

from metattt.errors import MetaTTTError
from metattt.torch_private import function_modes


def inlined(body: Callable[..., Sequence[Tensor]], *tensors: Tensor) -> list[Tensor]:
    """Runs `body(*tensors)` as a recorded graph that includes the operations of its inner gradients.

    The graph is recorded with tensors without values, so `body` may use traced values only through `tensors`.

    Raises:
        MetaTTTError: `strict=True`, which traces Python itself, or dynamic sizes.
    """
    if torch.compiler.is_dynamo_compiling():
        raise MetaTTTError("torch.export(strict=True) cannot trace the gradients inside a layer: use strict=False")
    if any(isinstance(size, torch.SymInt) for x in tensors for size in x.shape):
        raise MetaTTTError(
            "torch.export writes the loop over mini-batches out, for one batch size and length: "
            "leave both out of dynamic_shapes"
        )
    blind = detect_fake_mode(tensors) is not None
    with ExitStack() as stack:  # hidden from the export that surrounds this call
        stack.enter_context(_disable_current_modes())
        for _ in range(function_modes()):
            stack.enter_context(_pop_mode_temporarily())
        stack.enter_context(tracing(None))
        stack.enter_context(torch.no_grad())
        blank = [torch.zeros(tuple(x.shape), dtype=x.dtype, device=x.device) for x in tensors]
        graph = make_fx(lambda *given: list(body(*given)), tracing_mode="fake" if blind else "real")(*blank)
    _clean(graph)
    with detect_fake_mode(tensors) or nullcontext():  # what the graph makes itself has no values either
        outputs: list[Tensor] = graph(*(x.contiguous() for x in tensors))
    return outputs


def _clean(graph: GraphModule) -> None:
    """Removes leftovers of recording: numbers that became constants, and `detach` of results that are kept for a
    backward pass.

    (Training an exported program differentiates these results.)
    """
    for node in graph.graph.find_nodes(op="call_function", target=torch.ops.aten.detach.default):
        node.replace_all_uses_with(node.args[0])
        graph.graph.erase_node(node)
    for node in graph.graph.find_nodes(op="get_attr"):
        number = getattr(graph, node.target)
        if isinstance(number, Tensor) and number.ndim == 0:
            options: dict[str, Any] = {"dtype": number.dtype, "device": number.device}
            with graph.graph.inserting_before(node):
                made = graph.graph.call_function(torch.ops.aten.full.default, ([], number.item()), options)
            node.replace_all_uses_with(made)
            graph.graph.erase_node(node)
    graph.recompile()
