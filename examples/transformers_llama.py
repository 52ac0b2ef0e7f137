"""A TTT layer in the place of attention in a model of Hugging Face Transformers, trained in a plain PyTorch loop.

    python examples/transformers_llama.py [steps=100]

A small Llama with random weights; all blocks but the first get TTT-Linear. The text is the source of Python's `ast` module, byte by
byte. Our layers carry states and not a cache of keys, so this model generates with `use_cache=False`; a model made of our layers
alone generates with its states after `metattt export`, and so does a pretrained model with layers of `metattt.attach`.
"""

from __future__ import annotations

import ast
import inspect
import sys
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import metattt

DIM, HEADS, LENGTH, BATCH, RATE = 64, 2, 128, 8, 3e-3


class Attention(nn.Module):
    """What Llama's blocks call: `[B, T, D]` to `[B, T, D]`, and no weights of attention."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, hidden_states: Tensor, **options: Any) -> tuple[Tensor, None]:
        """Positions and the causal mask are not needed: the layer reads the tokens one after the other."""
        y, _ = self.layer(hidden_states)
        return y, None


def make_model(replace: bool) -> LlamaForCausalLM:
    """A Llama of three blocks; `replace` puts our layer into all but the first."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=DIM, intermediate_size=2 * DIM, num_hidden_layers=3, num_attention_heads=HEADS,
        max_position_embeddings=LENGTH, bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    for block in model.model.layers[1:] if replace else ():
        block.self_attn = Attention(metattt.build("ttt_linear", dim=DIM, num_heads=HEADS))
    return model


def main(steps: int = 100) -> dict[str, float]:
    """Prints and returns the loss (nats per byte) on the end of the text, which is held out."""
    text = torch.frombuffer(bytearray(inspect.getsource(ast).encode()), dtype=torch.uint8).long()
    cut = 9 * len(text) // 10
    windows = text[:cut].unfold(0, LENGTH, 1)
    held = text[cut:].unfold(0, LENGTH, LENGTH)
    found = {}
    for name in ("attention in all blocks", "TTT-Linear in two of three"):
        model = make_model(replace=name.startswith("TTT"))
        optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps)
        for _ in range(steps):
            ids = windows[torch.randint(len(windows), (BATCH,))]
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
        model.eval()
        with torch.no_grad():
            found[name] = model(input_ids=held, labels=held, use_cache=False).loss.item()
        print(f"{name:<30}{model.num_parameters():>10,} parameters   {found[name]:.3f} nats per byte")
    ids = model.generate(held[:1, :64], max_new_tokens=40, do_sample=False, use_cache=False)
    print(repr(bytes(ids[0].tolist()).decode(errors="replace")))
    return found


if __name__ == "__main__":
    main(*(int(word.removeprefix("steps=")) for word in sys.argv[1:]))
