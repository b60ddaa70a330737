"""Several processes that train one network, and how a step is spread: all applied from outside the network.

`torchrun` starts the processes. The global batch stays what the plan says; each process takes its slice
of every step's positions, in micro-batches. What a sample brings (row, noise, time, dropout) depends on
its position alone, so only the order of float sums changes with the number of processes.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from atoll.base.errors import ConfigError
from atoll.base.processes import COLLECTIVE, ProcessGroup, named
from atoll.campaign.settings.train import ParallelConfig

Step = Callable[[Any], tuple[Tensor, dict[str, float]]]
"""Loss and metrics of a batch."""


class StepSharding:
    """One step of `batch` samples spread over processes and micro-batches.

    The network is sharded in place under `fsdp`. With `bf16`, which says that autocast is on, sharded weights
    are gathered in bf16, and gradients summed in float32.
    """

    def __init__(
        self, network: nn.Module, config: ParallelConfig, group: ProcessGroup, batch: int, bf16: bool = False
    ) -> None:
        if batch < group.size:
            fix = "use fewer processes or a larger batch"
            raise ConfigError(f"{group.size} processes for {batch} samples a step", fix)
        self.network, self.config, self.group, self.size = network, config, group, batch
        most = -(-batch // group.size)  # of a step's samples on one process
        self.at_once = min(config.micro_batch or most, most)
        # As many parts on every process: under `fsdp` each brings collectives of its own, and a process with
        # one more would wait in them for ever.
        self.count = min(batch // group.size, -(-most // self.at_once))
        # The router has no such switch: it is too small to need one.
        self.recomputes = config.checkpointing and getattr(network, "_supports_gradient_checkpointing", False)
        if self.recomputes:
            network.enable_gradient_checkpointing()  # type: ignore[operator]
        if config.compile is True:
            # In place: the wrapper of torch.compile would put `_orig_mod.` before every name in a checkpoint.
            # Block by block: blocks alike are compiled once, where 28 in one piece take a minute and a half.
            for part in _blocks(network) or [network]:
                part.compile()
            # Of a block's inputs, which are results of the block before: the compiler looks at all they have.
            warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
        if group.size > 1 and config.strategy == "fsdp":
            # From host memory, part by part: a device need not have room for the whole network.
            _shard(network, config.shard or group.size, group, bf16)
        else:
            network.to(group.device)

    def wrap(self, step: Step) -> Step:
        """The step, with the exchange of gradients that DDP adds."""
        if self.group.size == 1 or self.config.strategy == "fsdp":
            return step
        # Gradients lie in the buckets that are sent: as tensors of their own they would be there twice.
        module = _Step(self.network, step)
        return DistributedDataParallel(module, gradient_as_bucket_view=True, broadcast_buffers=False)

    def parts(self, begin: int) -> list[range]:
        """Positions of this process's micro-batches in the step that begins at a position."""
        rank, size = self.group.rank, self.group.size
        first, last = self.size * rank // size, self.size * (rank + 1) // size
        cuts = [begin + first + (last - first) * n // self.count for n in range(self.count + 1)]
        return [range(*cut) for cut in pairwise(cuts)]

    def weight(self, part: range) -> float:
        """Factor of a micro-batch's mean loss, so that the averaged gradient is that of the global mean."""
        return len(part) * self.group.size / self.size

    @contextmanager
    def accumulating(self, step: Step, last: bool) -> Iterator[None]:
        """Gradients are exchanged after a step's last micro-batch only."""
        with named("the exchange of weights and gradients", COLLECTIVE):
            if isinstance(step, DistributedDataParallel) and not last:
                with step.no_sync():
                    yield
            else:
                if isinstance(self.network, FSDPModule):
                    self.network.set_requires_gradient_sync(last)
                yield


class _Step(nn.Module):  # DDP wraps modules only
    def __init__(self, network: nn.Module, step: Step) -> None:
        super().__init__()
        self.network, self._step = network, step

    def forward(self, batch: Any) -> tuple[Tensor, dict[str, float]]:
        return self._step(batch)


def _shard(network: nn.Module, shard: int, group: ProcessGroup, bf16: bool) -> None:
    if group.size % shard:
        what = f"{group.size} processes do not divide into groups of {shard}"
        raise ConfigError(what, "change train.parallel.shard")
    shape, names = (group.size // shard, shard), ("copy", "shard")
    first = int(shard == group.size)  # one group holds no copies: its mesh has one dimension
    mesh = init_device_mesh(group.device.type, shape[first:], mesh_dim_names=names[first:])
    # Inputs are left alone: a time of 1000 t does not fit into bf16.
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    options: dict[str, Any] = {"mesh": mesh, **({"mp_policy": policy} if bf16 else {})}
    # Inner parts first: fully_shard gives a module all parameters that none inside it has taken. The first
    # block goes with the rest: DiT's output layer calls into it after its own forward pass.
    for part in [*_blocks(network)[1:], network]:
        fully_shard(part, **options)


def _blocks(network: nn.Module) -> list[nn.Module]:
    names = "transformer_blocks", "single_transformer_blocks"
    return [block for name in names for block in getattr(network, name, [])]


def local(tensor: Tensor) -> Tensor:
    """This process's part of a sharded tensor; shares its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """A sharded tensor put together on every process; all must call it."""
    if not isinstance(tensor, DTensor):
        return tensor
    with named("the gathering of sharded weights"):
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
        # No source rank: every process has read the whole value, so none need be sent.
        mesh, placements = target.device_mesh, target.placements
        value = distribute_tensor(value.to(target.device), mesh, placements, src_data_rank=None)
    local(target).copy_(local(value))
