"""Where torch computes, and with how many threads: more than cores wait for each other at every layer."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from atoll.base.cores import cores
from atoll.base.errors import ConfigError


@contextmanager
def using_threads(count: int) -> Iterator[None]:
    """Let torch use this many threads for a while; 0 is `OMP_NUM_THREADS`, else a share of the cores."""
    before, told = torch.get_num_threads(), os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    share = cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    torch.set_num_threads(count or (int(told) if told.isdecimal() else 0) or max(1, share))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def named_device(name: torch.device | str | None) -> torch.device:
    """The device of that name, or this process' own; `ConfigError` where torch cannot compute on it."""
    if name is None:
        return own_device()
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).tolist()
    except (RuntimeError, AssertionError):
        fix = "give cpu, or cuda or cuda:N where torch sees a GPU"
        raise ConfigError(f"there is no device {str(name)!r} here", fix) from None
    return device


def own_device() -> torch.device:
    """The device of this process: under `torchrun` each has a GPU of its own."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    # Products that stay in float32 (features, the router, the first layers) go through tensor cores in TF32:
    # ten bits of mantissa, about eight times as fast.
    torch.set_float32_matmul_precision("high")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def weights_dtype(name: str, device: torch.device | str) -> torch.dtype | None:
    """What a setting such as `sampling.residency.dtype` means on a device; None is as published."""
    if name in ("auto", "fp8", "int8"):  # what is stored in one byte is computed as everything else
        return torch.bfloat16 if torch.device(device).type == "cuda" else None
    return {"float32": torch.float32, "bf16": torch.bfloat16}[name]


def onto(tensor: Tensor, device: torch.device) -> Tensor:
    """Copied from the host to a device in the order of the current stream; the host does not wait for it."""
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def encoding_precision(device: torch.device | str) -> torch.autocast:
    """How encoders that nobody trains compute: in bf16 on a GPU, as their weights are on a CPU."""
    kind = torch.device(device).type
    return torch.autocast(kind, torch.bfloat16, enabled=kind == "cuda")


def in_parts(run: Callable[[Tensor], Tensor], rows: Tensor, most: int) -> Tensor:
    """What `run` gives of rows, at most so many at once; half as many whenever the GPU's memory runs out."""
    parts, first = list[Tensor](), 0
    while first < len(rows):
        try:
            parts.append(run(rows[first : first + most]))
        except torch.OutOfMemoryError:
            if most == 1:
                raise
            torch.cuda.empty_cache()
            most //= 2
        else:
            first += most
    return torch.cat(parts)
