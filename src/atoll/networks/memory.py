"""Bytes that training needs, counted without having them: on tensors that have shapes and no data.

The state is a sum over parameters. Activations are what autograd keeps for the backward pass; torch tells
each of them through its hooks for saved tensors, on fake CPU tensors with autocast as in training. CUDA
keeps a little more, because its layer norms give float32 there.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from atoll.base.condition import Condition
from atoll.networks.families import parameter_count
from atoll.networks.flops import empty_condition
from atoll.networks.settings import DataShape

# Bytes per parameter, all float32: autocast keeps the weights as they are.
WEIGHTS, GRADIENTS, MOMENTS, EMA = 4, 4, 8, 4


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


def footprint(
    build: Callable[[], nn.Module],
    call: Callable[[nn.Module, Tensor, Tensor, Condition], Tensor],
    shape: DataShape,
    bf16: bool,
) -> Footprint:
    """Count a network at the largest latents of a data shape; arguments as of `networks.flops.count`."""
    with FakeTensorMode():
        network = build().train()
        blocks = _blocks(network)
        sizes = [parameter_count(block) for block in blocks]
        total = parameter_count(network)
        # Two batches: what does not grow with the batch is casts of the weights.
        one, three = (_saved(network, call, shape, batch, bf16) for batch in (1, 3))
        each = (three - one) / 2
        for block in blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        low, high = (_saved(network, call, shape, batch, bf16) for batch in (1, 3))
        kept = (high - low) / 2
    inside = (each - kept) / max(1, len(blocks))
    return Footprint(
        total, max(sizes, default=0), total - sum(sizes), (2 if bf16 else 0) * total, each, kept + inside
    )


def _blocks(network: nn.Module) -> list[nn.Module]:
    return [block for part in network.children() if isinstance(part, nn.ModuleList) for block in part]


def saved_bytes(run: Callable[[], Tensor], network: nn.Module) -> int:
    """Bytes that autograd keeps for the backward pass of `run()`, parameters left out."""
    parameters = {p.untyped_storage()._cdata for p in network.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}  # held here, so that no address is used twice

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in parameters:
            kept[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = run()
    assert output.requires_grad
    return sum(storage.nbytes() for storage in kept.values())


def _saved(
    network: nn.Module,
    call: Callable[[nn.Module, Tensor, Tensor, Condition], Tensor],
    shape: DataShape,
    batch: int,
    bf16: bool,
) -> int:
    x = torch.empty(batch, shape.channels, *shape.largest)
    t, cond = torch.empty(batch), empty_condition(shape, batch)
    with warnings.catch_warnings(), torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        warnings.filterwarnings("ignore", message="Mismatch dtype between input and weight")
        return saved_bytes(lambda: call(network, x, t, cond), network)
