"""`metattt bench pixel`: memory and time of one image from raw pixels through a vision transformer, forward and
backward."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable

import torch

from metattt.bench.base import Benchmark, check_counts, require
from metattt.bench.report import Check, Report
from metattt.errors import MetaTTTError, check_choice, check_number
from metattt.measures.flops import flops_per_image
from metattt.models.timm import LAYERS, create
from metattt.registry import register
from metattt.testing.specimen import distance


@register(group="benchmark", name="pixel")
class Pixel(Benchmark):
    """ViT-Ti on one image, every pixel a token, blocks recomputed in the backward pass.

    Args:
        layer: of the model `vit_tiny_pixel_<layer>`.
        img_size: height and width (pixels).
        steps: T, inner steps; more than one are of SGD.
        depth: number of blocks.
        max_memory: GB that the process may take at its peak.
    """

    def __init__(
        self, layer: str = "mttt_mlp", img_size: int = 224, steps: int = 1, depth: int = 12, max_memory: float = 6.0
    ):
        check_choice("benchmark.layer", layer, LAYERS)
        check_counts(img_size=img_size, steps=steps, depth=depth)
        check_number("benchmark.max_memory", max_memory, above=0)
        self.layer, self.img_size, self.steps, self.depth, self.max_memory = layer, img_size, steps, depth, max_memory

    def run(self, say: Callable[[str], None]) -> Report:
        checks = [self._check()]
        model = create(
            "vit_tiny_pixel", LAYERS[self.layer], img_size=self.img_size, depth=self.depth, overrides=self._overrides()
        )
        torch.nn.init.normal_(
            model.get_parameter("head.logits.weight"), std=0.02
        )  # it starts at zero, where no gradient flows
        model.set_grad_checkpointing()
        flops = flops_per_image(model)
        image, before = torch.randn(1, 3, self.img_size, self.img_size), peak_memory()
        started = time.monotonic()
        loss = torch.nn.functional.cross_entropy(model(image), torch.tensor([0]))
        forward, after_forward = time.monotonic() - started, peak_memory()
        say(f"forward  {forward:.0f} s, peak {after_forward:.2f} GB")
        loss.backward()
        backward, peak = time.monotonic() - started - forward, peak_memory()
        say(f"backward {backward:.0f} s, peak {peak:.2f} GB")
        if not all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters() if p.requires_grad):
            raise MetaTTTError("nothing is reported: a gradient is missing or not finite")
        if peak > self.max_memory:
            raise MetaTTTError(f"the image took {peak:.2f} GB, more than benchmark.max_memory={self.max_memory}")
        row = {
            "model": f"vit_tiny_pixel_{self.layer}",
            "image": f"{self.img_size}×{self.img_size}",
            "tokens": self.img_size**2,
            "blocks": self.depth,
            "inner steps": self.steps,
            "TFLOPs forward": flops / 1e12,
            "forward (s)": forward,
            "backward (s)": backward,
            "peak memory (GB)": peak,
            "before the image (GB)": before,
        }
        text = (
            "One image, every pixel a token, fp32, forward and backward of the whole model. Blocks are recomputed in the backward pass, "
            "and inside a layer the inner loop and its second-order backward run in chunks of tokens. *Peak memory* is the largest "
            "resident set of the whole process, Python and torch included. (The published code needs about 42 GB for it.)"
        )
        settings = {"layer": self.layer, "img_size": self.img_size, "steps": self.steps, "depth": self.depth}
        return Report("One image from raw pixels", text, {"Forward and backward": [row]}, checks, settings)

    def _overrides(self, chunk: int | None = None) -> list[str]:
        chunked = [] if chunk is None else [f"optimizer.compute_chunk={chunk}"]
        seeded = ["optimizer.seed=0"] if chunk is not None else []
        if not self.layer.startswith("mttt"):
            return []
        return (
            chunked + seeded + ([f"optimizer.steps={self.steps}", "optimizer.sampling=sgd"] if self.steps > 1 else [])
        )

    def _check(self) -> Check:
        """A small image with chunks and recomputation against everything at once."""
        image, found = torch.randn(1, 3, 16, 16, dtype=torch.float64), []
        for chunk, recompute in ((48, True), (2048, False)):
            torch.manual_seed(0)
            model = create(
                "vit_tiny_pixel", LAYERS[self.layer], img_size=16, depth=2, overrides=self._overrides(chunk)
            ).double()
            torch.nn.init.normal_(model.get_parameter("head.logits.weight"), std=0.02)
            model.set_grad_checkpointing(recompute)
            logits = model(image)
            logits.square().sum().backward()
            found.append(
                torch.cat(
                    [p.grad.flatten() for p in model.parameters() if p.grad is not None] + [logits.detach().flatten()]
                )
            )
        return require(
            "a 16×16 image in chunks of 48 tokens, recomputed, against all at once: logits and gradients",
            distance(found[0], found[1]),
            1e-9,
        )


def peak_memory() -> float:
    """Largest resident set of this process so far (GB)."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024) / 1e9
