"""Safetensors: written block by block, and read where nobody vouches for them."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, load_file
from torch import Tensor

from atoll.base.errors import first_line
from atoll.store import ranges
from atoll.store.store import Damaged

DTYPES = {
    "I64": torch.int64,
    "F64": torch.float64,
    "F32": torch.float32,
    "I32": torch.int32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I16": torch.int16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Types by their names there, in the order in which a file holds them."""


def to_blocks(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> Iterator[bytes]:
    """What `safetensors.torch.save` gives of contiguous CPU tensors, in blocks of `ranges.PART` bytes.

    `save` holds all of it a second time, and the interpreter's lock for four seconds a gigabyte.
    """
    kinds = {dtype: (place, name) for place, (name, dtype) in enumerate(DTYPES.items())}
    header, end = dict[str, object]({"__metadata__": metadata} if metadata else {}), 0
    ordered = sorted(tensors.items(), key=lambda item: (kinds[item[1].dtype][0], item[0]))
    for name, tensor in ordered:
        start, end = end, end + tensor.nbytes
        kind = kinds[tensor.dtype][1]
        header[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    views = [memoryview(len(text).to_bytes(8, "little") + text)]
    views += [tensor.reshape(-1).view(torch.uint8).numpy().data for _, tensor in ordered]
    block, room = list[memoryview](), ranges.PART
    for view in views:
        while len(view):
            block.append(view[:room])
            view, room = view[room:], room - len(block[-1])
            if not room:
                yield b"".join(block)
                block, room = [], ranges.PART
    if block:
        yield b"".join(block)


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
