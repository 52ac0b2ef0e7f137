"""Transformers 5.24: a second call of several tokens does not begin with the state of the first."""

import torch
from transformers import DynamicCache, MambaConfig
from transformers.models.mamba.modeling_mamba import MambaMixer

torch.manual_seed(0)
config = MambaConfig(hidden_size=16, num_hidden_layers=1)
mixer, x, cache = MambaMixer(config, 0).eval(), torch.randn(1, 20, 16), DynamicCache(config=config)
with torch.no_grad():
    whole = mixer(x)
    parts = [mixer(x[:, :10], cache=cache), mixer(x[:, 10:], cache=cache)]  # the second starts its scan from zero
print((torch.cat(parts, 1) - whole).abs().amax((0, 2)))  # 0 at all 20 tokens if the state were used
