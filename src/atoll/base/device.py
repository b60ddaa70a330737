"""Where torch computes, and with how many threads: more than cores wait for each other at every layer."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from atoll.base.errors import ConfigError


def cores() -> int:
    """Cores that this process is bound to, by `taskset`, a container's cpuset or Slurm; else all."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device
