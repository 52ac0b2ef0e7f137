"""What the operations and their launches may take. Where there is no GPU, the answers about a device are those of an
H100, as interpreter and compiler need them."""

from typing import Any

import torch

WIDTHS = (32, 64, 96, 128)  #: of a head
SIZES = (8, 16, 32, 64)  #: tokens of a mini-batch
OPERANDS = (torch.bfloat16, torch.float16, torch.float32)  #: types of the operands of products

SHARED_MEMORY = 232_448  #: bytes that one program may have on compute capability 9.0


def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one program may have."""
    if device.type != "cuda":
        return SHARED_MEMORY
    properties: Any = torch.cuda.get_device_properties(device)  # torch's types do not know all of them
    return int(properties.shared_memory_per_block_optin)
