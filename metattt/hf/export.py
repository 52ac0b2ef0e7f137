"""`metattt export`: a trained model as a folder that Transformers reads."""

from __future__ import annotations

import shutil

import torch
from omegaconf import DictConfig
from transformers import GenerationConfig

from metattt.checkpoints.files import SAFETENSORS, check_new
from metattt.checkpoints.folder import new_folder
from metattt.checkpoints.record import OF_TRAINING, PUBLISHED_CONFIG, modules
from metattt.checkpoints.tensors import write_tensors
from metattt.checkpoints.trained import EXPORTED, load_model, open_trained
from metattt.composition.settings import settings
from metattt.data.text import ByteTokenizer
from metattt.data.tokenizers import FileTokenizer, tokenizer_of
from metattt.generation.text import ends
from metattt.hf.config import MetaTTTConfig
from metattt.hf.model import MetaTTTForCausalLM
from metattt.hf.tokenizer import to_transformers
from metattt.io import read_object, sync, write_whole

OF_TEXT = ("generation_config.json", "*token*.json", "chat_template*", "vocab.json", "merges.txt")
CARD = """---
library_name: transformers
pipeline_tag: text-generation
tags: [metattt, test-time-training]
---
# {name}

A language model whose sequence layers learn while they read (test-time training), made with MetaTTT: {parameters:,}
parameters, {vocabulary:,} tokens. `pip install 'metattt[hf]'`, and then:

```python
import metattt.hf  # makes the model known to Transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{name}")  # this folder, or its name on the Hub
model = AutoModelForCausalLM.from_pretrained("{name}"{trust})
```

`config.json` describes its layers. The tokenizer puts a separator before every text, as in training; texts of different
lengths are padded on the left.
"""


def export(cfg: DictConfig) -> None:
    """Writes the folder that `from_pretrained` reads, and says what it wrote. Killed at any moment, it leaves the whole
    folder or none of this name.

    Args:
        cfg: the configuration of the job `export`.

    Raises:
        MetaTTTError: a source or a setting that cannot be used, a target that exists.
    """
    usage = "metattt export source=<run or folder> target=<new folder>"
    chosen = settings(cfg, source=f"no source is given: {usage}", target=f"no target is given: {usage}")
    target, trust = check_new(chosen.target), modules(chosen.trust)
    about = open_trained(chosen.source, (*OF_TRAINING, "data"), trust)
    vocab_size = about.config.model.get("vocab_size")
    tokenizer = tokenizer_of(chosen.source, about.tokenizer, vocab_size, chosen.tokenizer)
    model, config = load_model(chosen.source, "cpu", trust)
    if chosen.dtype is not None:
        model.to(getattr(torch, chosen.dtype))
    made = MetaTTTForCausalLM.of(model, config, trust)
    start, end = tokenizer.separator, ends(tokenizer)[-1]
    described = MetaTTTConfig(
        metattt=made.config.metattt, bos_token_id=start, eos_token_id=end, pad_token_id=start,
        architectures=[type(made).__name__], dtype=made.config.dtype,
    )  # fmt: skip
    with new_folder(target) as folder:
        described.save_pretrained(folder)
        generation_config(tokenizer).save_pretrained(folder)
        to_transformers(tokenizer).save_pretrained(folder)
        beside = about.path.parent / PUBLISHED_CONFIG
        again = chosen.tokenizer is None and beside.is_file() and EXPORTED in read_object(beside)
        for pattern in OF_TEXT if again else ():  # what a user has set there since, as a chat template
            for file in beside.parent.glob(pattern):
                shutil.copyfile(file, folder / file.name)
        weights = {name: one for name, one in made.state_dict().items() if name not in made.all_tied_weights_keys}
        write_tensors(folder / SAFETENSORS, weights)
        sizes = {"parameters": made.model.num_parameters(), "vocabulary": made.config.vocab_size}
        said = f", trust={[*trust]}" if trust else ""
        write_whole(folder / "README.md", CARD.format(name=target.absolute().name, trust=said, **sizes).encode())
        for file in folder.iterdir():
            sync(file)
    print(f"{target}  {model.num_parameters():,} parameters, {str(made.config.dtype).removeprefix('torch.')}")


def generation_config(tokenizer: ByteTokenizer | FileTokenizer) -> GenerationConfig:
    """The `GenerationConfig` of a model with this tokenizer: which tokens begin and end a text."""
    start, stops = tokenizer.separator, ends(tokenizer)
    return GenerationConfig(bos_token_id=start, eos_token_id=stops if len(stops) > 1 else stops[0], pad_token_id=start)
