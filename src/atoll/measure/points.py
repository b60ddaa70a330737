"""One measured value: a model, how it draws, what it is held against, and by which metrics; kept for good.

A comparison, a guidance sweep, a training curve and several seeds are tables of points, and `atoll evaluate`
measures one.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

from atoll.base.errors import DataError
from atoll.base.processes import ProcessGroup
from atoll.base.version import code_version
from atoll.campaign.points import MeasuredPoint, Protocol, point_key
from atoll.encoders.vision import VisionEncoder
from atoll.measure.features import extract
from atoll.measure.metrics.metric import How, compute, scorers, settings_of
from atoll.measure.models import Drawn
from atoll.measure.pictures import Batch, Source
from atoll.measure.reference import Reference
from atoll.measure.same_noise import Kept
from atoll.model.trace import Trace
from atoll.store.store import Store

FOLDER = "reports/points"


@dataclass(frozen=True)
class Judge:
    """What points of one table have in common.

    Attributes:
        store: where points are kept.
        encoder: gives features.
        reference: what pictures are held against.
        metrics: names of the numbers.
        how: the metrics' options.
        batch: pictures at once; it does not change them.
        world: the processes that share the work.
    """

    store: Store
    encoder: VisionEncoder
    reference: Reference
    metrics: Sequence[str]
    how: How
    batch: int
    world: ProcessGroup = field(default_factory=ProcessGroup)

    def protocol(self, source: Source) -> Protocol:
        """How pictures are measured.

        Raises:
            DataError: they are of another size than the reference's.
        """
        about, encoder = self.reference.about, self.encoder
        if source.size != tuple(about.size):
            (a, b), (c, d) = source.size, about.size
            raise DataError(
                f"the pictures are {a}x{b}, those of the reference {c}x{d}", "bring both to one size"
            )
        return Protocol(
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

    def measure(self, source: Source) -> MeasuredPoint | None:
        """A point, measured if it is not known yet; None on all processes but the first."""
        return self.look(source)[0]

    def look(self, source: Source, keep: bool = False) -> tuple[MeasuredPoint | None, Kept | None, bool]:
        """The same, with its first samples if they are to be kept, and whether it was measured now.

        Raises:
            DataError: too few pictures, of another size, or with values that are no numbers.
        """
        protocol = self.protocol(source)
        how = replace(self.how, samples=len(source), seed=source.about.get("seed") or 0)
        key = f"{FOLDER}/{point_key(source.subject, protocol, settings_of(self.metrics, how))}"
        if source.reusable and self.world.once(lambda: self.store.exists(f"{key}.json")):
            kept = self._kept(key) if keep else None
            if kept is not None or not keep:
                return (
                    (MeasuredPoint.read(self.store, f"{key}.json") if self.world.first else None),
                    kept,
                    False,
                )
        return self._measured(key, source, how, protocol, keep)

    def _measured(
        self, key: str, source: Source, how: How, protocol: Protocol, keep: bool
    ) -> tuple[MeasuredPoint | None, Kept | None, bool]:
        start, watch = time.monotonic(), Watch(keep)
        reference = self.reference.features(self.encoder, self.batch, self.world)
        name, wanted = source.subject["name"], scorers(self.metrics)
        samples = extract(source, self.encoder, name, self.batch, self.world, wanted, watch)
        if samples is None or reference is None:
            return None, None, True
        kept = Kept.of(watch.pixels, samples.rows) if keep else None
        cost: dict[str, float | None] = {
            "seconds": round(time.monotonic() - start, 1),
            "processes": float(self.world.size),
            **(watch.cost(source) if isinstance(source, Drawn) else {}),
        }
        values = compute(self.metrics, how, samples, reference)
        point = MeasuredPoint(subject=source.subject, protocol=protocol, values=values, cost=cost)
        if kept is not None:
            self.store.put(f"{key}.safetensors", save_tensors(kept.tensors()))
        self.store.put_json(f"{key}.json", point.to_json())
        return point, kept, True

    def _kept(self, key: str) -> Kept | None:
        if not self.store.exists(f"{key}.safetensors"):
            return None
        try:
            return Kept.read(load_tensors(self.store.get(f"{key}.safetensors")))
        except SafetensorError:
            return None  # damaged: it is measured again


class Watch:
    """What is seen of batches as they are drawn: the first pictures, seconds, calls of experts and router.

    Args:
        keep: whether the first pictures are kept.
    """

    def __init__(self, keep: bool) -> None:
        self.keep, self.seconds = keep, 0.0
        self.pixels, self.traces = dict[int, Any](), list[Trace]()

    def __call__(self, batch: Batch) -> None:
        """Look at a batch."""
        self.seconds += batch.seconds
        if batch.trace is not None:
            self.traces.append(replace(batch.trace, weights=[]))
        if self.keep:
            self.pixels |= Kept.pixels_of(batch.numbers, batch.pictures)

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
