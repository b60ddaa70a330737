"""The one verb of measuring: a model, how it draws, what it is compared with, by which metrics.

A comparison, a guidance sweep, a training curve and several seeds are tables of such points, and `atoll
evaluate` measures one. Points are kept, so that nothing is measured twice.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

from atoll.base.errors import DataError
from atoll.base.format import code_version
from atoll.base.processes import ProcessGroup
from atoll.campaign.measured import MeasuredPoint, Protocol, point_key
from atoll.encoders.vision import VisionEncoder
from atoll.measure.metrics.metric import How, compute, scorers, settings_of
from atoll.measure.models import Drawn
from atoll.measure.pictures import Batch, Source, extract
from atoll.measure.reference import Reference
from atoll.measure.same_noise import SavedSamples
from atoll.model.dispatch import Trace
from atoll.store.store import Store

FOLDER = "reports/points"


class Measured(NamedTuple):
    """What measuring gave; nothing but `new` on all processes but the first."""

    point: MeasuredPoint | None
    saved: SavedSamples | None
    new: bool


@dataclass(frozen=True)
class Judge:
    """What points of one table have in common; `batch` pictures at once are drawn or read."""

    store: Store
    encoder: VisionEncoder
    reference: Reference
    metrics: Sequence[str]
    how: How
    batch: int
    world: ProcessGroup = field(default_factory=ProcessGroup)
    folder: str = FOLDER

    def measure(self, source: Source, keep: bool = False) -> Measured:
        """Measure pictures, unless it is known what they are.

        Where the first samples are wanted too (`keep`), they lie beside the point.

        Raises:
            DataError: too few pictures, of another size than the reference's, or with values that are NaN.
        """
        about, encoder = self.reference.about, self.encoder
        if source.size != tuple(about.size):
            (a, b), (c, d) = source.size, about.size
            what = f"the pictures are {a}x{b}, those of the reference {c}x{d}"
            raise DataError(what, "bring both to one size")
        protocol = Protocol(
            extractor=encoder.name,
            extractor_hash=about.extractor["hash"],
            extractor_size=encoder.size,
            extractor_token=encoder.token,
            resize=encoder.resize,
            picture_size=source.size,
            reference=about.name,
            reference_hash=about.data,
            reference_split=about.split,
            reference_count=about.count,
            samples=len(source),
            code=code_version(),
            **source.about,
        )
        how = replace(self.how, samples=len(source), seed=source.about.get("seed") or 0)
        key = f"{self.folder}/{point_key(source.subject, protocol, settings_of(self.metrics, how))}"
        if source.reusable and self.world.once(lambda: self.store.exists(f"{key}.json")):
            saved = self._saved(f"{key}.safetensors") if keep else None
            if saved is not None or not keep:
                point = MeasuredPoint.read(self.store, f"{key}.json") if self.world.first else None
                return Measured(point, saved, False)

        # Draw, look, and see what it costs.
        start, meter = time.monotonic(), CostMeter(keep)
        reference = self.reference.features(encoder, self.batch, self.world)
        name, scored = source.subject["name"], scorers(self.metrics)
        samples = extract(source, encoder, name, self.batch, self.world, scored, meter)
        if samples is None or reference is None:
            return Measured(None, None, True)
        saved = SavedSamples.of(meter.pixels, samples.rows) if keep else None
        cost: dict[str, float | None] = {
            "seconds": round(time.monotonic() - start, 1),
            "processes": float(self.world.size),
            **(meter.cost(source) if isinstance(source, Drawn) else {}),
        }
        values = compute(self.metrics, how, samples, reference)
        point = MeasuredPoint(subject=source.subject, protocol=protocol, values=values, cost=cost)
        # The samples first: what has no JSON does not exist, and is drawn again.
        if saved is not None:
            self.store.put(f"{key}.safetensors", save_tensors(saved.tensors()))
        self.store.put_json(f"{key}.json", point.to_json())
        return Measured(point, saved, True)

    def _saved(self, key: str) -> SavedSamples | None:
        if not self.store.exists(key):
            return None
        try:
            return SavedSamples.read(load_tensors(self.store.get(key)))
        except SafetensorError:
            return None  # damaged: it is measured again


class CostMeter:
    """What is seen of batches as they are drawn: seconds, calls of experts and router, and if they are to be
    kept the first pictures."""

    def __init__(self, keep: bool) -> None:
        self.keep, self.seconds = keep, 0.0
        self.pixels, self.traces = dict[int, Any](), list[Trace]()

    def __call__(self, batch: Batch) -> None:
        """Count a batch."""
        self.seconds += batch.seconds
        if batch.trace is not None:
            # Its counts alone: weights of every step of 50,000 samples would fill the memory.
            self.traces.append(replace(batch.trace, weights=[]))
        if self.keep:
            self.pixels |= SavedSamples.pixels_of(batch.numbers, batch.pictures)

    def cost(self, source: Drawn) -> dict[str, float]:
        """Cost of one step of one sample: operations and experts of one branch of guidance, as the paper's
        table counts, calls of the router by both."""
        flops = source.candidate.model.card.forward_flops
        experts, router, routing = 1.0, 0.0, 0.0
        if self.traces:
            trace = Trace.joined(self.traces)
            steps = len(source) * source.generation.steps
            each = steps * trace.branches
            experts, router = trace.expert_calls / each, trace.router_calls / steps
            routing = trace.router_flops / each
            flops = trace.expert_flops / each + routing  # experts may differ in size
        return {
            "draw_seconds": round(self.seconds, 1),
            "gflops_per_step": flops / 1e9,
            "experts_per_step": experts,
            "router_calls_per_step": router,
            "router_share": routing / flops if flops else 0.0,
        }
