"""What a network learns from: rows, settings, what a sample's position draws; made one step ahead."""

import math
import platform
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from atoll.base.condition import Condition
from atoll.base.device import onto
from atoll.base.errors import DataError
from atoll.base.format import code_version
from atoll.base.preemption import leak_thread
from atoll.base.rng import normals, uniforms
from atoll.campaign.runs import Recipe
from atoll.campaign.settings.train import VALIDATION_TIMES
from atoll.data.columns import some_rows
from atoll.data.dataset import WEIGHTS, DataSet
from atoll.data.order import BucketOrder, Order
from atoll.data.samples import Samples
from atoll.data.settings import ConditionKind
from atoll.encoders.text import TextEncoder
from atoll.flow.objective import drop_condition, training_times
from atoll.flow.schedule import schedule
from atoll.model.card import Card, check_producers
from atoll.networks.families import parameter_count

CPU = torch.device("cpu")
POLL = 0.2  # seconds between looks at whether the run was told to leave
PATIENCE = 5.0  # seconds that a run which ends waits for the batch in hand


@dataclass(frozen=True)
class Batch:
    """What the samples of one step bring, on the device that trains."""

    x0: Tensor  # latents (B, C, H, W)
    cond: Condition  # dropped ones are the null condition
    eps: Tensor  # noise like the latents
    t: Tensor  # times (B,)
    clusters: Tensor | None = None  # of each sample (B,), for router and student
    positions: tuple[tuple[int, int], ...] = ()  # of each sample in the random streams, for a teacher
    made: torch.cuda.Event | None = None  # when a GPU has all of it

    def here(self) -> "Batch":
        """The same, for the current stream: it waits for the one that made the batch; the host does not."""
        if self.made is not None:
            stream = torch.cuda.current_stream(self.x0.device)
            stream.wait_event(self.made)
            # Else memory would be given to the next batch while this stream still reads it.
            for part in (self.x0, self.eps, self.t, self.clusters, *self.cond.parts().values()):
                if part is not None:
                    part.record_stream(stream)
        return self


@dataclass(frozen=True)
class TrainingRows:
    """The rows of one run, how it learns from them, and what made their columns."""

    train: Samples
    heldout: Samples  # may be none
    recipe: Recipe
    latents: dict[str, Any]  # what made them, for previews and the card
    text: dict[str, Any] | None  # what made the text states, likewise
    clusters: Tensor | None = None  # of every row of the data set (rows,), where batches are to have them
    pure_noise: float = 0.0  # share of the samples at exactly t = 1
    device: torch.device = CPU  # where batches lie

    @classmethod
    def of(
        cls,
        dataset: DataSet,
        condition: ConditionKind,
        recipe: Recipe,
        *,
        clusters: bool = False,
        encoder: TextEncoder | None = None,
    ) -> "TrainingRows":
        """Both splits of a data set; `DataError` if its columns do not say what made them."""
        splits = (dataset.split(name) for name in ("train", "heldout"))
        train, heldout = (Samples(dataset, rows, condition, recipe.plan.shape, encoder) for rows in splits)
        known = dataset.column("clusters").read(range(len(dataset))).long() if clusters else None
        producers = dataset.producers("text" if encoder is None else "tokens")
        check_producers(*producers, recipe.plan.shape)
        return cls(train, heldout, recipe, *producers, known)

    @cached_property
    def order(self) -> Order | BucketOrder:
        """Which row each position of the run sees."""
        dataset, plan = self.train.dataset, self.recipe.plan
        if plan.weighted:
            dataset.column(WEIGHTS)  # without it all rows would count 1, and another order would be trained
        weights = dataset.weights[self.train.rows] if plan.weighted else None
        if self.train.buckets is not None:
            return BucketOrder(self.train.buckets, plan.batch, plan.seed, dataset.id_hash, weights)
        if weights is not None:
            return Order.weighted(weights, plan.seed, dataset.id_hash)
        return Order(len(self.train), plan.seed, dataset.id_hash)

    def batch(self, positions: range) -> Batch:
        """The samples at these positions of the run, with noise, times and dropout of their own."""
        # Each draw has a stream of its own, by position: a new one shifts no other, and neither the batch,
        # nor the rank, nor the number of processes shows in what a sample gets.
        index, objective = self.order.at(positions), self.recipe.objective
        seed, where = self.recipe.plan.seed, list(positions)
        x0 = self.train.latents(index)
        u, tokens = uniforms(seed, "time", where), math.prod(x0.shape[2:]) / 4
        t = training_times(objective.time, u, schedule(objective.schedule), tokens)
        if self.pure_noise:  # a time drawn from a density is never exactly 1
            t = torch.where(uniforms(seed, "pure-noise", where) < self.pure_noise, 1.0, t)
        cond = self.train.stored(index, lambda: uniforms(seed, "caption", where))
        eps = normals(seed, "noise", where, x0.shape[1:])
        batch = Batch(x0, cond, eps, t, *self._taught(self.train, index, seed, positions))
        dropout, batch = uniforms(seed, "dropout", where), self._there(batch, self.train)
        cond = drop_condition(batch.cond, self.null, onto(dropout, self.device), objective.condition_dropout)
        made = None if self.device.type == "cpu" else torch.cuda.current_stream(self.device).record_event()
        return replace(batch, cond=cond, made=made)

    def _there(self, batch: Batch, samples: Samples) -> Batch:
        # On the device, with whole conditions. Text states go there in half and without padding: to widen
        # those of T5-XXL, the thread that reads would write 60 MiB for every 32 samples.
        parts = vars(batch).items()
        there: dict[str, Any] = {k: onto(p, self.device) for k, p in parts if isinstance(p, Tensor)}
        there["cond"] = samples.whole(batch.cond.map(lambda part: onto(part, self.device)))
        return replace(batch, **there)

    @cached_property
    def null(self) -> Condition:
        """The null condition, on the device."""
        return self.train.null.to(self.device)

    def validation(
        self, times: Sequence[float] = VALIDATION_TIMES, at_once: int | None = None
    ) -> list[list[Batch]]:
        """The same held-out samples at each time, in batches of one shape of latents, without dropout."""
        # Evenly spread, as data of several islands lie one after the other.
        chosen = some_rows(np.arange(len(self.heldout)), self.recipe.train.validation_rows)
        if not len(chosen):
            return []
        parts, first = list[Batch](), 0
        for index in self.heldout.by_shape(chosen, at_once or len(chosen)):
            positions = range(first, first + len(index))
            x0, cond = self.heldout.latents(index), self.heldout.stored(index)
            eps, t = normals(0, "validation", positions, x0.shape[1:]), torch.empty(len(index))
            batch = Batch(x0, cond, eps, t, *self._taught(self.heldout, index, 0, positions))
            parts.append(self._there(batch, self.heldout))
            first = positions.stop
        # The same draws at every time, so that only the noise level differs between losses.
        return [[replace(part, t=torch.full_like(part.t, time)) for part in parts] for time in times]

    def _taught(
        self, samples: Samples, index: NDArray[np.int64], seed: int, positions: range
    ) -> tuple[Tensor | None, tuple[tuple[int, int], ...]]:
        # Clusters and places in the random streams, for those who learn from them.
        clusters = None if self.clusters is None else self.clusters[torch.from_numpy(samples.rows[index])]
        return clusters, tuple((seed, position) for position in positions)

    def card(self, network: nn.Module, seconds: float) -> Card:
        """What the finished network says of itself; a student also says who its teachers were."""
        plan, objective, settings = self.recipe.plan, self.recipe.objective, self.recipe.network
        return Card(
            role=plan.role,
            island=plan.island,
            family=settings.get("family", plan.role),
            prediction=objective.prediction,
            schedule=objective.schedule,
            condition=self.train.condition,
            partition=plan.partition,
            latents=self.latents,
            text=self.text,
            shape=plan.shape,
            parameters=parameter_count(network),
            rows=plan.rows,
            samples=plan.samples,
            batch=plan.batch,
            train_flops=plan.train_flops,
            forward_flops=plan.forward_flops,
            # A run that changes a network starts from it: its `init/` holds that network's file.
            base=(plan.init_sha256 or "") if settings.get("lora") else "",
            sampling=self.recipe.sampling,
            provenance={
                "atoll": code_version(),
                "torch": torch.__version__,
                "machine": platform.machine(),
                "threads": self.recipe.train.threads,
                "seed": plan.seed,
                "init": {"kind": plan.init, **plan.init_origin},
                "initial_weights": plan.init_sha256,
                "data": self.train.dataset.id_hash,
                "seconds": round(seconds, 1),
                "peak_lr": self.recipe.train.lr,
                **({"student": settings["student"]} if "student" in settings else {}),
            },
        )


class Prefetcher:
    """Makes batches in order, two steps ahead, on a GPU in its own stream; a step waits `limit` seconds."""

    def __init__(
        self, make: Callable[[int], list[Any]], begin: int, batch: int, limit: float, device: str = "cpu"
    ) -> None:
        self.make, self.begin, self.batch, self.limit = make, begin, batch, limit
        self._stream = torch.cuda.Stream() if device == "cuda" else None
        # Two steps ahead and no more: a batch of latents may be gigabytes, and data that lag behind lag
        # anyway.
        self._made: queue.Queue[list[Any] | BaseException] = queue.Queue(maxsize=2)
        self._stopped = threading.Event()
        # A daemon: one that hangs in a dead file system must not keep the process from leaving.
        self._thread = threading.Thread(target=self._run, daemon=True, name="data")

    def __enter__(self) -> "Prefetcher":
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stopped.set()
        self._thread.join(PATIENCE)
        if self._thread.is_alive():
            leak_thread(self._thread)

    def next(self, stop_requested: Sequence[object]) -> list[Any] | None:
        """The next step's batches; None if the run is told to leave before they are there."""
        deadline = time.monotonic() + self.limit
        while True:
            try:
                batch = self._made.get(timeout=min(POLL, self.limit))
            except queue.Empty:
                if stop_requested:
                    return None
                if time.monotonic() > deadline:
                    what = f"data of the step at sample {self.begin:,} did not come within {self.limit:g} s"
                    raise DataError(what, "the store or disk hangs: mend it and run this again") from None
                continue
            if isinstance(batch, BaseException):
                raise batch
            self.begin += self.batch
            return batch

    def _run(self) -> None:
        # Here, since the number is the thread's own: a second team of OpenMP threads would spin beside that
        # of the step, on the same cores.
        torch.set_num_threads(1)
        begin = self.begin
        while not self._stopped.is_set():
            batch: list[Any] | BaseException
            try:
                with torch.cuda.stream(self._stream):  # nothing without one
                    batch = self.make(begin)
            except BaseException as error:  # `next` raises it: an exception in a thread would be lost
                batch = error
            while not self._stopped.is_set():
                with suppress(queue.Full):
                    self._made.put(batch, timeout=POLL)
                    break
            if isinstance(batch, BaseException):
                return
            begin += self.batch
