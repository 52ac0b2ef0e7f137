"""Every training row of the TTT paper as `experiment=<group>/<row>`: the grid of methods, sizes and contexts (arXiv
2407.04620, Sec. 3).

The rows differ in three choices each, so they are made here instead of in files. A group's own file holds what its rows
share.
"""

from __future__ import annotations

from typing import Any

from hydra.core.config_store import ConfigStore

SIZES = {"125m": 4800, "350m": 13500, "760m": 29000, "1b": 50000}  # steps from scratch
CONTEXTS = {
    "pile_2k": 2048, "pile_8k": 8192,
    "books_1k": 1024, "books_2k": 2048, "books_4k": 4096, "books_8k": 8192, "books_16k": 16384, "books_32k": 32768,
}  # fmt: skip
METHODS = {  # row: layer, backbone
    "ttt_linear": ("ttt_linear", "mamba_backbone"),
    "ttt_mlp": ("ttt_mlp", "mamba_backbone"),
    "ttt_linear_transformer": ("ttt_linear", "transformer_backbone"),
    "ttt_mlp_transformer": ("ttt_mlp", "transformer_backbone"),
    "transformer": ("attention", "transformer_backbone"),
    "mamba2": ("mamba2", "mamba_backbone"),  # in the place of the paper's Mamba
}
FINETUNED = ("transformer", "ttt_linear", "ttt_mlp")  # from a model of 2k context
MINI_BATCH_SIZES = [2**i for i in range(12)]  # Figure 9


def row(group: str, method: str, size: str, finetune: bool = False) -> dict[str, Any]:
    """The configuration of one row."""
    layer, backbone = METHODS[method]
    defaults: list[Any] = [
        f"/experiment/{group}",
        {"override /layer": layer},
        {"override /model": backbone},
        {"override /preset": size},
    ]
    content: dict[str, Any] = {}
    if layer == "ttt_mlp":
        defaults.append({"override /callbacks": "inner_warmup"})
    if layer == "attention" and CONTEXTS[group] >= 4096:  # the paper says it of Books (App. C)
        content["task"] = {"rope_theta": 500000.0}
    if finetune:  # a fifth of the tokens more, with a schedule of their own
        lr = 1e-4 if size == "125m" else 1e-5
        content |= {"init_from": "", "training": {"lr": lr}, "trainer": {"max_steps": SIZES[size] // 5}}
    return {"defaults": [*defaults, "_self_"], **content}


def rows() -> dict[str, dict[str, Any]]:
    """`<group>/<row>` to its configuration."""
    found: dict[str, dict[str, Any]] = {}
    for group, context in CONTEXTS.items():
        for size in SIZES:
            found |= {f"{group}/{method}_{size}": row(group, method, size) for method in METHODS}
            if context > 2048:
                found |= {
                    f"{group}/{method}_finetune_{size}": row(group, method, size, finetune=True) for method in FINETUNED
                }
    for b in MINI_BATCH_SIZES:
        found[f"minibatch/{b}"] = {"defaults": ["/experiment/pile_2k", "_self_"], "optimizer": {"mini_batch_size": b}}
    return found


for name, content in rows().items():
    folder, _, leaf = name.partition("/")
    ConfigStore.instance().store(
        group=f"experiment/{folder}", name=leaf, node=content, package="_global_", provider="metattt"
    )
