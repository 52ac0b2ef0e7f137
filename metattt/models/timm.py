"""The models that `timm.create_model` knows after `import metattt`: `vit_<size>_<layer>`.

Neither timm nor torch is imported for it: the names are registered when timm is, or at once if it has been.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

from metattt.errors import MetaTTTError

if TYPE_CHECKING:
    from metattt.models.vision import ImageTransformer

SIZES: dict[str, dict[str, Any]] = {
    "vit_small_patch16": {"embed_dim": 384, "num_heads": 6, "patch_size": 16, "position": "sincos2d"},
    "vit_tiny_patch16": {"embed_dim": 192, "num_heads": 3, "patch_size": 16, "position": "sincos2d"},
    "vit_tiny_pixel": {"embed_dim": 192, "num_heads": 3, "patch_size": 1, "position": "learned"},
    "vit_small_pixel": {"embed_dim": 384, "num_heads": 6, "patch_size": 1, "position": "learned"},
    "vit_digits_pixel": {
        "embed_dim": 32, "num_heads": 2, "depth": 1, "patch_size": 1, "position": "learned", "img_size": 8, "in_chans": 1,
        "num_classes": 10,
    },
}  # fmt: skip
LAYERS = {  # in the name of the model: configuration of the layer
    "mttt_mlp": "mttt_mlp",
    "mttt_linear": "mttt_linear",
    "linear_attention": "linear_attention_image",
    "linear_attention_elu": "linear_attention_elu_image",
    "self_attention": "self_attention",
}


def create(
    model: str,
    layer: str,
    pretrained: bool = False,
    pretrained_cfg: Any = None,
    pretrained_cfg_overlay: Any = None,
    cache_dir: Any = None,
    overrides: Sequence[str] = (),
    **options: Any,
) -> ImageTransformer:
    """One of `SIZES` with a layer in every block.

    Args:
        model: a key of `SIZES`.
        layer: any layer configuration of ours, `ttt_mlp` for instance.
        pretrained, pretrained_cfg, pretrained_cfg_overlay, cache_dir: what `timm.create_model` hands on; no weights are published.
        overrides: of the layer's configuration, e.g. `["optimizer.steps=4", "optimizer.sampling=sgd"]`.
        options: arguments of `ImageTransformer` that differ from the size's: img_size, num_classes, depth, ...

    Raises:
        MetaTTTError: `pretrained`, or a configuration that does not exist or fit.
    """
    from metattt.composition.compose import compose
    from metattt.composition.instantiate import instantiate_layer
    from metattt.models.vision import ImageTransformer

    if pretrained:
        raise MetaTTTError(f"{model}: there are no pretrained weights; leave out pretrained=True")
    size = SIZES[model] | options
    parts = (f"layer={layer}", f"dim={size['embed_dim']}", f"num_heads={size['num_heads']}", "seed=null", *overrides)
    built = ImageTransformer(layer=partial(instantiate_layer, compose(*parts, job="build")), **size)
    height, width = built.patch_embed.img_size
    centre = (0.5,) * built.in_chans
    about: dict[str, Any] = {
        "input_size": (built.in_chans, height, width), "num_classes": built.num_classes, "mean": centre, "std": centre, "crop_pct": 0.875,
        "interpolation": "bilinear", "first_conv": "patch_embed.proj", "classifier": "head.logits", "architecture": model,
    }  # fmt: skip
    built.__dict__.update(pretrained_cfg=about, default_cfg=about)
    return built


def register() -> None:
    """Makes the models known to timm."""
    from timm.models import register_model

    for model in SIZES:
        for name, layer in LAYERS.items():
            register_model(_entry(model, name, layer))


def _entry(model: str, name: str, layer: str) -> Callable[..., ImageTransformer]:
    def entry(layer: str = layer, **options: Any) -> ImageTransformer:
        return create(model, layer, **options)

    entry.__name__ = entry.__qualname__ = f"{model}_{name}"
    entry.__doc__ = f"{model} with layer={layer} in every block; for the arguments see `create`."
    return entry


class _Loader(importlib.abc.Loader):
    """timm's own loader, and our registration after it."""

    def __init__(self, loader: importlib.abc.Loader):
        self.loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self.loader
        self.loader.exec_module(module)
        register()


class _Finder(importlib.abc.MetaPathFinder):
    """Finds timm where it is, once."""

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> importlib.machinery.ModuleSpec | None:
        if name != "timm":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


def register_with_timm() -> None:
    """Registers now if timm is imported, else when it will be."""
    if "timm" in sys.modules:
        register()
    else:
        sys.meta_path.insert(0, _Finder())
