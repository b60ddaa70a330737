"""Random numbers that depend on nothing but `(seed, stream, position)`.

Every sample has generators of its own, always on the CPU and in float32, so what it draws does not
depend on the batch it is in, the number of processes, or the device. Streams keep uses apart: the
noise of training sample 7 and the noise of preview 7 have nothing in common.
"""

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

Position = int | tuple[int, int]
"""A sample's place in a stream: its number, or (seed, number) where it belongs to another seed."""


def seed_of(seed: int, stream: str, *position: int) -> int:
    """A 63-bit seed for one stream at one position, by hashing (stable across versions)."""
    text = f"{seed}/{stream}/{'/'.join(map(str, position))}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def generator(seed: int, stream: str, *position: int) -> torch.Generator:
    """A CPU generator for one stream at one position."""
    return torch.Generator().manual_seed(seed_of(seed, stream, *position))


def normals(seed: int, stream: str, positions: Sequence[Position], shape: Sequence[int]) -> Tensor:
    """Standard normals `(B, *shape)`, float32, row i from the generator of `positions[i]`."""
    return _draw(Tensor.normal_, seed, stream, positions, shape)


def uniforms(seed: int, stream: str, positions: Sequence[Position], shape: Sequence[int] = ()) -> Tensor:
    """Uniforms on [0, 1) `(B, *shape)`, float32, row i from the generator of `positions[i]`."""
    return _draw(Tensor.uniform_, seed, stream, positions, shape)


def _draw(fill, seed: int, stream: str, positions: Sequence[Position], shape: Sequence[int]) -> Tensor:  # type: ignore[no-untyped-def]
    # Rows one by one: a batch drawn at once would depend on its size, by how torch fills vectors.
    source, values = torch.Generator(), torch.empty((len(positions), *shape))
    for position, row in zip(positions, values.unbind(), strict=True):
        base, number = position if isinstance(position, tuple) else (seed, position)
        fill(row, generator=source.manual_seed(seed_of(base, stream, int(number))))
    return values
