"""SHA-256 of bytes, files, plain data and weights."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # settings are hashed too, and read without torch
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


def digest_tensors(tensors: "Mapping[str, Tensor]") -> str:
    """Hex digest of named tensors: names, dtypes, shapes and bits; the order of names does not count."""
    import numpy as np
    import torch

    # Bits are read as integers, since numpy has no bfloat16; so -0 and 0 differ, and NaN is equal to itself.
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    state = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        state.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        raw = tensor.reshape(-1).view(dtype=integers[tensor.element_size()]).numpy()
        state.update(np.ascontiguousarray(raw).data)
    return state.hexdigest()
