"""`metattt convert`: published checkpoints to ours and back. Tensors keep their types and values, bit for bit."""

from __future__ import annotations

import json

from omegaconf import DictConfig, OmegaConf

from metattt.checkpoints.files import SAFETENSORS, check_new
from metattt.checkpoints.folder import TOKENIZER, new_folder, write_model
from metattt.checkpoints.record import PUBLISHED_CONFIG, make_record, modules
from metattt.checkpoints.tensors import write_tensors
from metattt.checkpoints.trained import check_shapes, read_weights
from metattt.errors import MetaTTTError, check_choice
from metattt.io import write_whole
from metattt.models.published import from_ours, own_tensors
from metattt.models.published_config import PublishedConfig, build_empty

DIRECTIONS = ("auto", "from_published", "to_published")


def convert(cfg: DictConfig) -> None:
    """Reads one checkpoint and writes the other, then says what it wrote.

    Args:
        cfg: the configuration of the job `convert`.

    Raises:
        MetaTTTError: a file that cannot be read, names or shapes that do not fit, or a target that exists.
    """
    for key in ("source", "target"):
        if OmegaConf.is_missing(cfg, key) or not isinstance(cfg[key], str):
            raise MetaTTTError(f"no {key} is given: metattt convert source=<folder or file> target=<new folder>")
    check_choice("direction", cfg.direction, DIRECTIONS)
    target = check_new(cfg.target)
    found = read_weights(cfg.source, modules(cfg.trust))
    ours = not found.published
    if ours != (cfg.direction == "to_published"):
        advice = "set direction=to_published" if ours else "leave out direction="
        raise MetaTTTError(f"{found.about.path} has {'our' if ours else 'published'} names: {advice}")
    tokenizer = None if found.about.tokenizer == "bytes" else found.about.tokenizer  # bytes need no file
    tensors = found.tensors
    if ours:
        check_shapes(found, f"{found.about.path} does not fit the model of its own configuration")
        model = build_empty(found.about.config)
        text = json.dumps(PublishedConfig.of(model).published(), indent=2) + "\n"
        tensors = from_ours({name: tensors[name] for name in own_tensors(model)}, model)
        with new_folder(target) as folder:
            for name, one in {PUBLISHED_CONFIG: text, TOKENIZER: tokenizer}.items():
                if one is not None:
                    write_whole(folder / name, one.encode())
            write_tensors(folder / SAFETENSORS, tensors)
    else:
        write_model(target, make_record(found.about.config), tensors, tokenizer)
    count = sum(tensor.numel() for tensor in tensors.values())
    print(f"{target}  {len(tensors)} tensors, {count:,} parameters")
