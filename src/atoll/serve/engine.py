"""The engine: one thread that owns the models and torch, and steps the pictures of all requests together.

It is a queue in front of one `Sampler` a model. Between two steps pictures that are done leave, those of
cancelled requests are dropped, and new ones join. Nothing else in `serve/` touches torch.
"""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from PIL import Image

from atoll.base.console import say
from atoll.base.device import using_threads
from atoll.base.errors import AtollError, ConfigError, first_line
from atoll.base.preemption import leak_thread
from atoll.base.text import Size, parse_size
from atoll.model.generation import Generation
from atoll.model.model import Model
from atoll.model.sampler import Row, Sampler
from atoll.serve.metrics import Metrics
from atoll.serve.settings import ServeSettings

LOADING, WARMING, READY, DRAINING, FAILED = "loading", "warming", "ready", "draining", "failed"
IDLE = 0.5
"""Seconds that an idle engine sleeps before it looks for deadlines."""
SLICE = 8
"""Steps that rows of the same experts take while those of experts that are not on the device wait."""


@dataclass(frozen=True)
class Drawn:
    """A picture that is done, and who served it from which step on; with an index a partial one."""

    number: int
    image: Image.Image
    index: int | None = None
    routing: list[dict[str, Any]] | None = None


@dataclass(frozen=True)
class Failed:
    """A request that ends without its pictures; `repeats`: the same request would fail again."""

    code: str
    message: str
    repeats: bool = True


STOPPED = Failed("server_stopped", "the server stopped", repeats=False)
Event = Drawn | Failed
Lane = tuple[str, torch.Size]
"""Name of a model and shape of its latents: what the rows of one batch have in common."""


@dataclass(eq=False)
class Job:
    """One request.

    Attributes:
        prompts: one text or label, or none for an unconditional model.
        tell: takes events, on the engine's thread; it must not wait.
        work: pixels x steps.
        deadline: when it is given up, by `time.monotonic`, as all its times.
        cancelled: set by whoever no longer wants it.
        failed: code of its failure, if it failed.
        waiting: pictures that are still to come.
    """

    model: str
    prompts: tuple[str, ...]
    generation: Generation
    tell: Callable[[Event], None]
    negative: str = ""
    count: int = 1
    partial: int = 0
    work: float = 0.0
    deadline: float = float("inf")
    cancelled: bool = False
    failed: str = ""
    started: float | None = field(default=None, init=False)
    waiting: int = field(default=0, init=False)
    accepted: float = field(default_factory=time.monotonic, init=False)

    def __post_init__(self) -> None:
        self.waiting = self.count


@dataclass(eq=False)
class Picture:
    """A picture of a request in flight, the owner of a sampler's row; `partial`: steps that are shown."""

    job: Job
    number: int
    partial: tuple[int, ...]
    routing: list[dict[str, Any]] | None = None


class Refused(Exception):
    """A request that is not accepted now, and the seconds after which to try again."""

    def __init__(self, code: str, message: str, after: float) -> None:
        self.code, self.message, self.after = code, message, after
        super().__init__(message)


class Engine:
    """Draws what is submitted.

    Args:
        models: by name what loads them; the first is the default.

    Attributes:
        opened: the models, once they are loaded.
        sizes: those that each model draws; the first is its default.
        error: why it failed.
    """

    def __init__(
        self, models: Mapping[str, Callable[[], Model]], settings: ServeSettings, metrics: Metrics
    ) -> None:
        self.settings, self.metrics, self.state = settings, metrics, LOADING
        self.opened: dict[str, Model] = {}
        self.sizes: dict[str, list[Size]] = {}
        self.error: Exception | None = None
        self.names = list(models)
        self._models = models
        self._arrivals: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._pending: deque[Sampler] = deque()
        self._running: dict[Lane, Sampler] = {}
        self._turns: dict[Lane, int] = {}
        self._batch = settings.batch
        # Work is pixels x steps; other threads add to what is outstanding, the engine takes from it.
        self._lock, self._outstanding, self._rate = threading.Lock(), 0.0, 0.0
        self._stop, self._done = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # What other threads call.

    def start(self) -> None:
        """Load the models and draw from then on, in a thread of its own."""
        self._thread.start()

    def about(self, name: str, routing: str = "") -> dict[str, Any] | None:
        """Sizes, condition, experts and defaults of a model, for clients; None until it is loaded."""
        if name not in self.sizes:
            return None
        model, sizes = self.opened[name], [f"{width}x{height}" for width, height in self.sizes[name]]
        how = model.generation.for_condition(model.card.condition)
        facts: dict[str, Any] = {"size": sizes[0], "sizes": sizes, "condition": model.card.condition}
        facts |= {"steps": how.steps, "guidance": how.guidance}
        if model.bank.router is not None:
            facts |= {"routing": routing or str(how.routing), "experts": model.bank.k}
        return facts

    def submit(self, job: Job) -> None:
        """Accept a request, counted before anything of it is computed.

        `Refused` while not ready or full; `ConfigError` for more than ever may wait.
        """
        if self.state != READY:
            raise Refused(self.state, f"the server is {self.state}", 5.0)
        # Bounded by work, not by requests: a picture of 250 steps is as long a wait as five of 50.
        job.work = self._work(job.model, job.generation, job.count)
        usual = (self._work(name, model.generation, 1) for name, model in self.opened.items())
        capacity = self.settings.queue * max(usual)
        if job.work > capacity:
            what = "the request is more than this server ever accepts"
            raise ConfigError(what, "ask for fewer steps or pictures")
        with self._lock:
            over = self._outstanding + job.work - capacity
            if over > 0:
                self.metrics.rejected.labels("queue_full").inc()
                seconds = min(120.0, max(1.0, over / self._rate)) if self._rate else 1.0
                raise Refused("queue_full", "as much as this server accepts is waiting", seconds)
            self._outstanding += job.work
        self.metrics.waiting.inc(job.count)
        self._arrivals.put(job)  # the engine's thread encodes the texts: torch belongs to it alone

    def _work(self, name: str, generation: Generation, count: int) -> float:
        width, height = parse_size(generation.size) if generation.size else self.sizes[name][0]
        return float(width * height * generation.steps * count)

    def drain(self, seconds: float) -> bool:
        """Accept nothing more, and wait until what was accepted is done; whether it is."""
        loading = self.state in (LOADING, WARMING)
        self.state = DRAINING if self.state == READY else self.state
        end = time.monotonic() + seconds
        while time.monotonic() < end and self._outstanding > 0:
            time.sleep(0.02)
        done = self._outstanding <= 0
        self._stop.set()
        if not self._done.wait(0 if loading else 5):
            leak_thread(self._thread)
        return done

    # What only the engine's thread calls.

    def _run(self) -> None:
        try:
            with using_threads(self.settings.threads):
                for name, load in self._models.items():
                    self.opened[name] = load()
                # One picture of each in one step: what is loaded at first use is there, and sizes are known.
                self.state = WARMING
                for name, model in self.opened.items():
                    prompt = {"text": ("a",), "class": ("0",), "none": ()}[model.card.condition]
                    job = Job(name, prompt, model.generation.with_(steps=1), tell=lambda event: None)
                    size = model.pictures(_begin(job, model).run())[0].size
                    self.sizes[name] = [size, *(other for other in model.sizes if other != size)]
                self.state = READY
                while not self._stop.is_set():
                    self._turn()
        except Exception as error:
            self.error, self.state = error, FAILED
        finally:
            jobs = {row.owner.job for one in (*self._running.values(), *self._pending) for row in one.rows}
            while not self._arrivals.empty():
                jobs.add(self._arrivals.get())
            for job in jobs:
                self._fail(job, STOPPED)
            self._done.set()

    def _turn(self) -> None:
        """Take arrivals, then one step for all rows."""
        busy = bool(self._running or self._pending)
        with suppress(queue.Empty):
            while True:
                job = self._arrivals.get(timeout=0 if busy else IDLE)
                busy = True
                if self._gone(job):
                    continue
                try:
                    self._pending += self._cut(_begin(job, self.opened[job.model]))
                except AtollError as error:
                    self._fail(job, Failed("invalid_request", str(error)))
                except Exception as error:
                    self._broke(job, f"the request cannot be set up: {first_line(error)}")

        # Rows that nobody waits for any more go before a step is spent on them.
        for lane, sampler in list(self._running.items()):
            self._keep(lane, self._wanted(sampler))
        self._pending = deque(_rows(one, kept) for one in self._pending if (kept := self._wanted(one)))

        # What waits longest joins the rows of its model and size, as far as there is room.
        waiting: deque[Sampler] = deque()
        full = set[Lane]()
        for sampler in self._pending:
            lane = _lane(sampler)
            there = self._running.get(lane)
            # Where one has no room, none after it has: a large request would else wait for ever.
            if lane in full or (there is not None and len(there.rows) + len(sampler.rows) > self._batch):
                full.add(lane)
                waiting.append(sampler)
            elif not all(one.can_join(sampler, one.bank.capacity) for one in self._of_model(lane[0])):
                waiting.append(sampler)
            else:
                for job in {row.owner.job for row in sampler.rows if row.owner.job.started is None}:
                    job.started = time.monotonic()
                    self.metrics.queue_wait.observe(job.started - job.accepted)
                self._running[lane] = sampler if there is None else Sampler.merge([there, sampler])
        self._pending = waiting

        for lane, sampler in list(self._running.items()):
            started, rows = time.monotonic(), len(sampler.rows)
            jobs = [(row.owner.job, row.generation.steps) for row in sampler.rows]
            self._advance(lane)
            seconds = time.monotonic() - started
            # How fast work is done says when to come again, so it follows the machine smoothly.
            rate = sum(job.work / job.count / steps for job, steps in jobs) / max(seconds, 1e-9)
            self._rate = rate if not self._rate else 0.9 * self._rate + 0.1 * rate
            self.metrics.steps.observe(seconds)
            self.metrics.batch.observe(rows)
            banks = [model.bank.experts for model in self.opened.values()]
            self.metrics.moved(*(sum(getattr(b, of, 0) for b in banks) for of in ("loads", "loaded_bytes")))

    def _cut(self, sampler: Sampler) -> list[Sampler]:
        """The rows in parts that fit a batch."""
        numbers = range(len(sampler.rows))
        return [_rows(sampler, numbers[n : n + self._batch]) for n in numbers[:: self._batch]]

    def _wanted(self, sampler: Sampler) -> list[int]:
        return [n for n, row in enumerate(sampler.rows) if not self._gone(row.owner.job)]

    def _gone(self, job: Job) -> bool:
        if job.waiting and job.cancelled:
            self.metrics.cancelled.labels("queue" if job.started is None else "step").inc()
            self._release(job)
        elif job.waiting and time.monotonic() > job.deadline:
            self._fail(job, Failed("deadline_exceeded", "the request took longer than this server allows"))
        return not job.waiting

    def _of_model(self, name: str) -> list[Sampler]:
        return [sampler for lane, sampler in self._running.items() if lane[0] == name]

    def _advance(self, lane: Lane) -> None:
        """One step of the rows of a model and size."""
        sampler = self._running[lane]
        turn = sampler.experts  # of the rows that were there before: those that begin have none yet
        try:
            _step(sampler)
        except torch.OutOfMemoryError as error:
            # Fewer rows from now on; those that have no room wait for it, before everybody else.
            del self._running[lane]
            count = len(sampler.rows)
            if count == 1:
                failure = Failed("out_of_memory", "there is not enough memory for this request")
                return self._fail(sampler.rows[0].owner.job, failure)
            self._batch = max(1, min(self._batch, count) // 2)
            say(f"memory ran out with {count} rows: {self._batch} from now on ({first_line(error)[:80]})")
            self._pending = deque(part for one in (sampler, *self._pending) for part in self._cut(one))
            return
        except Exception:
            # Each row alone, so that only the request falls whose row cannot be evaluated.
            self.metrics.failed_batches.inc()
            whole = []
            for n, row in enumerate(sampler.rows):
                if not row.owner.job.waiting:
                    continue
                alone = sampler.take([n])
                try:
                    _step(alone)
                except Exception as error:
                    self._broke(row.owner.job, f"it failed at step {row.step}: {first_line(error)}")
                else:
                    whole.append(alone)
            whole = [alone for alone in whole if alone.rows[0].owner.job.waiting]
            if not whole:
                del self._running[lane]
                return
            self._running[lane] = sampler = Sampler.merge(whole)
        self.metrics.count(sampler)

        # Partial and finished pictures are handed out; rows that are done leave.
        model, kept = self.opened[lane[0]], list[int]()
        for n, row in enumerate(sampler.rows):
            if row.step == row.generation.steps:
                self._give(model, row, sampler.x[n : n + 1], None)
                continue
            for index, step in enumerate(row.owner.partial):
                if step == row.step - 1:
                    self._give(model, row, sampler.estimates([n]), index)
            kept.append(n)
        self._keep(lane, [n for n in kept if sampler.rows[n].owner.job.waiting])
        self._share(lane, turn)

    def _share(self, lane: Lane, turn: frozenset[int]) -> None:
        """Where not all experts stay on the device: rows of the same ones step, others wait their turn.

        Every row would else want its own expert at each step, and experts would be brought at each.
        """
        sampler = self._running.get(lane)
        if sampler is None or sampler.bank.capacity >= sampler.bank.k:
            return
        stay, leave = sampler.split(sampler.bank.capacity, turn)
        waiting = any(one.experts for one in self._pending if _lane(one)[0] == lane[0])
        self._turns[lane] = self._turns.get(lane, 0) + 1
        # Rows of other sizes have the same experts' places: a size that just began gives way to them.
        crowded = not all(one.can_join(sampler, one.bank.capacity) for one in self._of_model(lane[0]))
        if crowded or (self._turns[lane] >= SLICE and (waiting or leave)):
            stay, leave, self._turns[lane] = [], [*leave, stay], 0
        if leave:
            # Rows under way go on before new ones begin, those that have waited longest first.
            order = [*self._pending, *(sampler.take(group) for group in leave)]
            self._pending = deque(sorted(order, key=lambda one: not one.experts))
            self._keep(lane, stay)

    def _give(self, model: Model, row: Row, latent: torch.Tensor, index: int | None) -> None:
        """Hand a picture to who asked for it; with an index, a partial one."""
        picture: Picture = row.owner
        job, number = picture.job, picture.number
        # Who left during this step has no row in a later one, where it would be noticed.
        if not job.waiting or (job.cancelled and self._gone(job)):
            return
        try:
            image = model.pictures(latent, [number])[0]
        except AtollError as error:
            return self._fail(job, Failed("broken_picture", str(error)))
        except Exception as error:
            return self._broke(job, f"the picture cannot be decoded: {first_line(error)}")
        if index is not None:
            return job.tell(Drawn(number, image, index))
        job.waiting -= 1
        self.metrics.images.labels(job.model).inc()
        if not job.waiting:
            self.metrics.latency.observe(time.monotonic() - job.accepted)
            self._release(job)
        job.tell(Drawn(number, image, None, picture.routing))

    def _keep(self, lane: Lane, kept: Sequence[int]) -> None:
        sampler = self._running.pop(lane)
        if kept:
            self._running[lane] = _rows(sampler, kept)

    def _broke(self, job: Job, reason: str) -> None:
        try:
            torch.zeros(1, device=self.opened[job.model].device).tolist()
        except Exception:  # the device is lost, which ends the engine: a new process has to come
            self._fail(job, STOPPED)
            raise
        self._fail(job, Failed("internal_error", reason))

    def _fail(self, job: Job, failure: Failed) -> None:
        if job.waiting:
            job.failed = failure.code
            self.metrics.failed.labels(failure.code).inc()
            self._release(job)
            job.tell(failure)

    def _release(self, job: Job) -> None:
        """A request is over: its work no longer counts."""
        self.metrics.waiting.dec(job.count)
        job.waiting = 0
        with self._lock:
            self._outstanding = max(0.0, self._outstanding - job.work)


def _lane(sampler: Sampler) -> Lane:
    return sampler.rows[0].owner.job.model, sampler.x.shape[1:]


def _rows(sampler: Sampler, kept: Sequence[int]) -> Sampler:
    # All of them are not copied: this is asked of every batch before every step.
    return sampler if len(kept) == len(sampler.rows) else sampler.take(kept)


def _begin(job: Job, model: Model) -> Sampler:
    """A request's pictures before their first step; `ConfigError` if they do not fit the model."""
    sampling = model.sampling(model.conditions(job.prompts, job.negative, each=job.count), job.generation)
    sampler, steps = sampling.start(model.bank, range(job.count)), job.generation.steps
    # Spread evenly, none of them after the last step: that one is the picture.
    partial = sorted({steps * (n + 1) // (job.partial + 1) - 1 for n in range(job.partial)} - {-1})
    for number, row in enumerate(sampler.rows):
        row.owner = Picture(job, number, tuple(partial))
    return sampler


@torch.inference_mode()
def _step(sampler: Sampler) -> None:
    """Take a step, and write down which experts served, where that changed, and what the router answered."""
    sampler.advance()
    if sampler.bank.router is None:
        return
    assert sampler.weights is not None
    weights, logits = sampler.weights.tolist(), sampler.logits
    probabilities = None if logits is None else logits.float().softmax(dim=1).cpu().tolist()
    for n, row in enumerate(sampler.rows):
        picture, step = row.owner, row.step - 1
        # Rounded, since a client reads them: a hundred steps would else be the larger part of an answer.
        experts = {str(k): round(w, 4) for k, w in enumerate(weights[n]) if w}
        asked = row.generation.routing.asks_at(step)
        if asked or not picture.routing or picture.routing[-1]["experts"] != experts:
            entry: dict[str, Any] = {"step": step, "experts": experts}
            if asked and probabilities is not None:
                entry["probabilities"] = [round(p, 4) for p in probabilities[n]]
            picture.routing = [*(picture.routing or []), entry]
