"""What people type in this field, and where it is set here: `lr` is `training.lr`. One table, read by the messages
alone."""

from collections.abc import Container

KEYS = {  # our key: other names for it; where a name stands twice, the first key counts that the command has
    "training.lr": "lr learning_rate max_lr peak_lr outer_lr",
    "optimizer.base_lr": "inner_lr base_lr eta ttt_lr ttt_base_lr inner_learning_rate lr learning_rate",
    "trainer.max_steps": "training.steps training.max_steps steps max_steps num_steps n_steps total_steps train_steps "
    "iterations max_iters num_iterations epochs max_epochs",
    "optimizer.steps": "inner_steps num_inner_steps steps",
    "data.batch_size": "batch_size batch bs per_device_train_batch_size micro_batch_size",
    "optimizer.mini_batch_size": "mini_batch_size inner_batch_size chunk_size inner_chunk_size ttt_batch_size",
    "model.num_layers": "num_layers n_layers n_layer num_blocks n_blocks depth num_hidden_layers layers",
    "model.depth": "model.num_layers num_layers n_layers n_layer num_blocks n_blocks depth num_hidden_layers layers",
    "dim": "d_model n_embd embed_dim hidden_size hidden_dim width model_dim model.hidden_size",
    "num_heads": "heads n_heads n_head nheads num_attention_heads model.num_heads",
    "task.kv_heads": "num_kv_heads n_kv_heads num_key_value_heads kv_heads num_query_groups",
    "learner.window": "sliding_window window_size attention_window",
    "learner.sinks": "num_sinks sink_tokens attention_sinks num_sink_tokens",
    "model.vocab_size": "vocab_size n_vocab vocab",
    "model.ffn_dim": "ffn_dim d_ff intermediate_size mlp_dim",
    "data.context_length": "context_length seq_len sequence_length seq_length block_size context ctx_len max_seq_len "
    "max_length window",
    "data.path": "path data_path data_dir dataset corpus text file",
    "data.num_workers": "num_workers workers",
    "training.weight_decay": "weight_decay wd",
    "training.warmup_fraction": "warmup warmup_fraction warmup_ratio warmup_steps training.warmup_steps",
    "training.warmup_steps": "warmup warmup_steps training.warmup_fraction",
    "training.betas": "betas beta1 beta2",
    "trainer.gradient_clip_val": "clip grad_clip gradient_clip clip_grad max_grad_norm grad_norm gradient_clip_val",
    "trainer.accumulate_grad_batches": "accumulate grad_accum accumulation gradient_accumulation_steps "
    "accumulate_grad_batches",
    "trainer.accelerator": "device accelerator cuda gpu cpu",
    "trainer.devices": "devices gpus num_gpus n_gpus ngpus num_devices",
    "trainer.precision": "precision dtype amp bf16 fp16 mixed_precision",
    "trainer.val_check_interval": "eval_every eval_interval eval_steps val_every val_check_interval "
    "validation_interval",
    "trainer.log_every_n_steps": "log_every log_interval logging_steps",
    "output_dir": "out output out_dir save_dir run_dir log_dir logdir exp_dir folder results",
    "max_new_tokens": "max_tokens tokens num_tokens length max_length n_tokens",
    "temperature": "temp",
    "checkpoint": "ckpt ckpt_path checkpoint_path model model_path run path",
    "resume": "ckpt ckpt_path checkpoint resume_from resume_from_checkpoint",
    "init_from": "pretrained load load_from weights finetune",
    "target": "out output output_dir out_dir",
    "source": "path data input dataset data.path",
    "split": "data.split",
}

OF_THE_INNER_LOOP = {
    "training.lr": "optimizer.base_lr",
    "trainer.max_steps": "optimizer.steps",
    "data.batch_size": "optimizer.mini_batch_size",
}
"""Keys of the outer loop, with that of the inner loop which has the same name in papers."""

NOT_SET_THERE = {
    "model.layer": "layer=<name> chooses the layer of every block",
    **dict.fromkeys(("model.dim", "model.embed_dim", "layer.dim"), "dim=<value> sets it for the model and its layers"),
    "layer.num_heads": "num_heads=<value> sets it for the model and its layers",
    **{f"layer.{part}": f"{part}=<name> chooses it" for part in ("task", "learner", "optimizer")},
    "trainer.callbacks": "callbacks.<name>.<key>=<value> sets one, ~callbacks.<name> leaves it out",
    "trainer.logger": "logger=<name> chooses it, ~logger leaves it out",
    **dict.fromkeys(
        ("trainer.overfit_batches", "trainer.limit_train_batches"), "data.max_bytes=<few> (data=text) trains on little"
    ),
    "trainer.limit_val_batches": "data.validation_max_bytes=<few> (shards, stream: data.validation_max_tokens) "
    "validates on little text, data.validation_size=<few> on few sequences",
    "trainer.check_val_every_n_epoch": "trainer.val_check_interval=<steps> says how often a run validates",
}
"""Keys that a constructor has and a configuration must not set, with what to do instead."""

IN_FULL = {f"trainer.{key}": f"trainer.strategy.{key}" for key in ("time_ranks", "in_flight", "tensor_ranks")}
"""Keys that may be given without the node of the trainer that they stand in."""

OUTER_OPTIMIZERS = (
    "adamw", "adam8bit", "adafactor", "lamb", "lion", "nadam", "radam", "rmsprop", "sgd", "shampoo", "sophia", "soap",
)  # fmt: skip
"""What is chosen with `training`, never with `optimizer`."""


def alias(name: str, known: Container[str]) -> str | None:
    """The first key of the command that is meant by another name for it.

    Args:
        name: as it was typed, without its value.
        known: keys that the command has.
    """
    plain = name.lower().replace("-", "_")
    return next((key for key, names in KEYS.items() if plain in names.split() and key in known and key != name), None)
