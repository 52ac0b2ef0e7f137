"""The README.md of an exported model: what it is, and how it is used."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from metattt.layer import TTTLayer
from metattt.optional import need

if TYPE_CHECKING:
    from metattt.hf.model import MetaTTTForCausalLM

CARD = "README.md"
TAGS = ("metattt", "test-time-training")

TEXT = """{header}
# {name}

A language model whose sequence layers learn while they read (test-time training), made with MetaTTT.

| | |
|---|---|
| parameters | {parameters:,} ({dtype}) |
| width | {dim} |
| vocabulary | {vocabulary:,} tokens |
{rows}

## Use it

`pip install 'metattt[hf]'`, and then:

```python
import metattt.hf  # makes the model known to Transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{name}")  # this folder, or its name on the Hub
model = AutoModelForCausalLM.from_pretrained("{name}")
inputs = tokenizer(["Once upon a time"], return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=100)[0], skip_special_tokens=True))
```

The tokenizer puts a separator before every text, as in training. Texts of different lengths are padded on the left.
"""


def model_card(made: MetaTTTForCausalLM, name: str, context: int | None = None) -> str:
    """The text of the card.

    Args:
        made: the model.
        name: of its folder.
        context: tokens of the windows that it was trained on; None: not known.
    """
    hub = need("huggingface_hub", extra="hf", what="metattt export")
    data = hub.ModelCardData(library_name="transformers", pipeline_tag="text-generation", tags=list(TAGS))
    layers = Counter(_described(block.layer) for block in made.model.blocks)
    rows = [f"| {count} block{'s' * (count > 1)} | {layer} |" for layer, count in layers.items()]
    rows += [f"| trained on | windows of {context:,} tokens |"] if context else []
    return TEXT.format(
        header=f"---\n{data.to_yaml()}\n---",
        name=name,
        parameters=made.model.num_parameters(),
        dtype=str(made.config.dtype).removeprefix("torch."),
        dim=made.config.hidden_size,
        vocabulary=made.config.vocab_size,
        rows="\n".join(rows),
    )


def _described(layer: Any) -> str:
    if not isinstance(layer, TTTLayer):  # of somebody else, or several in the place of one
        inside = [_described(one) for one in layer.children() if isinstance(one, TTTLayer)]
        return " and ".join([type(layer).__name__, *inside])
    learner, task, rule = (type(part).__name__ for part in (layer.learner, layer.task, layer.optimizer))
    return f"{layer.num_heads} heads; learner {learner}, task {task}, inner optimizer {rule}"
