"""Floating-point operations, counted on torch's meta device.

Meta tensors have shapes and no data, so any size is counted at once. On the CPU torch's counter sees
none of the attention, because the fused kernel is one opaque operation there.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from atoll.base.condition import Condition
from atoll.networks.settings import DataShape


@dataclass(frozen=True)
class Flops:
    """Operations per sample (a multiply-add counts as 2).

    Attributes:
        forward: one evaluation.
        train: forward and backward.
    """

    forward: float
    train: float


def count(
    build: Callable[[], nn.Module],
    call: Callable[[nn.Module, Tensor, Tensor, Condition], Tensor],
    shape: DataShape,
    batch: int = 2,
) -> Flops:
    """Count a network at the given data shape; the mean over latents of several."""
    return mean(counts(build, call, shape, batch))


def counts(
    build: Callable[[], nn.Module],
    call: Callable[[nn.Module, Tensor, Tensor, Condition], Tensor],
    shape: DataShape,
    batch: int = 2,
) -> tuple[Flops, ...]:
    """Count a network at each of the shape's latents."""
    with torch.device("meta"):
        network = build()
    return tuple(_count(network, call, shape, sides, batch) for sides in shape.latents)


def mean(flops: Sequence[Flops], rows: Sequence[float] = ()) -> Flops:
    """The mean over rows, of which there are so many for each; equally many without."""
    if len(flops) == 1:
        return flops[0]
    numbers = rows or [1.0] * len(flops)
    forward, train = (
        sum(n * one for n, one in zip(numbers, each, strict=True)) / sum(numbers)
        for each in ([one.forward for one in flops], [one.train for one in flops])
    )
    return Flops(forward, train)


def _count(
    network: nn.Module,
    call: Callable[[nn.Module, Tensor, Tensor, Condition], Tensor],
    shape: DataShape,
    sides: tuple[int, int],
    batch: int,
) -> Flops:
    with torch.device("meta"):
        x = torch.empty(batch, shape.channels, *sides)
        t = torch.empty(batch)
        cond = empty_condition(shape, batch)
    with FlopCounterMode(display=False) as counter:
        output = call(network, x, t, cond)
        forward = counter.get_total_flops()
        output.sum().backward()
        train = counter.get_total_flops()
    return Flops(forward / batch, train / batch)


def empty_condition(shape: DataShape, batch: int) -> Condition:
    """A condition of the right shapes and no meaning."""
    labels = torch.zeros(batch, dtype=torch.long) if shape.classes else None
    if not shape.text_width:
        return Condition(labels=labels)
    text = torch.empty(batch, shape.text_length, shape.text_width)
    return Condition(labels=labels, text=text, mask=torch.ones(batch, shape.text_length, dtype=torch.bool))
