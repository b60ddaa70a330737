"""Safetensors that nobody vouches for: what cannot be read is one line."""

from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load, load_file
from torch import Tensor

from atoll.base.errors import first_line
from atoll.store.store import Damaged


def read_tensors(source: Path | bytes, name: str, *wanted: str) -> dict[str, Tensor]:
    """Tensors of a local file, which are mapped and read when they are indexed, or of bytes.

    `Damaged` if it is no safetensors, or lacks one that is `wanted`; `name` is the object's, for messages.
    """
    # A hostile header reaches several layers of the parser, and each raises in its own way.
    try:
        tensors: dict[str, Tensor] = load_file(source) if isinstance(source, Path) else load(source)
    except (SafetensorError, KeyError, OSError, RuntimeError, TypeError, ValueError) as error:
        raise Damaged(f"{name} is no safetensors ({first_line(error)[:200]})", "write it again") from None
    for key in wanted:
        if key not in tensors:
            raise Damaged(f"{name} has no tensor {key!r}", "write it again")
    return tensors
