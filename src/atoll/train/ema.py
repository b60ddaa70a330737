"""The moving average of the weights, with a half-life in samples."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from atoll.train.parallel import gather_no_more, local


class Ema:
    """An exponential moving average whose memory is a fraction of the run.

    The half-life is also at most a fraction of the samples seen so far, so that early on the average
    forgets the random start (as in EDM2's warm-up, arXiv 2312.02696). Of sharded weights each process
    averages its own part.

    Args:
        network: whose parameters are averaged.
        half_life: samples after which a weight's share has halved; 0 copies the weights.
        ramp: the half-life is at most this fraction of the samples seen.
    """

    def __init__(self, network: nn.Module, half_life: float, ramp: float) -> None:
        self.network, self.half_life, self.ramp = network, half_life, ramp
        self.parameters = dict(network.named_parameters())  # kept: to look them up takes time at every step
        self.weights: dict[str, Tensor] = {name: p.detach().clone() for name, p in self.parameters.items()}

    def decay(self, samples: int, batch: int) -> float:
        """Share of the old average that stays in the step that ends at `samples`."""
        half_life = min(self.half_life, self.ramp * samples)
        return float(0.5 ** (batch / half_life)) if half_life > 0 else 0.0

    @torch.no_grad()
    def update(self, samples: int, batch: int) -> None:
        """Move the average towards the weights after a step of `batch` samples that ends at `samples`."""
        # One fused kernel over all tensors; one call a tensor would take longer than the step of a small
        # network.
        average, weights = ([*map(local, them.values())] for them in (self.weights, self.parameters))
        torch._foreach_lerp_(average, weights, 1.0 - self.decay(samples, batch))

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Let the network hold the averaged weights for a while; the bits of its own come back after."""
        before = {name: p.detach().clone() for name, p in self.parameters.items()}
        try:
            self._copy(self.weights)
            yield
        finally:
            self._copy(before)

    @torch.no_grad()
    def _copy(self, values: dict[str, Tensor]) -> None:
        gather_no_more(self.network)
        for name, parameter in self.parameters.items():
            local(parameter).copy_(local(values[name]))
