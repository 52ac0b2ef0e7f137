"""Commands that are wrong, each in one way: what `metattt` must answer with one or two lines and exit code 2.

`dim=<0|-8>` is `dim=0` and `dim=-8`; words like `@run` and `@text` are what `every` makes: a trained run, a folder of
text, files that cannot be used. A line in brackets begins a group: its name, and what all of its commands begin with.
"""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from child import run

TRAIN = (
    "train dim=8 num_heads=2 model.num_layers=1 model.ffn_dim=8 data.path=@text data.context_length=16 "
    "data.batch_size=2 data.validation_max_bytes=200 trainer.max_steps=1 trainer.accelerator=cpu sample=false output_dir=@new"
)
"""A run of one step: what is wrong is added to it, and would train if nobody noticed."""

COMMANDS = """
[words]
<trian|train --dim=8|train -x|train dim|train =8|train dim==8|train "dim=(8"|train learner=mlp,linear|check check>
train <-m dim=8,x|-m learner=mlp,lienar|--config-dir=@nowhere|--config-name=mine|--info=nobody|--cfg=nobody>
<runs|runs @nowhere|runs @file|runs @empty|runs @run sort=nobody>
train <resume|init_from|data.path|output_dir|dim|seed|trainer.max_steps|learner|layer|preset|experiment>=
<eval checkpoint=|generate checkpoint=|eval checkpoint=@run data.path=|convert source=@run target=|prepare source=>
[keys] {train}
<|+|++><anything|anything.at.all|trainer.anything|callbacks.anything|seed.anything>=1
+<data|learner|task|optimizer|layer|model|training|callbacks.progress|logger.csv>.anything=1
~<anything|model|data|training|learner|dim|output_dir|learner.bias|callbacks.anything>
<learner|task|optimizer|layer|model|data|training|trainer|callbacks|logger|preset|experiment|recipe>=nobody
<learner|optimizer>=<[a,b]|null>
<layer|model|trainer>._target_=<nobody.Class|builtins.dict>
[the run] {train}
dim=<0|-8|7|abc|1.5|null|[8]|true|1000000000|"${{nobody}}"|"${{dim}}"|"${{oc.decode:}}"|"${{">
num_heads=<0|-2|3|abc|null|1.5|1000000>
seed=<-1|4294967296|1.5|abc|[0]>
batch_tokens=<0|-16|17|abc|1.5>
<output_dir=@file|output_dir=/proc/nobody|compile=maybe|sample=2>
<resume|init_from>=<@nowhere|@text|@file|@junk|true>
trainer.<max_steps|accumulate_grad_batches|num_nodes|devices>=<0|-5|abc|1.5>
trainer.<precision|accelerator|strategy>=nobody
trainer.<val_check_interval|gradient_clip_val>=<-1|abc>
callbacks.<checkpoint.every_steps|progress.lines>=<0|-1|abc>
training.<lr|eps|weight_decay|warmup_fraction|min_lr>=<-1|nan|abc>
training.betas=<[0.9]|[0.9,0.95,0.99]|[1,0.9]|[0.9,nan]|abc|[]>
[layers and models] {train} layer=custom
model.<num_layers|ffn_dim|vocab_size|conv_width>=<-1|abc|1000000000000>
model.norm_eps=<-1|nan|inf|abc>
layer.<form=nobody|group_size=-1|gate=maybe|form=fused learner=convolution>
learner=mlp learner.<depth|expansion>=<0|-1|abc|1e12>
learner=kernel_estimator optimizer=append learner.<bandwidth|neighbours|window>=<-1|nan|nobody>
learner=<kernel_estimator|module|nested_ttt|linear optimizer=append|transformer learner.num_heads=3>
learner=module learner.module._target_=<nobody.Class|torch.nn.Linear|builtins.dict>
task.<views|rope|feature_map|corruption|loss>=<nobody|3>
task.<kv_heads=3|corruption=mask task.corruption_rate=2|rope=full task.rope_theta=nan>
optimizer.<mini_batch_size|steps|compute_chunk>=<0|-1|abc>
optimizer.<anchor|read|lr|lr_scale|base_lr>=<nobody|nan>
optimizer=<append|adamw|momentum optimizer.momentum_init=2|adam optimizer.beta1=nan>
model.blocks=<[]|nobody|[nobody]|3|linear*0|attention*99999999|[attention,null]|[attention,attention]>
[data] {train}
data.<context_length|batch_size>=<0|-1|abc|1000000000000>
data.<validation_fraction|validation_max_bytes>=<-1|nan|abc>
data.path=<@nowhere|@empty|@picture|@damaged|[@text,@nowhere]|@nothing|[]>
data=<shards|images|digits|shards data.path=@text|shards data.path=@nowhere>
experiment=digits_pixel model.<depth|img_size|patch_size|mlp_ratio|num_classes|in_chans>=<0|-1>
[eval] eval checkpoint=@run device=cpu
checkpoint=<@nowhere|@text|@file|@junk|[]|[@nowhere]|5>
<split|device|bins>=<nobody|3>
<segment|num_bins|data.context_length|data.batch_size>=<0|-1|abc>
<labels=[a,b]|tokenizer=@nowhere|output_dir=@file|data.path=@empty|data.path=@picture|+anything=1|~split>
[generate] generate checkpoint=@run device=cpu prompt=a
<checkpoint=@junk|tokenizer=@file|device=cuda:99|+anything=1|~prompt|"stop=['']">
<max_new_tokens|temperature|top_k|top_p|seed>=<-1|abc>
[folders] <convert|export> source=@run
target=<@text|/proc/nobody|@file/below|@new source=@nowhere|@new source=@file|@new +anything=1>
[prepare] prepare source=@text
target=<@file|/proc/nobody|@text|@file/below|@new source=@empty|@new source=@picture|@new source=[]|@new +anything=1>
target=@new <validation_fraction|workers|seed>=<-1|abc>
[parts] <layers|check>
<dim|num_heads>=<0|-1|3|abc>
<layer=nobody|learner=nobody|+anything=1|learner=mlp learner.depth=0>
"""


def groups() -> Iterator[tuple[str, list[str]]]:
    """Group and words of every command; words with `@` stand for paths."""
    group, begin = "", ""
    for line in COMMANDS.format(train=TRAIN).strip().splitlines():
        if heading := re.fullmatch(r"\[([^\]=]+)\] ?(.*)", line):
            group, begin = heading.groups()
        else:
            yield from ((group, shlex.split(one)) for one in _alternatives(f"{begin} {line}"))


def _alternatives(line: str) -> Iterator[str]:
    """`a=<1|2>` to `a=1` and `a=2`."""
    pieces = re.split(r"<([^<>]*\|[^<>]*)>", line)
    yield from map("".join, itertools.product(*(one.split("|") if i % 2 else [one] for i, one in enumerate(pieces))))


def every(folder: Path) -> list[tuple[str, list[str]]]:
    """Group and words of every command, with what they name made in an empty folder. Training the run takes seconds."""
    files = {
        "text/a.txt": b"a letter of the alphabet. " * 40,
        "text/b.txt": b"another of the letters. " * 40,
        "file": b"",
    }
    files |= {"empty/a.txt": b"", "damaged": b'{"text": "a"}\n{"text": \n', "picture": b"\x89PNG\r\n\x1a\n" + bytes(64)}
    files |= {"junk/pytorch_model.bin": bytes(range(256)) * 4}
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    (folder / "nothing").mkdir()
    trained = run(_filled(shlex.split(TRAIN.replace("@new", "@run")), folder), [folder])
    if trained.kind != "result":
        raise RuntimeError(f"the run that the commands are tried on cannot be trained: {trained}")
    # each with an output folder of its own: one that is taken would have the next refused
    return [(group, _filled(words, folder, f"new-{number}")) for number, (group, words) in enumerate(groups())]


def _filled(words: list[str], folder: Path, new: str = "new") -> list[str]:
    """Words with paths in the place of `@name`."""
    return [
        re.sub(r"@([a-z]+)", lambda found: str(folder / (new if found[1] == "new" else found[1])), one) for one in words
    ]
