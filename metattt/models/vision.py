"""timm's vision transformer with any of our layers in the place of attention."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from metattt.errors import MetaTTTError, check_choice, check_integer, check_number, divisors
from metattt.learners.depthwise import Depthwise
from metattt.models.block import check_blocks, check_function
from metattt.optional import need
from metattt.registry import register
from metattt.tasks.reconstruction import Reconstruction

need("timm", extra="images", what="model=vision_transformer")
from timm.models.vision_transformer import VisionTransformer  # noqa: E402

EPS = 1e-6  # of every LayerNorm


class SequenceLayer(nn.Module):
    """What timm's block calls attention: `[B, N, D]` to `[B, N, D]` through `layer`, which the model sets.

    timm's options for attention (biases, norms, dropout) are ignored: they belong to the layer.
    """

    layer: nn.Module

    def __init__(self, dim: int, num_heads: int, **options: Any):
        super().__init__()

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        if attn_mask is not None or is_causal:
            raise MetaTTTError("the layer decides which tokens see each other: attn_mask and is_causal are not taken")
        return self.layer(x)[0]


@register(group="model", name="vision_transformer")
class ImageTransformer(VisionTransformer):
    """The ViT of the MTTT paper (arXiv 2310.13807, Sec. 5): pre-LN blocks, no class token, mean over tokens, a tanh
    layer, classes.

    Argument names are timm's.

    Args:
        layer: makes the sequence layer of one block, called as `y, state = layer(x)`; called `depth` times.
        embed_dim: D, width of the residual stream.
        num_heads: H, for checks only: the layers bring their own.
        depth: number of blocks.
        mlp_ratio: hidden width of the blocks' MLPs over D.
        img_size: height and width of the images (pixels).
        patch_size: of a token (pixels); 1 makes every pixel a token.
        in_chans: channels.
        num_classes: number of classes; 0: features alone, the mean over the tokens.
        position: `sincos2d` (fixed), or `learned`, starting from N(0, 1/D).
        checkpoint: recompute every block in the backward pass.
        drop_path_rate: share of images that skip the last block's branches in training; earlier blocks skip less.

    Raises:
        MetaTTTError: sizes that do not fit. Images of another size are timm's to refuse.
    """

    def __init__(
        self,
        layer: Callable[[], nn.Module],
        embed_dim: int,
        num_heads: int,
        depth: int = 12,
        mlp_ratio: float = 4.0,
        img_size: int = 224,
        patch_size: int = 16,
        in_chans: int = 3,
        num_classes: int = 1000,
        position: Literal["sincos2d", "learned"] = "sincos2d",
        checkpoint: bool = False,
        drop_path_rate: float = 0.0,
    ):
        check_choice("model.position", position, ("sincos2d", "learned"))
        sizes = {"embed_dim": embed_dim, "num_heads": num_heads, "depth": depth, "num_classes": num_classes}
        sizes |= {"img_size": img_size, "patch_size": patch_size, "in_chans": in_chans}
        for name, size in sizes.items():
            check_integer(f"model.{name}", size, least=0 if name == "num_classes" else 1)
        check_number("model.mlp_ratio", mlp_ratio, above=0)
        check_number("model.drop_path_rate", drop_path_rate, least=0, below=1)
        check_function("layer", layer)
        if img_size % patch_size:
            raise MetaTTTError(
                f"model.patch_size={patch_size} does not divide model.img_size={img_size}: choose from "
                f"{divisors(img_size)}"
            )
        if position == "sincos2d" and embed_dim % 4:
            raise MetaTTTError(
                f"model.position=sincos2d needs a width that is a multiple of 4, not {embed_dim}: set position=learned"
            )
        check_blocks("model.depth", depth, int((2 * mlp_ratio + 1) * embed_dim**2))
        super().__init__(
            img_size=img_size, patch_size=patch_size, in_chans=in_chans, num_classes=num_classes, embed_dim=embed_dim,
            depth=depth, num_heads=num_heads, mlp_ratio=mlp_ratio, class_token=False, global_pool="avg", fc_norm=False,
            act_layer="gelu_tanh", norm_layer=partial(nn.LayerNorm, eps=EPS), attn_layer=SequenceLayer,
            pos_embed="learn" if position == "learned" else "none", weight_init="skip", drop_path_rate=drop_path_rate,
        )  # fmt: skip
        self.in_chans = in_chans  # (timm 1.0.28 and older do not keep it)
        for block in self.blocks:
            block.attn.layer = layer()  # type: ignore[union-attr]
        self.reset_classifier(num_classes)
        if position == "learned":
            nn.init.normal_(self.get_parameter("pos_embed"), std=1 / math.sqrt(embed_dim))
        _initialize(self)
        self.set_grad_checkpointing(checkpoint)

    def evaluated_with(self, architecture: str, crop_pct: float, interpolation: str) -> None:
        """Tells timm how a picture becomes an image for this model (`timm.data.resolve_model_data_config`)."""
        centre = (0.5,) * self.in_chans
        about: dict[str, Any] = {
            "input_size": (self.in_chans, *self.patch_embed.img_size), "num_classes": self.num_classes,
            "mean": centre, "std": centre, "crop_pct": crop_pct, "interpolation": interpolation,
            "first_conv": "patch_embed.proj", "classifier": "head.logits", "architecture": architecture,
        }  # fmt: skip
        self.__dict__.update(pretrained_cfg=about, default_cfg=about)

    def set_input_size(self, img_size: Any = None, patch_size: Any = None) -> None:
        """As timm's; convolutions and rotations over the map of tokens take its width."""
        super().set_input_size(img_size, patch_size)
        for part in self.modules():
            if isinstance(part, Depthwise):
                part.columns = self.patch_embed.grid_size[1]
            elif isinstance(part, Reconstruction):
                part.rope_columns = self.patch_embed.grid_size[1]

    def _pos_embed(self, x: Tensor) -> Tensor:
        if self.pos_embed is not None:
            return super()._pos_embed(x)
        height, width = self.patch_embed.grid_size  # computed, not kept: a buffer has no values after `to_empty`
        # in this order the sum is contiguous: x is not, and every norm would copy what has its strides
        return sincos2d(height, width, self.embed_dim, x.device).to(self.patch_embed.proj.weight.dtype) + x

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """A new head: a tanh layer, then logits that start at zero. Fewer than one class: features only."""
        super().reset_classifier(0, global_pool)
        self.num_classes = num_classes
        if num_classes < 1:
            return
        like = {"device": self.patch_embed.proj.weight.device, "dtype": self.patch_embed.proj.weight.dtype}
        pre_logits = nn.Linear(self.embed_dim, self.embed_dim, **like)
        logits = nn.Linear(self.embed_dim, num_classes, **like)
        head = nn.Sequential(OrderedDict[str, nn.Module](pre_logits=pre_logits, tanh=nn.Tanh(), logits=logits))
        _initialize(head)
        for parameter in logits.parameters():
            nn.init.zeros_(parameter)
        self.head = head.train(self.training)  # type: ignore[assignment]

    def no_weight_decay(self) -> set[str]:
        """Names of the position table and of what the layers hold besides kernels: biases and norms per head, gates."""
        maps = (name for name, module in self.named_modules() if isinstance(module, (nn.Linear, nn.Conv2d)))
        kernels = {f"{name}.weight" for name in maps}
        others = ((name, parameter) for name, parameter in self.named_parameters() if name not in kernels)
        # One matrix per head is a kernel; one vector per head is a bias, a norm or a gate.
        return {name for name, parameter in others if parameter.ndim < 3 or name == "pos_embed"}

    def num_parameters(self) -> int:
        """Number of trained parameters without the position table, as the paper counts."""
        return sum(p.numel() for name, p in self.named_parameters() if p.requires_grad and name != "pos_embed")


def sincos2d(height: int, width: int, dim: int, device: torch.device | None = None) -> Tensor:
    """Fixed positions `[1, height · width, dim]` in fp32: sines and cosines of x, then of y (MoCo v3; arXiv
    2205.01580)."""
    frequency = 10000.0 ** -(torch.arange(dim // 4, dtype=torch.float32, device=device) / max(1, dim // 4 - 1))
    y, x = torch.meshgrid(torch.arange(height, device=device), torch.arange(width, device=device), indexing="ij")
    angles = [axis.reshape(-1, 1) * frequency for axis in (x, y)]
    return torch.cat([function(angle) for angle in angles for function in (torch.sin, torch.cos)], dim=1).unsqueeze(0)


def _initialize(model: nn.Module) -> None:
    """Linear maps Xavier uniform (also those of the layers), biases of the MLPs N(0, 1e-6²) and others zero, as
    published."""
    for name, module in model.named_modules():
        if name.endswith("logits") and not name.endswith("pre_logits"):
            continue
        if not isinstance(module, (nn.Linear, nn.Conv2d)) or module.weight is None or not module.weight.requires_grad:
            continue  # None is of a learner, whose values are in its `init`; what is frozen was trained before
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
        else:
            nn.init.trunc_normal_(module.weight, std=1 / math.sqrt(module.weight[0].numel()))
        if module.bias is not None:
            nn.init.normal_(module.bias, std=1e-6) if ".mlp." in name else nn.init.zeros_(module.bias)
