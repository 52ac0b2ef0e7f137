"""flash-linear-attention 0.6.0: the recurrence of Comba erases at the decayed state, its chunked form before the decay."""

import torch
from fla.ops.comba.naive import naive_chunk_comba, naive_recurrent_comba

torch.manual_seed(0)
q, k, v, p = (torch.nn.functional.normalize(torch.randn(1, 16, 2, 8), dim=-1) for _ in range(4))
beta, g = torch.rand(1, 16, 2), -torch.rand(1, 16, 2)
recurrent, _ = naive_recurrent_comba(q, k, v, p=p, beta=beta, g=g)
chunked, _ = naive_chunk_comba(q, k, v, p=p, beta=beta, g=g, chunk_size=4)
print((recurrent - chunked).abs().max() / chunked.abs().max())  # 0 if both computed one rule
