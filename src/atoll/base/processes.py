"""The processes that `torchrun` started, and what they tell each other."""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from atoll.base.device import own_device
from atoll.base.errors import AtollError, ConfigError, PartitionError, PeerFailed, first_line

Result = TypeVar("Result")

COLLECTIVE = re.compile("gloo|nccl|process group|timed out waiting|connection (closed|reset)", re.IGNORECASE)
"""What torch says when a collective fails within a forward or backward pass."""
_BUSY = "busy"


@dataclass(frozen=True)
class ProcessGroup:
    """The processes of one run; a collective fails after `limit` seconds."""

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    limit: float = 600.0

    @property
    def first(self) -> bool:
        """Whether this process speaks and writes for all."""
        return self.rank == 0

    def sum(self, values: list[float]) -> list[float]:
        """Sums over all processes, float64; the same bits on each."""
        if self.size == 1:
            return values
        tensor = torch.tensor(values, dtype=torch.float64)  # over gloo: the GPU need not be waited for
        with named("the sum of losses and signals"):
            dist.all_reduce(tensor)
            return list(tensor.tolist())

    def once(self, do: Callable[[], Result]) -> Result:
        """Let rank 0 do something and tell the others its answer (plain data), or its failure."""
        return cast(Result, self.each(lambda: do() if self.first else None)[0])

    def each(self, do: Callable[[], Result]) -> list[Result]:
        """Let every process do something without collectives; all answers (plain data), by rank.

        Where one fails, it raises its failure, and the others leave with the same exit code.
        """
        if self.size == 1:
            return [do()]

        # However long it takes, the others hear in time that it is under way: a collective that they wait in
        # would fail after `limit` seconds, and an export of many gigabytes takes longer.
        with ThreadPoolExecutor(1, "each") as thread:
            work, answers = thread.submit(do), [cast(Any, _BUSY)]
            while _BUSY in answers:
                done = bool(wait([work], self.limit / 4).done)
                failure = work.exception() if done else None
                if failure is not None and not isinstance(failure, AtollError):
                    raise failure  # no answer: the others find out that this process is gone
                answers = self._gather((None if failure else work.result(), failure) if done else _BUSY)
        if failure is not None:
            raise failure
        for _, theirs in answers:
            if theirs is not None:
                raise SystemExit(getattr(theirs, "exit_code", 2))  # whose it is says it
        return [value for value, _ in answers]

    def spread(self, tensors: Mapping[str, Tensor], source: int = 0) -> Iterator[tuple[str, Tensor]]:
        """CPU tensors of rank `source` on every process, one by one; what the others give does not count."""
        if self.size == 1:
            yield from tensors.items()
            return
        specs = [(name, value.dtype, value.shape) for name, value in tensors.items()]
        for name, dtype, shape in self._gather(specs)[source]:
            value = tensors[name].contiguous() if self.rank == source else torch.empty(shape, dtype=dtype)
            with named("a checkpoint's tensor"):
                dist.broadcast(value.reshape(-1).view(torch.uint8), source)  # as bytes: gloo knows few dtypes
            yield name, value

    def _gather(self, message: Any) -> list[Any]:
        # It takes the CPU's backend: NCCL would first wait for all that the GPU has queued.
        answers = [None] * self.size
        with named("the messages of all processes"):
            dist.all_gather_object(answers, message)
        return answers


@contextmanager
def joined(seconds: float = 600.0) -> Iterator[ProcessGroup]:
    """The processes that `torchrun` started, or this one alone."""
    device = own_device()
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield ProcessGroup(device=device)
        return
    if dist.is_initialized():  # by a caller, who also ends it
        yield ProcessGroup(dist.get_rank(), dist.get_world_size(), device, seconds)
        return
    limit = timedelta(seconds=seconds)
    with named("the meeting of all processes"):
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timeout=limit)
    try:
        yield ProcessGroup(dist.get_rank(), dist.get_world_size(), device, seconds)
    except AtollError as error:
        error.alone = not isinstance(error, PeerFailed | ConfigError | PartitionError)
        raise
    finally:
        dist.destroy_process_group()


@contextmanager
def named(what: str, only: re.Pattern[str] | None = None) -> Iterator[None]:
    """Name the collective that fails; where there is other work beside it, by what the error says."""
    try:
        yield
    except (RuntimeError, dist.DistError) as error:
        if only is not None and not (isinstance(error, dist.DistError) or only.search(str(error))):
            raise
        fix = "another process of this run has ended or hangs: look at its output, then run it again"
        raise PeerFailed(f"{what} did not finish ({first_line(error)[:200]})", fix) from None
