"""`block_style=<name>`: settings of what stands around a layer's rule, for every layer whose parts have them."""

from __future__ import annotations

from collections.abc import Sequence

from omegaconf import DictConfig

from metattt.errors import MetaTTTError

KEY = "block_style"


def apply_block_style(cfg: DictConfig, overrides: Sequence[str], name: str) -> None:
    """Sets what `cfg.block_style` says, a mapping of parts to keys and values, in the parts that have such a key.

    Args:
        cfg: of a job, changed in place.
        overrides: that it was composed of; a key that one of them sets stays as it is.
        name: of the block style.

    Raises:
        MetaTTTError: a block style that is no such mapping, or of which the layer has nothing.
    """
    style = cfg.get(KEY)
    if not isinstance(style, DictConfig) or not style:
        return
    given = [override.partition("=")[0].lstrip("+~") for override in overrides]
    known = 0
    for part, settings in ((str(part), settings) for part, settings in style.items()):
        if not isinstance(settings, DictConfig):
            raise MetaTTTError(f"block_style={name} gives {part} no keys: it must be a mapping such as `{part}: {{gate: false}}`")
        node = cfg.get(part)
        for key, value in settings.items() if isinstance(node, DictConfig) else ():
            if key not in node.keys():  # noqa: SIM118 (a key whose value is null is not `in` a node)
                continue
            known += 1
            if f"{part}.{key!s}" not in given:
                node[key] = value
    if not known:
        raise MetaTTTError(
            f"block_style={name} sets nothing of this layer, which is published as a whole: leave it out, or choose another layer"
        )
