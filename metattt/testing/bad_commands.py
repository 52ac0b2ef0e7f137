"""Commands that are wrong, each in one way: what `metattt` must answer with a line and exit code 2.

A line stands for as many commands as its alternatives: `dim=<0|-8>` is `dim=0` and `dim=-8`. The words `@run`, `@text`
and so on are what `material` has made: a trained run, a folder of text, files that cannot be used.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

TRAIN = (
    "train dim=8 num_heads=2 model.num_layers=1 model.ffn_dim=8 data.path=@text data.context_length=16 data.batch_size=2 "
    "data.validation_max_bytes=200 trainer.max_steps=1 trainer.accelerator=cpu sample=false output_dir=@new"
)
"""A run of one step: what is wrong is added to it, and would train if nobody noticed."""

DIGITS = (
    "train experiment=digits_pixel dim=8 num_heads=2 model.depth=1 data.batch_size=4 trainer.max_steps=1 "
    "trainer.accelerator=cpu output_dir=@new"
)

GROUPS: dict[str, tuple[str, str]] = {  # name: what every command begins with, and the lines
    "words": (
        "",
        """
        trian
        train --dim=8
        train -x
        train -m dim=8,x
        train -m learner=mlp,lienar
        train -m learner=glob(nobody*)
        train -m output_dir=x
        train -m "seed=interval(0,1)"
        train -m hydra.sweep.dir=
        train -m hydra.sweep.dir=@file
        train -m hydra/<launcher|sweeper>=nobody
        train -m hydra.nobody=1
        train --multirun --cfg job
        train --multirun=3
        train --config-path=/tmp
        train --config-name=mine
        train --config-dir=@nowhere
        train --config-dir
        train --info=nobody
        train --resolve
        train --cfg=nobody
        train --cfg job --package nobody
        train --shell-completion install=nobody
        runs
        runs @nowhere
        runs @file
        runs @empty
        runs @run sort=nobody
        runs @run output_dir=@file
        train dim
        train =8
        train dim==8
        train "dim=(8"
        train "dim='8"
        train dim=8,16
        train learner=mlp,linear
        train "dim=range(1,3)"
        train hydra.run.dir=x
        train hydra/launcher=x
        train hydra.searchpath=@nowhere
        bench nobody
        bench layer lengths=[1]
        reproduce table1 size=cpu
        check check
        eval generate
        """,
    ),
    "empty values": (
        "",
        """
        train <resume|init_from|data.path|output_dir|dim|seed|name|trainer.max_steps|learner|layer|preset|experiment|optimizer.read>=
        train <resume|data.path|output_dir|init_from>=''
        train "<resume|data.path>='  '"
        train data.path=[]
        train "data.path=['']"
        eval <checkpoint|data.path|output_dir|tokenizer|split>=
        eval checkpoint=@run <data.path|output_dir|tokenizer|split>=
        generate <checkpoint|tokenizer>=
        generate checkpoint=@run <tokenizer|device|max_new_tokens>=
        convert source= target=@new
        convert source=@run target=
        prepare <source|target|tokenizer|text_key>=
        prepare target=@new <source|tokenizer|text_key>=
        bench layer=
        """,
    ),
    "unknown keys": (
        TRAIN,
        """
        anything=1
        +anything=1
        ++anything=1
        +anything.at.all=1
        anything.at.all=1
        +trainer.anything=1
        trainer.anything=1
        +data.anything=1
        +learner.anything=1
        +learner.bais=false
        learner.bais=false
        +task.anything=1
        +optimizer.anything=1
        +layer.anything=1
        +model.anything=1
        +training.anything=1
        +callbacks.anything=1
        +callbacks.anything._target_=nobody.Class
        +callbacks.progress.anything=1
        +logger.csv.anything=1
        +dim.anything=1
        +seed=[0]
        given=[a]
        model.layer=mlp
        layer.learner=mlp
        trainer.callbacks=[]
        ~anything
        ~<model|data|training|trainer|layer|task|learner|optimizer>
        ~<seed|dim|num_heads|compile|output_dir|resume|init_from|batch_tokens|sample|given>
        ~learner.bias
        ~<callbacks|logger>.anything
        <learner|task|optimizer|layer|model|data|training|trainer|callbacks|logger|preset|experiment|recipe>=nobody
        <learner|task|optimizer|layer|model|data|training|trainer>=null
        <learner|optimizer>=[a,b]
        <learner|task|optimizer>=custom
        learner=3
        """,
    ),
    "keys of the run": (
        TRAIN,
        """
        dim=<0|-8|7|abc|1.5|null|[8]|true|1000000000|100000000000000000000>
        num_heads=<0|-2|3|abc|null|1.5|1000000>
        seed=<-1|4294967296|1.5|abc|[0]|true|null>
        <compile|sample>=<maybe|2|[true]>
        batch_tokens=<0|-16|17|abc|1.5|16000000000000000>
        output_dir=<@file|@file/below|/proc/nobody|/dev/null/x>
        name=<a/b|../up|..>
        <resume|init_from>=<@nowhere|@text|@file|@junk|true>
        "dim=${nobody}"
        "dim=${dim}"
        "dim=${oc.env:NOBODY_HAS_SET_THIS}"
        "dim=${oc.decode:}"
        "dim=${"
        """,
    ),
    "model": (
        TRAIN,
        """
        model.num_layers=<0|-1|1.5|abc|null|1000000000>
        model.ffn_dim=<0|-1|abc|1000000000000>
        model.vocab_size=<0|5|-1|abc|1000000000000>
        model.conv_width=<0|-1|abc|1000000000000>
        model.norm_eps=<-1|nan|inf|abc|0>
        model.<pre_conv|tie_embeddings|checkpoint_blocks|causal>=maybe
        model.causal=false
        model._target_=<nobody.Class|builtins.dict|metattt.nobody>
        model=vision_transformer
        layer.form=<nobody|3>
        layer.form=fused learner=convolution
        layer.group_size=<-1|1.5|abc>
        layer.<output_norm|gate|output_bias>=maybe
        layer._target_=nobody.Class
        layer=titans_mag layer.how=<nobody|null|3>
        layer=titans_mag layer.<shared|head_norm|head_scale>=<true|maybe>
        layer=titans_mag layer.first.learner.window=<0|-1|abc>
        layer=titans_mag layer.second.num_heads=<0|3>
        layer=titans_mag layer.<gate|form>=auto
        layer=lact_block layer.shared=false
        model.blocks=<[]|nobody|[nobody]|3|true|linear*0|attention*99999999|[attention,null]|[attention,attention]>
        model.blocks=[attention] layer=attention
        model.blocks=[attention] optimizer.mini_batch_size=4
        model.blocks=[attention] model.blocks.attention.<dim|num_heads|learner.nobody|layer.nobody|model.vocab_size>=3
        model.blocks=[attention] model.blocks.<nobody|1|-1>.num_heads=1
        model.blocks.attention.num_heads=1
        """,
    ),
    "learners": (
        f"{TRAIN} layer=custom",
        """
        learner=mlp learner.depth=<0|-1|1.5|1000000000>
        learner=mlp learner.expansion=<0|-1|nan|inf|abc|1e12>
        learner=mlp learner.activation=<nobody|null|3>
        learner=mlp learner.init=nobody
        learner.<bias|residual|norm|learn_init>=maybe
        learner=swiglu learner.expansion=<0|-1|nan|inf|1e12>
        learner=convolution learner.width=<0|-1|1000000000000>
        learner=convolution learner.channels=<0|-1|1000000000000>
        learner=convolution learner.over=nobody
        learner=transformer optimizer.read=previous learner.num_heads=<0|3|-1>
        learner=transformer optimizer.read=previous learner.expansion=<0|-1|nan|inf|1e12>
        learner=kernel_estimator
        learner=kernel_estimator optimizer=append learner.bandwidth=<0|-1|nan|inf>
        learner=kernel_estimator optimizer=append learner.neighbours=<0|-1>
        learner=kernel_estimator optimizer=append learner.kernel=nobody
        learner=kernel_estimator optimizer=append learner.window=<0|-1|1.5|abc>
        learner=kernel_estimator optimizer=append learner.sinks=<1|-1|null>
        learner=kernel_estimator optimizer=append learner.window=4 learner.sinks=1000000000000
        learner=kernel_ridge optimizer=append learner.ridge=<0|-1|nan|inf>
        learner=kernel_ridge optimizer=append learner.bandwidth=<0|-1|nan|inf>
        learner=kernel_ridge optimizer=append optimizer.decay=per_head
        learner=kernel_estimator optimizer=append optimizer.write=<shared|nobody>
        learner=recurrent_ridge optimizer=append learner.iterations=<0|-1|1000000000000>
        learner=recurrent_ridge optimizer=append learner.tolerance=<1|-1|nan|inf>
        learner=recurrent_ridge optimizer=append learner.ridge=<0|0.25|-1|nan|inf>
        learner=recurrent_ridge optimizer=append learner.ridge_floor=<1|-1|nan|inf>
        learner=recurrent_ridge optimizer=append learner.solver=nobody
        learner=recurrent_ridge optimizer=append learner.chunk=<0|-1|1.5>
        learner=recurrent_ridge optimizer=append optimizer.levels=3
        learner=recurrent_ridge optimizer=append optimizer.write=step
        learner=recurrent_ridge optimizer=append optimizer.decay=per_head optimizer.decay_init=<0|1|nan>
        learner=log_linear optimizer=append optimizer.levels=<1|-1|64|1.5>
        learner=log_linear optimizer=append learner.update=nobody
        learner=log_linear optimizer=append learner.chunk=<0|-1>
        learner=global_estimator optimizer=append
        learner=global_estimator optimizer=append learner.bandwidth=<0|nan>
        learner=linear optimizer=append
        learner=module
        learner=module learner.module._target_=nobody.Class
        learner=module learner.module._target_=torch.nn.Linear
        learner=module learner.module._target_=torch.nn.Linear learner.module._args_=[3,3]
        learner=module learner.module._target_=torch.nn.Linear learner.module._args_=[a,b]
        learner=module learner.module._target_=builtins.dict
        learner=nested_ttt
        learner=nested_ttt optimizer.read=previous learner.layer.num_heads=<0|3>
        learner=nested_ttt optimizer.read=previous learner.layer.optimizer.mini_batch_size=0
        learner=nested_ttt optimizer.read=previous learner.layer.anything=1
        """,
    ),
    "tasks": (
        f"{TRAIN} layer=custom",
        """
        task.<views|rope|feature_map|corruption|loss>=<nobody|null|3>
        task=ttt task.conv_width=<0|-1|abc|1000000000000>
        task.rope=full task.rope_theta=<0|-1|nan|inf>
        task.rope=full num_heads=8
        task.corruption=mask task.corruption_rate=<2|-1|nan>
        task.corruption=noise task.corruption_rate=<-1|nan|inf>
        task.corruption=noise task.seed=<-1|abc|99999999999999999999999999>
        task.loss=huber task.huber_delta=<0|-1|nan|inf>
        task.<normalize_qk|bias|qk_norm>=maybe
        task.kv_heads=<0|3|-1|1000000000000>
        task=ttt task.kv_heads=1
        task=lact task.rope_heads=<0|3|8|1000000000000>
        task=lact task.silu_v=maybe
        task=mttt task.decoder_norm=maybe
        """,
    ),
    "optimizers": (
        f"{TRAIN} layer=custom",
        """
        optimizer.mini_batch_size=<0|-1|1.5|abc>
        optimizer=ttt optimizer.mini_batch_size=1000000000000
        optimizer.<anchor|read|lr|lr_scale|token_steps>=<nobody|null>
        optimizer.read=<block|final>
        optimizer.steps=<0|-1|2|abc>
        optimizer.read=previous optimizer.steps=1000000000
        optimizer.base_lr=<nan|inf|abc>
        optimizer.lr=0.1
        optimizer.max_norm=<0|-1|nan|inf>
        optimizer.compute_chunk=<0|-1|abc>
        optimizer=momentum optimizer.momentum_init=<2|-1|nan>
        optimizer=momentum optimizer.decay=per_head optimizer.decay_init=<2|-1|nan>
        optimizer=momentum optimizer.momentum=none optimizer.nesterov=true
        optimizer=momentum optimizer.decay_to_init=true
        optimizer=momentum optimizer.gradient_at=decayed
        optimizer=block_momentum optimizer.read=inclusive
        optimizer=block_momentum optimizer.anchor=online
        optimizer=block_momentum optimizer.momentum_init=<2|nan>
        optimizer=block_momentum optimizer.newton_schulz=nobody
        optimizer=adam optimizer.beta1=<1.5|-1|nan>
        optimizer=adam optimizer.beta2=<1.5|-1|nan>
        optimizer=adam optimizer.eps=<-1|nan|inf>
        optimizer=whole
        optimizer=whole optimizer.sampling=nobody
        optimizer=append
        optimizer=adamw
        """,
    ),
    "text": (
        TRAIN,
        """
        data.context_length=<0|-1|1.5|abc|1000000000000>
        data.batch_size=<0|-1|abc|1000000000000>
        data.validation_fraction=<0|1|-1|2|nan|abc>
        data.validation_max_bytes=<0|-1|abc>
        data.max_bytes=<0|-1|10>
        data.num_workers=<-1|abc|1000000>
        data.document_reset=maybe
        data.seed=<-1|abc>
        data.path=<@nowhere|@empty|@picture|@damaged|[@text,@nowhere]|@nothing>
        data.path=@lines data.text_key=nobody
        data=shards data.path=<@text|@nowhere|@shards>
        data=shards
        data=images
        data=digits
        """,
    ),
    "images": (
        DIGITS,
        """
        data.img_size=<0|-8|9|abc>
        data.batch_size=<0|-1|1000000000000>
        training.mixup=0.2 data.batch_size=3
        data.validation_fraction=<0|1|-1|nan>
        model.depth=<0|-1|1000000000>
        model.img_size=<0|16|-8>
        model.patch_size=<0|3|-1>
        model.mlp_ratio=<0|-1|nan|inf>
        model.num_classes=<0|3|-1>
        model.in_chans=<0|3>
        model.position=nobody
        training.lr=<0|-1|nan>
        training.warmup_steps=<-1|abc>
        training.weight_decay=<-1|nan>
        training.mixup=<-1|nan>
        training.optimizer=nobody
        training=adamw
        batch_tokens=16
        optimizer.steps=0
        optimizer.sampling=nobody
        data=images data.path=@text
        """,
    ),
    "recipe": (
        TRAIN,
        """
        training.lr=<0|-1|nan|inf|abc>
        training.betas=<[0.9]|[0.9,0.95,0.99]|[1,0.9]|[-1,0.9]|[0.9,nan]|abc|[a,b]|[]>
        training.eps=<-1|nan|inf|abc>
        training.weight_decay=<-0.1|nan|inf|abc>
        training.warmup_fraction=<-1|2|nan|abc>
        training.min_lr=<-1|nan|inf>
        training=timm
        training=zeroth_order training.epsilon=<0|-1|nan|inf>
        training=zeroth_order training.directions=<0|-1|1000000000>
        training=zeroth_order training.seed=<-1|abc>
        """,
    ),
    "trainer": (
        TRAIN,
        """
        trainer.max_steps=<0|-5|abc|1.5|-1>
        trainer.max_epochs=<0|-5|abc>
        trainer.accumulate_grad_batches=<0|-1|abc|1.5>
        trainer.val_check_interval=<0|-1|0.0|-0.5|2.5|nan|abc>
        trainer.log_every_n_steps=<-1|abc>
        trainer.gradient_clip_val=<-1|nan|abc>
        trainer.precision=<nobody|7>
        trainer.accelerator=<nobody|5|null>
        trainer.devices=<0|-2|abc|[7]|1.5>
        trainer.strategy=<nobody|5>
        trainer.num_nodes=<0|-1|abc>
        trainer.overfit_batches=1
        trainer.limit_val_batches=<-1|abc|0>
        trainer.limit_train_batches=<-1|abc|0>
        trainer.fast_dev_run=<-1|abc>
        trainer.num_sanity_val_steps=<-2|abc>
        trainer.gradient_clip_algorithm=nobody
        trainer.max_time=abc
        trainer.profiler=nobody
        trainer.detect_anomaly=maybe
        trainer.check_val_every_n_epoch=0
        trainer.barebones=true
        trainer._target_=<nobody.Class|builtins.dict>
        """,
    ),
    "callbacks": (
        TRAIN,
        """
        callbacks.checkpoint.every_steps=<0|-1|abc>
        callbacks.checkpoint.anything=1
        callbacks.interrupt=null
        callbacks.step_statistics.peak_tflops=<0|-1|nan|abc>
        callbacks.progress.lines=<0|-1|abc>
        callbacks.progress.refresh_rate=<-1|abc>
        callbacks.loss_curve.every=<0|-1|abc>
        callbacks.loss_curve.path=/proc/nobody/curve.png
        callbacks.inner_loss.every=<-1|abc>
        callbacks.inner_loss.every=1 callbacks.inner_loss.windows=<0|-1>
        callbacks=inner_warmup callbacks.inner_warmup.start=<0|-1|nan|inf>
        callbacks=inner_warmup optimizer.base_lr=0
        logger.nobody=null
        logger=[csv,nobody]
        logger.csv.save_dir=/proc/nobody
        logger.csv.flush_logs_every_n_steps=<0|-1>
        """,
    ),
    "eval": (
        "eval",
        """
        checkpoint=<@nowhere|@text|@file|@junk|[]|[@nowhere]|5|[5]>
        anything=1
        """,
    ),
    "eval of a run": (
        "eval checkpoint=@run device=cpu",
        """
        split=<nobody|null|3>
        device=<nobody|cuda:99|null>
        segment=<0|-1|abc|1.5>
        bins=nobody
        num_bins=<0|-1|abc>
        inner_loss=maybe
        inner_loss=true inner_loss_windows=<0|-1>
        labels=<[a,b]|[]|a>
        tokenizer=<@nowhere|@file>
        output_dir=<@file|/proc/nobody>
        data.path=<@nowhere|@empty|@picture>
        data.context_length=<0|-1|abc|1000000000000>
        data.batch_size=<0|-1|abc>
        data.validation_max_bytes=<0|-1>
        data.validation_max_tokens=5
        data.anything=1
        +data.anything=1
        +anything=1
        ~split
        ~data
        checkpoint=[@run,@run] labels=[a,a]
        tasks=[nobody] task_path=<@nowhere|@file>
        tasks=<3|[3]|[[a]]>
        tasks=[nobody] data.context_length=8
        """,
    ),
    "generate": (
        "generate",
        """
        checkpoint=<@nowhere|@text|@file|@junk|[]|5>
        prompt=a
        """,
    ),
    "generate from a run": (
        "generate checkpoint=@run device=cpu prompt=a",
        """
        max_new_tokens=<-1|1000000000000|abc|1.5|null>
        temperature=<-1|nan|inf|abc|null>
        top_k=<0|-1|abc|1.5>
        top_p=<0|-1|2|nan|abc>
        "stop=<abc|['']|[[a]]>"
        seed=<-1|abc|1.5>
        tokenizer=<@nowhere|@file>
        device=<nobody|cuda:99>
        +anything=1
        ~prompt
        """,
    ),
    "convert": (
        "convert",
        """
        target=@new
        source=@run
        source=<@nowhere|@text|@file|@junk> target=@new
        source=[@run] target=@new
        source=@run target=@new
        source=@run target=@text direction=to_published
        source=@run target=/proc/nobody direction=to_published
        source=@run target=@file/below direction=to_published
        source=@run target=@new direction=<nobody|from_published|from_jax|null>
        source=@run target=@new direction=to_published +anything=1
        """,
    ),
    "export": (
        "export",
        """
        target=@new
        source=@run
        source=<@nowhere|@text|@file|@junk> target=@new
        source=[@run] target=@new
        source=@run target=@text
        source=@run target=/proc/nobody
        source=@run target=@file/below
        source=@run target=@new dtype=<int8|float64|3>
        source=@run target=@new tokenizer=<@nowhere|@file>
        source=@run target=@new push_to_hub=<nobody|a/b/c|3>
        source=@run target=@new private=maybe
        source=@run target=@new +anything=1
        """,
    ),
    "prepare": (
        "prepare source=@text",
        """
        target=<@file|/proc/nobody|@text|@file/below>
        target=@new validation_fraction=<-1|1|nan|abc>
        target=@new workers=<0|-1|abc|1000000>
        target=@new seed=<-1|abc>
        target=@new tokenizer=<@nowhere|@file|@damaged>
        target=@new source=<@nowhere|@picture|@empty|[]>
        target=@new +anything=1
        target=@new dataset_split=[a]
        """,
    ),
    "layers": (
        "layers",
        """
        dim=<0|-1|7|abc|null|1000000000>
        num_heads=<0|-1|3|abc|1.5>
        family=<nothing|3>
        output=<@file|@text|/proc/nobody/a.md|@file/below.md>
        layer=<nobody|3>
        layer=delta_net family=3
        layer=delta_net output=a.md
        layer=delta_net optimizer.momentum=0.5
        learner=kernel_estimator
        +anything=1
        ~dim
        """,
    ),
    "check": (
        "check",
        """
        dim=<0|-1|7|abc|1000000000>
        num_heads=<0|3>
        seed=-1
        learner=nobody
        learner=mlp learner.depth=0
        learner=kernel_estimator
        layer.form=nobody
        +anything=1
        """,
    ),
    "bench": (
        "bench",
        """
        <length|batch|rounds|threads>=<0|-1|abc|1.5|1000000000000>
        seed=<-1|abc>
        device=<nobody|cuda:99>
        dim=<0|7|abc>
        layer.form=nobody
        learner=nobody
        +anything=1
        """,
    ),
}


def commands(group: str) -> Iterator[list[str]]:
    """The commands of a group, as lists of words; `@` words are not replaced yet."""
    begin, lines = GROUPS[group]
    for line in filter(None, map(str.strip, lines.splitlines())):
        for one in _alternatives(line):
            yield [*shlex.split(begin), *shlex.split(one)]


def _alternatives(line: str) -> Iterator[str]:
    """`a=<1|2>` to `a=1` and `a=2`."""
    pieces = re.split(r"<([^<>]*\|[^<>]*)>", line)
    choices = [piece.split("|") if i % 2 else [piece] for i, piece in enumerate(pieces)]
    yield from map("".join, itertools.product(*choices))


def material(folder: Path) -> dict[str, str]:
    """Makes, in an empty folder, what the commands name with `@`: name -> path. Training the run takes seconds.

    `@new` and `@nowhere` are paths where nothing is.
    """
    from metattt.cli import main

    paths = {name: folder / name for name in ("text", "file", "empty", "run", "junk", "nothing", "new", "nowhere")}
    paths |= {"picture": folder / "picture.png", "damaged": folder / "damaged.jsonl", "lines": folder / "lines.jsonl"}
    paths |= {"shards": folder / "shards"}
    for name in ("text", "empty", "nothing", "shards"):
        paths[name].mkdir()
    (paths["empty"] / "a.txt").write_text("")
    for name in "abcdefgh":
        (paths["text"] / f"{name}.txt").write_text(f"{name} is a letter of the alphabet. " * 20)
    paths["file"].write_text("")
    paths["junk"].mkdir()
    (paths["junk"] / "pytorch_model.bin").write_bytes(bytes(range(256)) * 4)
    paths["picture"].write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(64))
    paths["damaged"].write_text('{"text": "a"}\n{"text": \n')
    paths["lines"].write_text("".join(json.dumps({"text": f"line {i} of many"}) + "\n" for i in range(100)))
    (paths["shards"] / "manifest.json").write_text("[]")
    found = {name: str(path) for name, path in paths.items()}
    words = filled(shlex.split(TRAIN), found | {"new": found["run"]})
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as errors:
        code = main(words)
    if code:
        raise RuntimeError(f"the run that the commands are tried on cannot be trained: {errors.getvalue()}")
    return found


def filled(words: list[str], paths: dict[str, str]) -> list[str]:
    """Words with paths in the place of `@name`."""
    return [re.sub(r"@([a-z]+)", lambda found: paths[found[1]], word) for word in words]
