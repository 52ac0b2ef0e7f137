"""Read a document once, keep what was learned in a file, and answer from it later.

python examples/remember.py read runs/<run> notes.txt memory.safetensors
python examples/remember.py answer runs/<run> memory.safetensors "The key is" "And then"

The memory is what the inner loops have learned from the document: the weights of their learners. Its size is that of the
learners, however long the document is (attention layers keep every token); the model stays as it is and can be shared
by many memories. How well a model answers is another matter: it can only recall what its training has taught it to.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import metattt
from metattt.generation.text import generate_text
from metattt.models.language_model import LanguageModelState

SEGMENT = 2048  # tokens per call: what a call needs of memory does not grow with the document


def read(checkpoint: str, document: str, memory: str) -> None:
    """Reads a text file with a model, and writes what was learned."""
    model, tokenizer = metattt.load_model(checkpoint)[0], metattt.load_tokenizer(checkpoint)
    ids = torch.tensor([[tokenizer.separator, *tokenizer.encode(Path(document).read_text()).tolist()]])
    state = None
    with torch.inference_mode():
        for piece in ids.split(SEGMENT, dim=1):
            _, state = model.step(piece, state, last_only=True)
    state.save(memory, model=model)
    print(f"{memory}  {ids.shape[1]:,} tokens read, {state.nbytes:,} bytes learned")


def answer(checkpoint: str, memory: str, *questions: str) -> None:
    """Continues every question as if it stood after the document; the memory stays as it is."""
    model, tokenizer = metattt.load_model(checkpoint)[0], metattt.load_tokenizer(checkpoint)
    state = LanguageModelState.load(memory, model=model)  # refused, if another model has learned it
    for question, text in zip(questions, generate_text(model, tokenizer, questions, 40, temperature=0, state=state), strict=True):
        print(f"{question}{text}")


if __name__ == "__main__":
    if len(sys.argv) < 5:
        sys.exit(__doc__)
    command, *words = sys.argv[1:]
    {"read": read, "answer": answer}[command](*words)
