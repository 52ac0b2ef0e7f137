"""Configurations of version 1, which named classes by dotted paths: what each was called when version 2 began.

The table is closed. A class that is moved later needs no line here: version 2 names it by group and name.
"""

from __future__ import annotations

from typing import Any

from metattt.checkpoints.naming import COMPONENT, COMPONENT_VERSION

NAMES = {
    "metattt.layer.TTTLayer": "layer=ttt_layer",
    "metattt.learners.adapter.ModuleLearner": "learner=module",
    "metattt.learners.convolution.Convolution": "learner=convolution",
    "metattt.learners.global_estimator.GlobalEstimator": "learner=global_estimator",
    "metattt.learners.kernel_estimator.KernelEstimator": "learner=kernel_estimator",
    "metattt.learners.kernel_ridge.KernelRidge": "learner=kernel_ridge",
    "metattt.learners.linear.Linear": "learner=linear",
    "metattt.learners.mlp.MLP": "learner=mlp",
    "metattt.learners.nested.NestedTTT": "learner=nested_ttt",
    "metattt.learners.swiglu.SwiGLU": "learner=swiglu",
    "metattt.learners.transformer.Transformer": "learner=transformer",
    "metattt.tasks.mttt.DecodedReconstruction": "task=mttt",
    "metattt.tasks.next_token.NextToken": "task=next_token",
    "metattt.tasks.reconstruction.Reconstruction": "task=reconstruction",
    "metattt.optimizers.append.Append": "optimizer=append",
    "metattt.optimizers.block.Adam": "optimizer=adam",
    "metattt.optimizers.block.BlockMomentum": "optimizer=block_momentum",
    "metattt.optimizers.block.Sign": "optimizer=sign",
    "metattt.optimizers.gradient_descent.GradientDescent": "optimizer=gradient_descent",
    "metattt.optimizers.momentum.Momentum": "optimizer=momentum",
    "metattt.optimizers.whole.WholeSequence": "optimizer=whole",
    "metattt.models.language_model.LanguageModel": "model=language_model",
    "metattt.models.vision.ImageTransformer": "model=vision_transformer",
    "metattt.data.digits.DigitsData": "data=digits",
    "metattt.data.images.ImageData": "data=images",
    "metattt.data.shards.ShardData": "data=shards",
    "metattt.data.text.TextData": "data=text",
    "metattt.training.image_module.TimmRecipe": "training=timm",
    "metattt.training.lightning_module.AdamW": "training=adamw",
    "metattt.training.zeroth_order.ZerothOrder": "training=zeroth_order",
    "metattt.training.callbacks.LossCurve": "callback=loss_curve",
    "metattt.training.callbacks.Progress": "callback=progress",
    "metattt.training.callbacks.StopOnInterrupt": "callback=stop_on_interrupt",
    "metattt.training.inner_loss_curves.InnerLossCurves": "callback=inner_loss_curves",
    "metattt.training.inner_loss_statistics.InnerLossStatistics": "callback=inner_loss_statistics",
    "metattt.training.inner_warmup.InnerWarmup": "callback=inner_warmup",
    "metattt.training.sharding.FullyShardedData": "strategy=fully_sharded",
    # the same classes by the package that exported them, as a user may have written them
    **{
        f"metattt.learners.{exported}": f"learner={name}"
        for exported, name in {
            "Convolution": "convolution", "KernelEstimator": "kernel_estimator", "KernelRidge": "kernel_ridge", "Linear": "linear",
            "MLP": "mlp", "ModuleLearner": "module", "NestedTTT": "nested_ttt", "SwiGLU": "swiglu", "Transformer": "transformer",
        }.items()
    },
    "metattt.tasks.NextToken": "task=next_token",
    "metattt.tasks.Reconstruction": "task=reconstruction",
    **{
        f"metattt.optimizers.{exported}": f"optimizer={name}"
        for exported, name in {
            "Adam": "adam", "Append": "append", "BlockMomentum": "block_momentum", "GradientDescent": "gradient_descent",
            "Momentum": "momentum", "Sign": "sign", "WholeSequence": "whole",
        }.items()
    },
    "metattt.TTTLayer": "layer=ttt_layer",
    "metattt.models.LanguageModel": "model=language_model",
    "metattt.data.TextData": "data=text",
}  # fmt: skip
"""Dotted path at version 1 -> the component."""


def from_version1(node: Any) -> Any:
    """A plain configuration of version 1 as version 2 writes it; classes that were not ours keep their dotted path."""
    if isinstance(node, list):
        return [from_version1(one) for one in node]
    if not isinstance(node, dict):
        return node
    renamed: dict[Any, Any] = {}
    for key, value in node.items():
        component = NAMES.get(value) if key == "_target_" and isinstance(value, str) else None
        renamed |= {key: from_version1(value)} if component is None else {COMPONENT: component, COMPONENT_VERSION: 1}
    return renamed
