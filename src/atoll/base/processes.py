"""The processes that `torchrun` started, and what they tell each other."""

import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
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
        if self.size == 1:
            return do()
        if not self.first:
            while (answer := self._broadcast(None)) == _BUSY:
                pass
            value, failure = answer
            if failure is not None:
                raise SystemExit(getattr(failure, "exit_code", 2))  # rank 0 says it
            return cast(Result, value)

        # However long it takes, the others hear in time that it is under way: a collective that they wait in
        # would fail after `limit` seconds, and an export of many gigabytes takes longer.
        done, lost = threading.Event(), list[AtollError]()

        def reassure() -> None:
            try:
                while not done.wait(self.limit / 4):
                    self._broadcast(_BUSY)
            except AtollError as error:
                lost.append(error)

        thread = threading.Thread(target=reassure, daemon=True, name="reassure")
        thread.start()
        value = failure = None
        try:
            value = do()
        except AtollError as error:
            failure = error
        finally:
            done.set()
            thread.join()
        if lost:
            raise lost[0]
        self._broadcast((value, failure))
        if failure is not None:
            raise failure
        return cast(Result, value)

    def spread(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Rank 0's CPU tensors on every process, one after the other; what the others give does not count."""
        if self.size == 1:
            yield from tensors.items()
            return
        specs = self.once(lambda: [(name, value.dtype, value.shape) for name, value in tensors.items()])
        for name, dtype, shape in specs:
            value = tensors[name].contiguous() if self.first else torch.empty(shape, dtype=dtype)
            with named("a checkpoint's tensor"):
                dist.broadcast(value.reshape(-1).view(torch.uint8), 0)  # as bytes: gloo knows few dtypes
            yield name, value

    def send_to_first(self, tensors: Sequence[Tensor], rank: int) -> None:
        """Bring what `rank` holds in these CPU tensors to rank 0, whose own are overwritten; both call it."""
        with named(f"the results of process {rank}"):
            for tensor in tensors:
                if self.first:
                    dist.recv(tensor, rank)
                else:
                    dist.send(tensor, 0)

    def _broadcast(self, message: Any) -> Any:
        # Over the CPU's backend: NCCL would first wait for all that the GPU has queued.
        box = [message]
        with named("a message of rank 0"):
            dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        return box[0]


@contextmanager
def joined(seconds: float = 600.0) -> Iterator[ProcessGroup]:
    """The processes that `torchrun` started, or this one alone."""
    device = own_device()
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield ProcessGroup(device=device)
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
        raise PeerFailed(
            f"{what} did not finish ({first_line(error)[:200]})",
            "another process of this run has ended or hangs: look at its output, then run it again",
        ) from None
