"""The hash that names frozen weights, so that what they made is never mistaken for another's."""

import torch
from torch import nn

from atoll.base.hashing import digest_tensors

ROUNDED = {"float16": torch.float16, "bfloat16": torch.bfloat16}


def weights_hash(network: nn.Module) -> str:
    """Digest of all parameters and buffers."""
    return digest_tensors(dict(network.state_dict()))


def rounded_hashes(network: nn.Module) -> dict[str, str]:
    """Digests of the weights as they are when they are saved in 16 bits, by the type of the numbers."""
    state = network.state_dict()
    hashes = {}
    for name, kind in ROUNDED.items():
        rounded = {key: v.to(kind) if v.is_floating_point() else v for key, v in state.items()}
        hashes[name] = digest_tensors(rounded)
    return hashes
