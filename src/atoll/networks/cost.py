"""What a network costs: floating-point operations and bytes of training, counted without having them.

Operations are counted on torch's meta device, whose tensors have shapes and no data. Memory is a sum over
parameters, and what autograd keeps for the backward pass: torch tells each such tensor through its hooks for
saved tensors, on fake CPU tensors with autocast as on CUDA.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from atoll.base.condition import Condition
from atoll.base.imports import lean_imports
from atoll.networks.families import parameter_count
from atoll.networks.settings import DataShape
from atoll.networks.storage import stored_layers

Build = Callable[[], nn.Module]
Call = Callable[[nn.Module, Tensor, Tensor, Condition], Tensor]

# Bytes per parameter, all float32: autocast keeps the weights as they are.
WEIGHTS, GRADIENTS, MOMENTS, EMA = 4, 4, 8, 4
OVERHEAD = 2 * 2**30
"""Bytes of a GPU that training cannot use: the CUDA context, workspaces, fragments. Assumed."""
SMALL = 8
"""Samples at once below which a GPU is badly used: other ways to save memory are tried before."""


@dataclass(frozen=True)
class Flops:
    """Operations per sample (a multiply-add counts as 2): of one evaluation, and with the backward pass."""

    forward: float
    train: float


def counts(build: Build, call: Call, shape: DataShape, batch: int = 2) -> tuple[Flops, ...]:
    """Count a network at each of the shape's latents."""
    flops = []
    # On the CPU torch's counter sees none of the attention: the fused kernel is one opaque operation there.
    with lean_imports(), torch.device("meta"):
        network = build()
    for sides in shape.latents:
        with torch.device("meta"):
            x, t = torch.empty(batch, shape.channels, *sides), torch.empty(batch)
            cond = empty_condition(shape, batch)
        with lean_imports(), FlopCounterMode(display=False) as counter:
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
    scale = torch.ones(batch) if shape.guidance else None
    if shape.pooled_width:
        return Condition(text=text, pooled=torch.empty(batch, shape.pooled_width), guidance=scale)
    return Condition(labels, text, torch.ones(text.shape[:2], dtype=torch.bool), guidance=scale)


@dataclass(frozen=True)
class Footprint:
    """What training one network keeps in memory, all in bytes but for the numbers of parameters."""

    parameters: int  # trainable
    block_parameters: int  # of its largest block
    outer_parameters: int  # outside the blocks
    casts: int  # weights in bf16, kept from the forward to the backward pass; 0 without bf16
    activations: float  # kept for the backward pass, per sample
    # The same where every block is computed again in the backward pass: the blocks' inputs, and all of the
    # one block in hand.
    checkpointed: float
    # At most at once where nothing is kept and numbers are bf16, per sample. It is half of what training
    # keeps of a block: the other half is gone, or not there yet.
    drawing: float = 0.0
    frozen: int = 0  # parameters that stay as they are: those of the network that it changes (LoRA)
    storable: int = 0  # parameters that may be stored in one byte while sampling

    def weights(self, width: int, stored: bool) -> tuple[int, int]:
        """Bytes of what it trains and of what it changes, at `width` a number or, `stored`, in one."""
        # Stored are weights of whole networks: also of the one that LoRA experts change, which they share.
        less = (width - 1) * self.storable * stored
        whole = width * self.parameters - less * (not self.frozen)
        return whole, width * self.frozen - less * (self.frozen > 0)

    @property
    def state(self) -> int:
        """Weights, gradients, AdamW's two moments and the average of the weights."""
        return (WEIGHTS + GRADIENTS + MOMENTS + EMA) * self.parameters + WEIGHTS * self.frozen


def footprint(build: Build, call: Call, shape: DataShape, bf16: bool) -> Footprint:
    """Count a network at the largest latents of a data shape."""
    # All that autograd keeps for the backward pass, and what it keeps with checkpointing: by storage, as it
    # saves several views of one tensor. Held here, so that no address is used twice.
    plain, checkpointed = dict[int, torch.UntypedStorage](), dict[int, torch.UntypedStorage]()
    within = list[nn.Module]()

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        plain[storage._cdata] = storage
        if not within:
            checkpointed[storage._cdata] = storage
        return tensor

    def enter(block: nn.Module, inputs: tuple[object, ...]) -> None:
        # Checkpointing keeps the inputs of a block, and nothing from within it.
        stores = [value.untyped_storage() for value in inputs if isinstance(value, Tensor)]
        checkpointed.update({storage._cdata: storage for storage in stores})
        within.append(block)

    def saved(batch: int) -> list[int]:
        plain.clear()
        checkpointed.clear()
        x = torch.empty(batch, shape.channels, *shape.largest)
        t, cond = torch.empty(batch), empty_condition(shape, batch)
        # As under CUDA's autocast, whose float32 results are kept beside their bf16 casts: in bf16 this would
        # be a tenth to a fifth too little memory.
        cuda = Float32(nn.functional.layer_norm) if bf16 else nullcontext()
        hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
        with warnings.catch_warnings(), torch.autocast("cpu", torch.bfloat16, enabled=bf16), cuda, hooks:
            # torch warns so of RMSNorm under autocast: float32 weights rule out its fused kernel.
            warnings.filterwarnings("ignore", message="Mismatch dtype between input and weight")
            assert call(network, x, t, cond).requires_grad
        return [
            sum(storage.nbytes() for address, storage in kept.items() if address not in parameters)
            for kept in (plain, checkpointed)
        ]

    with lean_imports(), FakeTensorMode():
        network = build().train()
        parameters = {p.untyped_storage()._cdata for p in network.parameters()}
        lists = [part for part in network.children() if isinstance(part, nn.ModuleList)]
        blocks = [block for part in lists for block in part]
        for block in blocks:
            block.register_forward_pre_hook(enter)
            block.register_forward_hook(lambda *_: within.clear())
        # Two batches: what does not grow with the batch is casts of the weights.
        each, kept = ((more - less) / 2 for more, less in zip(saved(3), saved(1), strict=True))
    sizes, total = ([sum(p.numel() for p in m.parameters()) for m in ms] for ms in (blocks, [network]))
    trained, inside = parameter_count(network), (each - kept) / max(1, len(blocks))
    casts, drawing = (2 if bf16 else 0) * total[0], inside / (2 if bf16 else 4)
    outside, frozen = total[0] - sum(sizes), total[0] - trained
    storable = sum(layer.get_parameter("weight").numel() for layer in stored_layers(network).values())
    largest = max(sizes, default=0)
    return Footprint(trained, largest, outside, casts, each, kept + inside, drawing, frozen, storable)


class Float32(TorchFunctionMode):
    """One function in float32 under autocast on the CPU, which would compute it in bf16."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not self.function:
            return func(*args, **kwargs)
        with torch.autocast("cpu", enabled=False):
            return func(*map(_float32, args), **{name: _float32(value) for name, value in kwargs.items()})


def _float32(value: Any) -> Any:
    short = isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    return value.float() if short else value


@dataclass(frozen=True)
class Mode:
    """One way to run a step, and the bytes that it takes on every GPU."""

    sharded: bool  # FSDP: the state is divided over the GPUs and gathered block by block; else DDP
    checkpointing: bool  # blocks are computed again in the backward pass
    micro_batch: int  # samples at once on one GPU; gradients of the rest are accumulated
    state: float  # weights, gradients, moments, average
    copies: int  # weights in bf16; where sharded, the gathered blocks
    activations: float

    @property
    def total(self) -> float:
        """All bytes on one GPU."""
        return self.state + self.copies + self.activations + OVERHEAD


def mode(
    counted: Footprint,
    gpus: int,
    micro_batch: int,
    sharded: bool = False,
    checkpointing: bool = False,
    accumulates: bool = False,
) -> Mode:
    """Bytes on each of `gpus` GPUs at `micro_batch` samples at once, which may be a part of a step's."""
    parts = gpus if sharded else 1
    each = counted.checkpointed if checkpointing else counted.activations
    # A validation keeps a copy of the weights where a step keeps its activations; the larger one counts.
    activations = max(each * micro_batch, WEIGHTS * counted.parameters / parts)
    copies = counted.casts
    if parts > 1:
        # FSDP2 prefetches: the block in hand and the next one are whole, and what lies outside of blocks.
        gathered = counted.outer_parameters + 2 * counted.block_parameters
        copies = min(counted.parameters + counted.frozen, gathered) * WEIGHTS
        # Between micro-batches it keeps whole gradients, and divides them after the last.
        copies += GRADIENTS * counted.parameters * (sharded and accumulates)
    return Mode(sharded, checkpointing, micro_batch, counted.state / parts, copies, activations)


def choose(counted: Footprint, gpus: int, batch: int, memory: float) -> Mode | None:
    """The fastest way that fits into `memory` bytes; None if none does."""
    # Smaller micro-batches come first, as accumulation costs little down to `SMALL` samples; then sharding,
    # then checkpointing (one more forward pass), then micro-batches below that.
    for least in dict.fromkeys((min(batch, SMALL), 1)):
        for checkpointing, sharded in product((False, True), (False, True)[: 1 + (gpus > 1)]):
            micro = batch
            while micro >= least:
                way = mode(counted, gpus, micro, sharded, checkpointing, micro < batch)
                if way.total <= memory:
                    return way
                micro = math.ceil(micro / 2) if micro > 1 else 0
    return None
