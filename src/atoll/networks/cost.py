"""What a network costs: floating-point operations and bytes of training, counted without having them.

Operations are counted on torch's meta device, whose tensors have shapes and no data. Memory is a sum over
parameters, and what autograd keeps for the backward pass: torch tells each such tensor through its hooks for
saved tensors, on fake CPU tensors with autocast as on CUDA.
"""

import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from atoll.base.condition import Condition
from atoll.networks.families import parameter_count
from atoll.networks.settings import DataShape

Build = Callable[[], nn.Module]
Call = Callable[[nn.Module, Tensor, Tensor, Condition], Tensor]

# Bytes per parameter, all float32: autocast keeps the weights as they are.
WEIGHTS, GRADIENTS, MOMENTS, EMA = 4, 4, 8, 4


@dataclass(frozen=True)
class Flops:
    """Operations per sample (a multiply-add counts as 2): of one evaluation, and with the backward pass."""

    forward: float
    train: float


def count(build: Build, call: Call, shape: DataShape, batch: int = 2) -> Flops:
    """Count a network at the given data shape; the mean over latents of several."""
    return mean(counts(build, call, shape, batch))


def counts(build: Build, call: Call, shape: DataShape, batch: int = 2) -> tuple[Flops, ...]:
    """Count a network at each of the shape's latents."""
    flops = []
    # On the CPU torch's counter sees none of the attention: the fused kernel is one opaque operation there.
    with torch.device("meta"):
        network = build()
    for sides in shape.latents:
        with torch.device("meta"):
            x, t = torch.empty(batch, shape.channels, *sides), torch.empty(batch)
            cond = empty_condition(shape, batch)
        with FlopCounterMode(display=False) as counter:
            output = call(network, x, t, cond)
            forward = counter.get_total_flops()
            output.sum().backward()
            flops.append(Flops(forward / batch, counter.get_total_flops() / batch))
    return tuple(flops)


def mean(flops: Sequence[Flops], rows: Sequence[float] = ()) -> Flops:
    """The mean over rows, of which there are so many for each; equally many without."""
    if len(flops) == 1:
        return flops[0]  # exactly: a sum and a division would move its last bits
    numbers = rows or [1.0] * len(flops)
    forward, train = (
        sum(n * each for n, each in zip(numbers, values, strict=True)) / sum(numbers)
        for values in ([each.forward for each in flops], [each.train for each in flops])
    )
    return Flops(forward, train)


def empty_condition(shape: DataShape, batch: int) -> Condition:
    """A condition of the right shapes and no meaning."""
    labels = torch.zeros(batch, dtype=torch.long) if shape.classes else None
    if not shape.text_width:
        return Condition(labels=labels)
    text = torch.empty(batch, shape.text_length, shape.text_width)
    return Condition(labels=labels, text=text, mask=torch.ones(batch, shape.text_length, dtype=torch.bool))


@dataclass(frozen=True)
class Footprint:
    """What training one network keeps in memory, all in bytes but for the parameters.

    Attributes:
        parameters: trainable numbers.
        block_parameters: those of its largest block.
        outer_parameters: those outside the blocks.
        casts: weights in bf16, kept from the forward to the backward pass; 0 without bf16.
        activations: kept for the backward pass, per sample.
        checkpointed: the same where every block is computed again in the backward pass, per sample: the
            blocks' inputs, and all of the one block in hand.
    """

    parameters: int
    block_parameters: int
    outer_parameters: int
    casts: int
    activations: float
    checkpointed: float

    @property
    def state(self) -> int:
        """Weights, gradients, AdamW's two moments and the average of the weights."""
        return (WEIGHTS + GRADIENTS + MOMENTS + EMA) * self.parameters


def footprint(build: Build, call: Call, shape: DataShape, bf16: bool) -> Footprint:
    """Count a network at the largest latents of a data shape."""

    def saved(batch: int) -> int:
        x = torch.empty(batch, shape.channels, *shape.largest)
        t, cond = torch.empty(batch), empty_condition(shape, batch)
        cuda = Float32Norms() if bf16 else nullcontext()
        with warnings.catch_warnings(), torch.autocast("cpu", torch.bfloat16, enabled=bf16), cuda:
            # torch warns so of RMSNorm under autocast: float32 weights rule out its fused kernel.
            warnings.filterwarnings("ignore", message="Mismatch dtype between input and weight")
            return saved_bytes(lambda: call(network, x, t, cond), network)

    with FakeTensorMode():
        network = build().train()
        lists = [part for part in network.children() if isinstance(part, nn.ModuleList)]
        blocks = [block for part in lists for block in part]
        sizes, total = [parameter_count(block) for block in blocks], parameter_count(network)
        # Two batches: what does not grow with the batch is casts of the weights.
        each = (saved(3) - saved(1)) / 2
        # By hand: the router has no switch for it, unlike diffusers' denoisers.
        for block in blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        kept = (saved(3) - saved(1)) / 2
    inside = (each - kept) / max(1, len(blocks))
    return Footprint(
        total, max(sizes, default=0), total - sum(sizes), (2 if bf16 else 0) * total, each, kept + inside
    )


class Float32Norms(TorchFunctionMode):
    """Layer norms in float32, as under CUDA's autocast: its float32 results are kept beside their bf16 casts.

    The CPU's autocast leaves them in bf16, which would be a tenth to a fifth too little memory.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is not nn.functional.layer_norm:
            return func(*args, **(kwargs or {}))
        with torch.autocast("cpu", enabled=False):
            # Weights are float32 as it is.
            return func(args[0].float(), *args[1:], **(kwargs or {}))


def saved_bytes(run: Callable[[], Tensor], network: nn.Module) -> int:
    """Bytes that autograd keeps for the backward pass of `run()`, parameters left out."""
    parameters = {p.untyped_storage()._cdata for p in network.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}  # held here, so that no address is used twice

    def pack(tensor: Tensor) -> Tensor:
        # By storage: autograd saves several views of one tensor, whose memory is there once.
        storage = tensor.untyped_storage()
        if storage._cdata not in parameters:
            kept[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = run()
    assert output.requires_grad
    return sum(storage.nbytes() for storage in kept.values())
