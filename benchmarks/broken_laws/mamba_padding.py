"""Transformers 5.24: padding after the tokens of a call decays the state."""

import torch
from transformers import DynamicCache, MambaConfig
from transformers.models.mamba.modeling_mamba import MambaMixer

torch.manual_seed(0)
config = MambaConfig(hidden_size=16, num_hidden_layers=1)
mixer, x = MambaMixer(config, 0).eval(), torch.randn(1, 8, 16)
one, two = DynamicCache(config=config), DynamicCache(config=config)
with torch.no_grad():
    mixer(x[:, :7], cache=one)
    padded, mask = torch.cat([x[:, :7], torch.ones(1, 3, 16)], 1), torch.tensor([[1] * 7 + [0] * 3])
    mixer(padded, cache=two, attention_mask=mask)
    print((mixer(x[:, 7:], cache=one) - mixer(x[:, 7:], cache=two)).abs().max())  # 0 if padding left the state alone
