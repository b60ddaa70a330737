"""The hash that names frozen weights, so that what they made is never mistaken for another's."""

from torch import nn

from atoll.base.hashing import digest_tensors


def weights_hash(network: nn.Module) -> str:
    """Digest of all parameters and buffers."""
    return digest_tensors(dict(network.state_dict()))
