"""Several processes that train one network, and how a step is spread: all applied from outside the network.

`torchrun` starts the processes. The global batch stays what the plan says; each process takes its slice
of every step's positions, in micro-batches. What a sample brings (row, noise, time, dropout) depends on
its position alone, so only the order of float sums changes with the number of processes.
"""

import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal, TypeVar, cast

import torch
import torch.distributed as dist
from pydantic import Field
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from atoll.base.config import Config
from atoll.base.errors import AtollError, ConfigError, Hearsay, PartitionError

Result = TypeVar("Result")

_COLLECTIVE = re.compile("gloo|nccl|process group|timed out waiting|connection (closed|reset)", re.IGNORECASE)
"""What torch says when a collective fails within a forward or backward pass."""


class ParallelConfig(Config):
    """How one run uses its processors. None of it changes what is learned, but for the order of sums."""

    strategy: Literal["ddp", "fsdp"] = "ddp"
    """With several processes: `ddp` copies the weights to each, `fsdp` (FSDP2) shards them."""
    shard: int | None = Field(default=None, ge=1)
    """Processes that share one copy of the weights under `fsdp`; all if not set."""
    micro_batch: int | None = Field(default=None, ge=1)
    """Most samples of a process that go through the network at once; gradients add up over the rest."""
    checkpointing: bool = False
    """Recompute activations in the backward pass instead of keeping them."""
    compile: bool = False
    """Compile the network with `torch.compile`."""
    collective_seconds: float = Field(default=600.0, gt=0)
    """Seconds after which a collective that does not finish is an error."""


_BUSY = "busy"


@dataclass(frozen=True)
class World:
    """The processes of one run.

    Attributes:
        rank: number of this one.
        size: how many there are.
        device: this one's.
        limit: seconds after which a collective fails.
    """

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
        with _named("the sum of losses and signals"):
            dist.all_reduce(tensor)
            return list(tensor.tolist())

    def once(self, do: Callable[[], Result]) -> Result:
        """Let rank 0 do something and tell the others its answer (plain data), or its failure."""
        if self.size == 1:
            return do()
        if self.first:
            value, failure = self._patiently(do)
        else:
            while (answer := self._told(None)) == _BUSY:
                pass
            value, failure = answer
        if failure is not None:
            if self.first:
                raise failure
            raise SystemExit(getattr(failure, "exit_code", 2))  # rank 0 says it
        return cast(Result, value)

    def hand_over(self, tensors: Sequence[Tensor], rank: int) -> None:
        """Bring what `rank` holds in these CPU tensors to rank 0, whose own are overwritten; both call it."""
        with _named(f"the results of process {rank}"):
            for tensor in tensors:
                if self.first:
                    dist.recv(tensor, rank)
                else:
                    dist.send(tensor, 0)

    def _patiently(self, do: Callable[[], Result]) -> tuple[Result | None, AtollError | None]:
        """Do it on rank 0; however long that takes, the others hear in time that it is under way."""
        done, lost = threading.Event(), []

        def reassure() -> None:
            try:
                while not done.wait(self.limit / 4):
                    self._told(_BUSY)
            except AtollError as error:
                lost.append(error)

        thread = threading.Thread(target=reassure, daemon=True, name="reassure")
        thread.start()
        answer: tuple[Result | None, AtollError | None]
        try:
            answer = do(), None
        except AtollError as error:
            answer = None, error
        finally:
            done.set()
            thread.join()
        if lost:
            raise lost[0]
        self._told(answer)
        return answer

    def _told(self, message: Any) -> Any:
        """What rank 0 says."""
        box = [message]
        with _named("a message of rank 0"):
            dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        return box[0]


@contextmanager
def joined(config: ParallelConfig) -> Iterator[World]:
    """The processes that `torchrun` started, or this one alone.

    Raises:
        AtollError: the others did not come in time.
    """
    device = own_device()
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield World(device=device)
        return
    limit = timedelta(seconds=config.collective_seconds)
    with _named("the meeting of all processes"):
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timeout=limit)
    try:
        yield World(dist.get_rank(), dist.get_world_size(), device, config.collective_seconds)
    except AtollError as error:
        error.alone = not isinstance(error, Hearsay | ConfigError | PartitionError)
        raise
    finally:
        dist.destroy_process_group()


def own_device() -> torch.device:
    """The device of this process: under `torchrun` each has a GPU of its own."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


@contextmanager
def _named(what: str, only: re.Pattern[str] | None = None) -> Iterator[None]:
    """Name the collective that fails; where there is other work beside it, by what the error says."""
    try:
        yield
    except (RuntimeError, dist.DistError) as error:
        if only is not None and not (isinstance(error, dist.DistError) or only.search(str(error))):
            raise
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise Hearsay(
            f"{what} did not finish ({reason[:200]})",
            "another process of this run has ended or hangs: look at its output, then run it again",
        ) from None


class Spread:
    """One step spread over processes and micro-batches.

    Args:
        network: initialised, on the world's device; sharded in place under `fsdp`.
        config: how.
        world: the processes.
        batch: global samples per step.
        bf16: whether autocast is on: sharded weights are then gathered in bf16, gradients summed in float32.

    Raises:
        ConfigError: more processes than samples in a step, or a mesh that does not fit.
    """

    def __init__(
        self, network: nn.Module, config: ParallelConfig, world: World, batch: int, bf16: bool = False
    ) -> None:
        if batch < world.size:
            raise ConfigError(
                f"{world.size} processes for {batch} samples a step", "use fewer processes or a larger batch"
            )
        self.network, self.config, self.world, self.size = network, config, world, batch
        if config.checkpointing:
            _recompute(network)
        if config.compile:
            network.compile()
        if world.size > 1 and config.strategy == "fsdp":
            _shard(network, config.shard or world.size, world, bf16)

    def wrap(self, step: Callable[[Any], tuple[Tensor, dict[str, float]]]) -> nn.Module:
        """The step as a module that DDP can hold; call it with a batch."""
        module = _Step(self.network, step)
        if self.world.size == 1 or self.config.strategy == "fsdp":
            return module
        return DistributedDataParallel(module)

    def parts(self, begin: int) -> list[range]:
        """Positions of this process's micro-batches in the step that begins at a position."""
        rank, size = self.world.rank, self.world.size
        first, last = self.size * rank // size, self.size * (rank + 1) // size
        # As many on every process: under `fsdp` each brings collectives of its own.
        least, most = self.size // size, -(-self.size // size)
        count = min(least, -(-most // (self.config.micro_batch or most)))
        cuts = [begin + first + (last - first) * number // count for number in range(count + 1)]
        return [range(cuts[number], cuts[number + 1]) for number in range(count)]

    def weight(self, part: range) -> float:
        """Factor of a micro-batch's mean loss, so that the averaged gradient is that of the global mean."""
        return len(part) * self.world.size / self.size

    @contextmanager
    def accumulating(self, module: nn.Module, last: bool) -> Iterator[None]:
        """Gradients are exchanged after a step's last micro-batch only."""
        with _named("the exchange of weights and gradients", _COLLECTIVE):
            if isinstance(module, DistributedDataParallel) and not last:
                with module.no_sync():
                    yield
            else:
                if isinstance(self.network, FSDPModule):
                    self.network.set_requires_gradient_sync(last)
                yield


class _Step(nn.Module):
    def __init__(self, network: nn.Module, step: Callable[[Any], tuple[Tensor, dict[str, float]]]) -> None:
        super().__init__()
        self.network, self._step = network, step

    def forward(self, batch: Any) -> tuple[Tensor, dict[str, float]]:
        return self._step(batch)


def _recompute(network: nn.Module) -> None:
    if not getattr(network, "_supports_gradient_checkpointing", False):
        return  # the router: too small to need it
    network.enable_gradient_checkpointing()  # type: ignore[operator]


def _shard(network: nn.Module, shard: int, world: World, bf16: bool) -> None:
    if world.size % shard:
        raise ConfigError(
            f"{world.size} processes do not divide into groups of {shard}", "change train.parallel.shard"
        )
    shape = (shard,) if shard == world.size else (world.size // shard, shard)
    names = ("shard",) if len(shape) == 1 else ("copy", "shard")
    mesh = init_device_mesh(world.device.type, shape, mesh_dim_names=names)
    # Inputs are left alone: a time of 1000 t does not fit into bf16.
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    options: dict[str, Any] = {"mesh": mesh, **({"mp_policy": policy} if bf16 else {})}
    # The first block goes with the rest: DiT's output layer calls into it after its own forward pass.
    blocks = list(getattr(network, "transformer_blocks", []))[1:]
    for block in [*blocks, *getattr(network, "single_transformer_blocks", [])]:
        fully_shard(block, **options)
    fully_shard(network, **options)


def local(tensor: Tensor) -> Tensor:
    """This process's part of a sharded tensor; shares its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """A sharded tensor put together on every process; all must call it."""
    if not isinstance(tensor, DTensor):
        return tensor
    with _named("the gathering of sharded weights"):
        return tensor.full_tensor()


def gather_no_more(network: nn.Module) -> None:
    """Forget what a forward pass gathered, so that `named_parameters` are the sharded ones again."""
    for module in network.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@torch.no_grad()
def fill(target: Tensor, value: Tensor) -> None:
    """Copy a whole tensor into one that may be sharded, in place."""
    if isinstance(target, DTensor):
        from torch.distributed.tensor import distribute_tensor

        spread = distribute_tensor(
            value.to(target.device), target.device_mesh, target.placements, src_data_rank=None
        )
        target.to_local().copy_(spread.to_local())
    else:
        target.copy_(value)
