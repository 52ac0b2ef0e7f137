"""Layers attached to a pretrained model of Transformers, trained by the loop of `metattt train`.

    python examples/attach_lightning.py <model or its folder> <run folder> <texts>

The model stays as it is; the new layers alone are trained and written. Ctrl-C writes a checkpoint, and the same command
resumes. The run folder gets a log, checkpoints and the layers (`metattt.adaptation.attach.load_attached`).
"""

import sys
from pathlib import Path

import lightning
from omegaconf import OmegaConf
from transformers import AutoModelForCausalLM

from metattt.adaptation.attach import Attached, attach
from metattt.checkpoints import files, record, rolling
from metattt.data.text import TextData
from metattt.data.tokenizers import load_tokenizer
from metattt.training import csv_log, divergence, job, recipes, saving, signals, tuning_module


def main(name: str, folder: Path, data: TextData, tokenizer: str, steps: int = 1000, every: int = 100) -> Attached:
    lightning.seed_everything(0, verbose=False)
    layers = attach(AutoModelForCausalLM.from_pretrained(name), "model.layers.*.self_attn", layer="ttt_linear")
    layers.model.train().requires_grad_(False)
    for parameter in layers.parameters():
        parameter.requires_grad_()

    data.read_as(load_tokenizer(tokenizer))
    about = record.make_record(OmegaConf.create({"pretrained": name}))
    module = tuning_module.PartTuning(layers.model, recipes.AdamW(lr=1e-3), about)
    checkpoint = files.find_checkpoint(folder, fall_back=True) if rolling.steps(folder) else None
    log = csv_log.CSVLog(str(folder / "metrics.csv"))
    log.go_on_from(rolling.step_of(checkpoint) or 0 if checkpoint else 0)
    trainer = lightning.Trainer(
        max_steps=steps, max_epochs=-1, val_check_interval=min(steps, 200), gradient_clip_val=1.0, logger=log,
        callbacks=[saving.Checkpoints(str(folder), every), divergence.Divergence()], num_sanity_val_steps=0,
        log_every_n_steps=min(every, 50), enable_checkpointing=False, use_distributed_sampler=False,  # Lightning's own
    )  # fmt: skip
    trainer.strategy.checkpoint_io = saving.CheckpointFiles()
    batches = job.ForLightning(data)
    trainer.fit(module, datamodule=batches, ckpt_path=checkpoint, weights_only=True if checkpoint else None)
    layers.save(folder / "layers.safetensors")
    return layers


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    try:
        main(sys.argv[1], Path(sys.argv[2]), TextData(sys.argv[3]), sys.argv[1])
    except signals.Interrupted as stop:
        sys.exit(stop.exit_code)
