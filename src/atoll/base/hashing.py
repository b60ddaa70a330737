"""SHA-256 of bytes, files, plain data and weights."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # settings are hashed too, and read without torch
    import torch
    from torch import Tensor


def sha256(data: bytes | Path) -> str:
    """Hex digest of bytes, or of a local file, read a little at a time."""
    if isinstance(data, bytes):
        return hashlib.sha256(data).hexdigest()
    with data.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest(value: Any) -> str:
    """Hex digest of plain data (what JSON can hold), independent of the order of keys."""
    return sha256(json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode())


def digest_strings(values: Iterable[str]) -> str:
    """Hex digest of a sequence of strings; order counts."""
    state = hashlib.sha256()
    for value in values:
        encoded = value.encode()
        # Its length first: else ["ab", "c"] and ["a", "bc"] would have one digest.
        state.update(len(encoded).to_bytes(8, "little"))
        state.update(encoded)
    return state.hexdigest()


def digest_tensors(tensors: "Mapping[str, Tensor]", dtype: "torch.dtype | None" = None) -> str:
    """Hex digest of named tensors: names, dtypes, shapes and bits; the order of names does not count.

    With `dtype` numbers that are no integers count as they are in that type.
    """
    import torch

    # Bits are read as bytes, since numpy has no bfloat16; so -0 and 0 differ, and NaN is equal to itself.
    state = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        tensor = tensor.to(dtype) if dtype and tensor.is_floating_point() else tensor
        state.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        state.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return state.hexdigest()
