"""Safetensors that nobody vouches for: what cannot be read is one line."""

from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load, load_file
from torch import Tensor

from atoll.base.errors import first_line
from atoll.store.store import Damaged


def read_tensors(source: Path | bytes, name: str, *wanted: str) -> dict[str, Tensor]:
    """Tensors of a local file, which are mapped and read when they are indexed, or of bytes.

    Args:
        source: the file, or its bytes.
        name: of the object, for messages.
        wanted: names that must be among them.

    Raises:
        Damaged: it is no safetensors, or lacks a tensor.
    """
    try:
        tensors: dict[str, Tensor] = load_file(source) if isinstance(source, Path) else load(source)
    except (SafetensorError, KeyError, OSError, RuntimeError, TypeError, ValueError) as error:
        raise Damaged(f"{name} is no safetensors ({first_line(error)[:200]})", "write it again") from None
    for one in wanted:
        if one not in tensors:
            raise Damaged(f"{name} has no tensor {one!r}", "write it again")
    return tensors
