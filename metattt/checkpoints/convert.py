"""`metattt convert`: published checkpoints to ours and back. Tensors keep their types and values, bit for bit."""

from __future__ import annotations

import json

from omegaconf import DictConfig
from torch import Tensor

from metattt.checkpoints.files import SAFETENSORS, check_new
from metattt.checkpoints.folder import TOKENIZER, new_folder, write_model
from metattt.checkpoints.record import PUBLISHED_CONFIG, make_record, modules
from metattt.checkpoints.tensors import write_tensors
from metattt.checkpoints.trained import Weights, check_numbers, read_weights
from metattt.composition.settings import settings
from metattt.errors import MetaTTTError
from metattt.io import digest, write_whole
from metattt.models.published import from_ours, to_ours, with_clipped_steps
from metattt.models.published_config import PublishedConfig, build_empty


def convert(cfg: DictConfig) -> None:
    """Reads one checkpoint and writes the other, then says what it wrote.

    Raises:
        MetaTTTError: a file that cannot be read, names, shapes or values that do not fit, or a target that exists.
    """
    usage = "is given: metattt convert source=<folder or file> target=<new folder>"
    chosen = settings(cfg, source=f"no source {usage}", target=f"no target {usage}")
    target = check_new(chosen.target)
    found = read_weights(chosen.source, modules(chosen.trust))
    file, side = found.about.path, found.side
    if side == "ours" and not chosen.direction.startswith("to_"):
        raise MetaTTTError(f"{file} is already a MetaTTT checkpoint: set direction=to_published or direction=to_jax")
    if side != "ours" and chosen.direction not in ("auto", f"from_{side}"):
        raise MetaTTTError(f"{file} has the names of direction=from_{side}, not of direction={chosen.direction}")
    check_numbers(found.tensors.items(), file)
    tokenizer = None if found.about.tokenizer == "bytes" else found.about.tokenizer  # bytes need no file
    if side == "ours":
        tensors, text = _published(found, chosen.direction == "to_jax")
        beside = {PUBLISHED_CONFIG: text} | ({} if tokenizer is None else {TOKENIZER: tokenizer})
        with new_folder(target) as folder:
            for name, one in beside.items():
                write_whole(folder / name, one.encode())
            checksums = {name: digest(one.encode()) for name, one in beside.items()}
            write_tensors(folder / SAFETENSORS, tensors, json.dumps(checksums))
    else:
        tensors = found.tensors
        write_model(target, make_record(found.about.config), tensors, tokenizer)
    count = sum(tensor.numel() for tensor in tensors.values())
    print(f"{target}  {len(tensors)} tensors, {count:,} parameters")


def _published(found: Weights, jax: bool) -> tuple[dict[str, Tensor], str]:
    """Tensors and configuration of a checkpoint of ours, as a release of the published models has them."""
    model = build_empty(found.about.config)
    config = PublishedConfig.of(model)
    keys = config.jax() if jax else config.published()
    ours = with_clipped_steps(to_ours(found.tensors, model, "ours"), model)
    tensors = from_ours(ours, "jax" if jax else "published")
    return tensors, json.dumps(keys, indent=2) + "\n"
