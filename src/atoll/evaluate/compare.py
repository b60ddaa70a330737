"""Monolith, student and ensemble side by side: same conditions, same noise, every strategy."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from pydantic import Field

from atoll.base.condition import Condition
from atoll.base.config import Config
from atoll.base.console import say
from atoll.base.errors import DataError
from atoll.base.pictures import to_images
from atoll.base.rng import generator
from atoll.data.dataset import DataSet
from atoll.data.samples import Samples
from atoll.encoders.vae import Autoencoder
from atoll.encoders.vision import VisionEncoder
from atoll.ensemble.batches import Drawn as Batch
from atoll.ensemble.batches import Sampling, draw_batches
from atoll.ensemble.ensemble import Ensemble, Trace
from atoll.ensemble.expert import Expert
from atoll.ensemble.routing import Routing
from atoll.evaluate.frechet import Projection, frechet_distance

SCHEMA = 1


class CompareConfig(Config):
    """How models of a campaign are compared."""

    strategies: list[str] = ["commit", "top-1", "top-2", "full", "oracle"]
    """Routing strategies of the ensemble."""
    conditions: Literal["heldout", "train"] = "heldout"
    """Rows whose captions or labels are sampled; the reference is the held-out pictures either way."""
    samples: int = Field(default=1000, ge=2)
    """Pictures drawn from each."""
    steps: int = Field(default=20, ge=1)
    """Sampling steps."""
    guidance: float = Field(default=2.0, ge=0)
    """Guidance scale."""
    batch: int = Field(default=250, ge=1)
    """Pictures sampled at once; it does not change them."""
    extractor: str = "efficientnet-lite2"
    """Vision encoder whose features are compared: another one than the partition's."""
    extractor_size: int = Field(default=64, ge=8)
    """Side in pixels that it sees."""
    components: int = Field(default=64, ge=1)
    """Most principal components that the distance is taken in; half the pictures at hand if that is less."""
    fit_rows: int = Field(default=2000, ge=2)
    """Training pictures that fix the components."""
    prompts: list[str] = []
    """Captions to show side by side; training captions are added up to `shown`."""
    shown: int = Field(default=12, ge=1)
    """How many prompts are shown."""
    threads: int = Field(default=0, ge=0)
    """CPU threads; 0 uses all cores."""


@dataclass
class Models:
    """What is compared.

    Attributes:
        dense: single networks by name: the monolith, the student.
        ensemble: experts and router.
        vae: turns latents into pictures.
    """

    dense: Mapping[str, Expert]
    ensemble: Ensemble
    vae: Autoencoder


@dataclass(frozen=True)
class Drawn:
    """Pictures of one model and how they came about."""

    pictures: list[Image.Image]
    trace: Trace | None
    seconds: float


def draw(models: Models, name: str, conditions: "Conditions", seed: int, config: CompareConfig) -> Drawn:
    """Sample one model or strategy (`monolith`, `student`, or the name of a routing) at given conditions.

    Noise and routing draws of picture i depend on `(seed, i)` alone, so all models start alike.
    """
    start, found, traces = time.monotonic(), dict[int, Image.Image](), []
    model: Ensemble | Expert = models.dense.get(name, models.ensemble)
    routing = Routing.named("full" if name in models.dense else name)  # does not count for one network
    sampling = Sampling(routing, config.guidance, config.steps, seed, conditions.latent_shape, config.batch)
    for batch in drawn_batches(model, conditions, len(conditions), sampling):
        found |= dict(zip(batch.rows, to_images(models.vae.decode(batch.latents)), strict=True))
        if batch.trace is not None:
            traces.append(batch.trace)
    trace = None
    if traces:
        trace, order = Trace.joined(traces), torch.tensor(list(found)).argsort()
        trace.weights = [weights[order] for weights in trace.weights]  # batches need not follow the numbers
    return Drawn([found[row] for row in range(len(conditions))], trace, time.monotonic() - start)


def drawn_batches(
    model: Ensemble | Expert, conditions: "Conditions", count: int, sampling: Sampling
) -> Iterator[Batch]:
    """Draw `count` samples of an ensemble or of one network at given conditions."""

    def of(rows: Sequence[int]) -> Condition:
        return conditions.of(rows).to(sampling.device)

    null, labels = conditions.null().to(sampling.device), torch.from_numpy(conditions.clusters)
    return draw_batches(model, of, null, count, sampling, labels)


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

    def of(self, rows: Sequence[int]) -> Condition:
        """Conditions of some pictures."""
        return self.samples.conditions(self.index[list(rows)])

    def null(self) -> Condition:
        """The null condition."""
        return self.samples.null()

    def captions(self) -> list[str]:
        """Caption of each picture."""
        rows = self.samples.rows[self.index]
        return [str(c) for c in self.samples.dataset.take(rows).column("caption").to_pylist()]


def drawn_conditions(samples: Samples, clusters: NDArray[np.int64], count: int, seed: int) -> Conditions:
    """Conditions of `count` of these rows in a seeded order, repeated when there are fewer."""
    order = torch.randperm(len(samples), generator=generator(seed, "compare")).numpy()
    index = np.resize(order, count)
    return Conditions(samples, index, clusters[samples.rows[index]])


@dataclass
class Judge:
    """The extractor, its fixed components, and the reference it compares with."""

    encoder: VisionEncoder
    projection: Projection
    reference: NDArray[np.float64]

    @property
    def components(self) -> int:
        """Number of principal components in use."""
        return int(self.projection.axes.shape[1])

    @classmethod
    def make(cls, encoder: VisionEncoder, dataset: DataSet, config: CompareConfig, seed: int) -> "Judge":
        """Components from training pictures; the reference is every held-out picture."""
        train, heldout = dataset.split("train"), dataset.split("heldout")
        order = torch.randperm(len(train), generator=generator(seed, "judge")).numpy()
        rows = np.sort(train[order[: config.fit_rows]])
        components = min(config.components, min(len(heldout), config.samples, len(rows)) // 2)
        if components < 1:
            raise DataError(
                f"{len(heldout)} held-out rows cannot judge", "hold out more: data.ingest.heldout"
            )
        projection = Projection.fit(_features(encoder, dataset, rows), components)
        return cls(encoder, projection, projection(_features(encoder, dataset, heldout)))

    def distance(self, pictures: Sequence[Image.Image]) -> float:
        """Fréchet distance of pictures to the reference."""
        return frechet_distance(self.projection(self.encoder.encode(pictures).numpy()), self.reference)

    def noise_floor(self, dataset: DataSet, count: int, seed: int) -> float:
        """Distance of real training pictures: what a perfect model would be given."""
        train = dataset.split("train")
        order = torch.randperm(len(train), generator=generator(seed, "floor")).numpy()
        rows = np.sort(train[order[:count]])
        return frechet_distance(self.projection(_features(self.encoder, dataset, rows)), self.reference)


def _features(encoder: VisionEncoder, dataset: DataSet, rows: NDArray[np.int64]) -> NDArray[np.float32]:
    chunks = [rows[i : i + 256] for i in range(0, len(rows), 256)]
    found = [encoder.encode([dataset.image(int(row)) for row in chunk]).numpy() for chunk in chunks]
    return np.concatenate(found) if found else np.empty((0, encoder.width), dtype=np.float32)


def compare(
    models: Models,
    conditions: Conditions,
    shown: Conditions,
    judge: Judge,
    config: CompareConfig,
    seed: int,
    keep: Callable[[str, list[Image.Image], Trace | None], None],
) -> list[dict[str, Any]]:
    """Draw from every model and measure.

    Args:
        models: what is compared.
        conditions: of the measured pictures.
        shown: of the pictures to look at.
        judge: measures.
        config: strategies and numbers.
        seed: of noise and routing.
        keep: called with name, shown pictures and their trace.

    Returns:
        One row per model: name, distance, GFLOPs per step, experts per step, share of the router, seconds.
    """
    names = [*models.dense, *config.strategies]
    rows = []
    for name in names:
        drawn = draw(models, name, conditions, seed, config)
        few = draw(models, name, shown, seed + 1, config)
        keep(name, few.pictures, few.trace)
        row = {"name": name, "distance": judge.distance(drawn.pictures), "seconds": round(drawn.seconds, 1)}
        row |= _cost(models, name, drawn, len(conditions), config)
        rows.append(row)
        say(
            f"  {name:<14} distance {row['distance']:8.3f}   {row['gflops_per_step']:.3f} GFLOPs a step"
            f" (router {row['router_share']:.1%})   {drawn.seconds:.0f} s"
        )
    return rows


def _cost(models: Models, name: str, drawn: Drawn, count: int, config: CompareConfig) -> dict[str, float]:
    """Cost of one step of one sample, without the second branch of guidance, as the paper's table counts."""
    single = models.dense.get(name)
    flops = single.card.forward_flops if single is not None and single.card is not None else 0.0
    experts, router, routing = 1.0, 0.0, 0.0
    if drawn.trace is not None:
        each, branches = count * config.steps, 2 if config.guidance != 1.0 else 1
        experts, router = drawn.trace.expert_calls / (each * branches), drawn.trace.router_calls / each
        routing = drawn.trace.router_flops / each
        flops = drawn.trace.expert_flops / (each * branches) + routing  # experts may differ in size
    return {
        "gflops_per_step": flops / 1e9,
        "experts_per_step": experts,
        "router_calls_per_step": router,
        "router_share": routing / flops,
    }
