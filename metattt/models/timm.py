"""The models that `timm.create_model` knows after `import metattt.models.timm`: `vit_<size>_<layer>`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from inspect import signature
from typing import Any

from torch import nn

from metattt.errors import MetaTTTError, check_integer
from metattt.models.vision import ImageTransformer
from metattt.optional import need

register_model = need("timm.models", extra="images", what="metattt.models.timm").register_model
from timm.models._features import FeatureGetterNet  # noqa: E402

SIZES: dict[str, dict[str, Any]] = {
    "vit_small_patch16": {"embed_dim": 384, "num_heads": 6, "patch_size": 16, "position": "sincos2d"},
    "vit_base_patch16": {"embed_dim": 768, "num_heads": 12, "patch_size": 16, "position": "sincos2d"},
    "vit_tiny_patch16": {"embed_dim": 192, "num_heads": 3, "patch_size": 16, "position": "sincos2d"},
    "vit_tiny_pixel": {"embed_dim": 192, "num_heads": 3, "patch_size": 1, "position": "learned"},
    "vit_small_pixel": {"embed_dim": 384, "num_heads": 6, "patch_size": 1, "position": "learned"},
    "vit_digits_pixel": {
        "embed_dim": 32, "num_heads": 2, "depth": 1, "patch_size": 1, "position": "learned", "img_size": 8,
        "in_chans": 1,
        "num_classes": 10,
    },
}  # fmt: skip
NEUTRAL = [("drop_rate", 0), ("global_pool", "avg")]  # what timm's own scripts give to every model
LAYERS = {  # in the name of the model: configuration of the layer
    "mttt_mlp": "mttt_mlp",
    "mttt_linear": "mttt_linear",
    "linear_attention": "linear_attention_image",
    "linear_attention_elu": "linear_attention_elu_image",
    "self_attention": "self_attention",
    "vittt": "vittt",
}


def create(
    model: str,
    layer: str,
    pretrained: bool = False,
    pretrained_cfg: Any = None,
    pretrained_cfg_overlay: Any = None,
    cache_dir: Any = None,
    overrides: Sequence[str] = (),
    features_only: bool = False,
    out_indices: int | Sequence[int] = 3,
    **options: Any,
) -> ImageTransformer | FeatureGetterNet:
    """One of `SIZES` with a layer in every block.

    Args:
        model: a key of `SIZES`.
        layer: any layer configuration of ours, `ttt_mlp` for instance.
        pretrained, pretrained_cfg, pretrained_cfg_overlay, cache_dir: what `timm.create_model` hands on; no weights are
            published.
        overrides: of the layer's configuration, e.g. `["optimizer.steps=4", "optimizer.sampling=sgd"]`.
        features_only: the maps `[B, D, h, w]` that blocks leave, for detection and segmentation, in place of logits.
        out_indices: the numbers of these blocks; an integer: so many last blocks.
        options: arguments of `ImageTransformer` that differ from the size's: img_size (pixels, or height and width),
            num_classes, depth, ...

    Raises:
        MetaTTTError: `pretrained`, an unknown option, or a configuration that does not exist or fit.
    """
    from metattt.composition.compose import compose  # which imports the modules of this folder
    from metattt.composition.instantiate import instantiate_layer

    if pretrained:
        raise MetaTTTError(f"{model}: there are no pretrained weights; leave out pretrained=True")
    options = {key: value for key, value in options.items() if (key, value) not in NEUTRAL}
    known = [*signature(ImageTransformer).parameters][1:]
    if unknown := options.keys() - {*known}:
        raise MetaTTTError(f"{model}: {min(unknown)}={options[min(unknown)]} is not taken: it knows {', '.join(known)}")
    size = SIZES[model] | options
    pair: Any = size.get("img_size")
    if isinstance(pair, list | tuple) and len(pair) == 2:
        size["img_size"] = pair[0]
    parts = (f"layer={layer}", f"dim={size['embed_dim']}", f"num_heads={size['num_heads']}", "seed=null", *overrides)
    built = ImageTransformer(layer=partial(instantiate_layer, compose(*parts, job="build")), **size)
    if isinstance(pair, list | tuple):  # not square
        check_integer("img_size", pair[1])
        if pair[1] % size["patch_size"]:
            raise MetaTTTError(f"{model}: patch_size={size['patch_size']} does not divide img_size={pair}")
        built.set_input_size(img_size=pair)
        if built.pos_embed is not None:  # timm has resampled those of a square: draw them as `position` says
            nn.init.normal_(built.pos_embed, std=size["embed_dim"] ** -0.5)
    digits = model == "vit_digits_pixel"  # as metattt.data evaluates: whole digits, and centre crops of other pictures
    built.evaluated_with(model, *((1.0, "nearest") if digits else (0.875, "bilinear")))
    at = out_indices if isinstance(out_indices, int) else tuple(out_indices)
    return FeatureGetterNet(built, out_indices=at) if features_only else built


def register() -> None:
    """Makes the models known to timm."""
    for model in SIZES:
        for name, layer in LAYERS.items():
            register_model(_entry(model, name, layer))


def _entry(model: str, name: str, layer: str) -> Callable[..., ImageTransformer | FeatureGetterNet]:
    def entry(layer: str = layer, **options: Any) -> ImageTransformer | FeatureGetterNet:
        return create(model, layer, **options)

    entry.__name__ = entry.__qualname__ = f"{model}_{name}"
    entry.__doc__ = f"{model} with layer={layer} in every block; for the arguments see `create`."
    return entry


register()
