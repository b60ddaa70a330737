"""Monolith, student and ensemble side by side: same conditions, same noise, every strategy."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from atoll.base.condition import Condition
from atoll.base.rng import generator
from atoll.campaign.settings.measure import CompareConfig
from atoll.data.samples import Samples
from atoll.encoders.vae import Autoencoder
from atoll.ensemble.ensemble import Ensemble, Trace
from atoll.ensemble.expert import Expert
from atoll.ensemble.generate import Conditions as Rows
from atoll.ensemble.generate import Sampling, generate
from atoll.ensemble.generation import Generation


@dataclass(frozen=True)
class Drawn:
    """Pictures of one model and how they came about."""

    pictures: list[Image.Image]
    trace: Trace | None
    seconds: float


def draw(
    model: Ensemble | Expert,
    vae: Autoencoder,
    routing: str | None,
    conditions: "Conditions",
    seed: int,
    config: CompareConfig,
    device: torch.device | str = "cpu",
) -> Drawn:
    """Sample one network, or the ensemble under a routing strategy, at given conditions.

    Noise and routing draws of picture i depend on `(seed, i)` alone, so all models start alike.

    Args:
        model: what is drawn from.
        vae: turns latents into pictures.
        routing: name of the strategy; None for one network.
        conditions: one for each picture.
        seed: of noise and routing.
        config: steps, guidance and batch.
        device: where the model is.

    Raises:
        DataError: a picture holds NaN or infinity.
    """
    start, found, traces = time.monotonic(), dict[int, Image.Image](), []
    generation = Generation(steps=config.steps, guidance=config.guidance, seed=seed).with_(routing=routing)
    for batch in generate(model, conditions.sampling(generation, len(conditions), config.batch, device)):
        found |= dict(zip(batch.rows, vae.pictures(batch.latents.cpu(), batch.rows), strict=True))
        if batch.trace is not None:
            traces.append(batch.trace)
    trace = None
    if traces:
        trace, order = Trace.joined(traces), torch.tensor(list(found)).argsort()
        trace.weights = [weights[order] for weights in trace.weights]  # batches need not follow the numbers
    return Drawn([found[row] for row in range(len(conditions))], trace, time.monotonic() - start)


class Conditions:
    """Conditions to sample at: rows of a data set, each with its cluster.

    Args:
        samples: the rows' columns.
        index: numbers within `samples`, one per picture.
        clusters: cluster of each picture.
    """

    def __init__(self, samples: Samples, index: NDArray[np.int64], clusters: NDArray[np.int64]) -> None:
        self.samples, self.index, self.clusters = samples, index, clusters
        shape = samples.shape
        self.latent_shape = (shape.channels, shape.size, shape.size)

    def __len__(self) -> int:
        return len(self.index)

    def first(self, count: int) -> "Conditions":
        """Those of the first pictures."""
        return Conditions(self.samples, self.index[:count], self.clusters[:count])

    def of(self, rows: Sequence[int]) -> Condition:
        """Conditions of some pictures."""
        return self.samples.conditions(self.index[list(rows)])

    def null(self) -> Condition:
        """The null condition."""
        return self.samples.null()

    def sampling(
        self,
        generation: Generation,
        count: int,
        batch: int,
        device: torch.device | str,
        first: int = 0,
    ) -> Sampling:
        """All about drawing `count` pictures at these conditions, from picture `first` on."""

        conditions = Rows(self.of, self.null(), len(self))
        labels = torch.from_numpy(self.clusters)
        return Sampling(generation, conditions, self.latent_shape, count, first, batch, device, labels)

    def captions(self) -> list[str]:
        """Caption of each picture."""
        rows = self.samples.rows[self.index]
        return [str(c) for c in self.samples.dataset.take(rows).column("caption").to_pylist()]


def drawn_conditions(samples: Samples, clusters: NDArray[np.int64], count: int, seed: int) -> Conditions:
    """Conditions of `count` of these rows in a seeded order, repeated when there are fewer."""
    order = torch.randperm(len(samples), generator=generator(seed, "compare")).numpy()
    index = np.resize(order, count)
    return Conditions(samples, index, clusters[samples.rows[index]])


def cost(model: Ensemble | Expert, drawn: Drawn, config: CompareConfig) -> dict[str, float]:
    """Cost of one step of one sample: operations and experts of one branch of guidance, as the paper's table
    counts, calls of the router by both."""
    card = model.card if isinstance(model, Expert) else None
    flops = card.forward_flops if card is not None else 0.0
    experts, router, routing = 1.0, 0.0, 0.0
    if drawn.trace is not None:
        steps = len(drawn.pictures) * config.steps
        each = steps * drawn.trace.branches
        experts, router = drawn.trace.expert_calls / each, drawn.trace.router_calls / steps
        routing = drawn.trace.router_flops / each
        flops = drawn.trace.expert_flops / each + routing  # experts may differ in size
    return {
        "gflops_per_step": flops / 1e9,
        "experts_per_step": experts,
        "router_calls_per_step": router,
        "router_share": routing / flops if flops else 0.0,
    }
