"""The training loop. There is one; what differs between networks is their `Task`."""

import json
import math
import time
import uuid
from contextlib import ExitStack, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from atoll.base.console import Progress, say
from atoll.base.device import using_threads
from atoll.base.errors import AtollError, StoreError
from atoll.base.preemption import Interrupted, catch_signals
from atoll.base.processes import ProcessGroup, joined
from atoll.base.safe_parse import read_json
from atoll.base.text import duration
from atoll.campaign.publication import promote, publish_network
from atoll.campaign.runs import MetricsLine
from atoll.campaign.settings.train import TrackingConfig
from atoll.model.checkpoint import Checkpoint
from atoll.networks.cost import Float32
from atoll.networks.families import kept_buffers
from atoll.networks.lora import own, trainable
from atoll.store.lease import Heart, Heartbeat, acquire, new_holder, read_heartbeat
from atoll.store.log import Fenced, Log
from atoll.store.store import Absent, Store
from atoll.train.loggers import RunInfo, Trackers
from atoll.train.parallel import StepSharding, whole
from atoll.train.rows import Batch, Prefetcher
from atoll.train.state import WRITES_APART, Ema, Guard, Saver, TrainState, resume
from atoll.train.tasks import Task


def train(
    task: Task, store: Store, name: str, *, wait: bool = False, tracking: TrackingConfig | None = None
) -> None:
    """Train to the end, or go on where an earlier process stopped; alone or as one rank of `torchrun`.

    The store is narrowed to the run's own folder (`islands/K`, `router`, `monolith`). With `wait` it waits
    while another living process holds the run, instead of leaving.

    Raises:
        Interrupted: SIGTERM or SIGINT came; the state is saved.
        Held: another living process holds the run.
        Fenced: another process took the run over.
        AtollError: too many steps in a row were skipped; data or another rank did not come.
    """
    settings = task.rows.recipe.train
    with using_threads(settings.threads), joined(settings.parallel.collective_timeout_s) as group:
        _Run(task, store, name, group).go(wait, tracking or TrackingConfig())


class _Run:
    def __init__(self, task: Task, store: Store, name: str, group: ProcessGroup) -> None:
        self.task, self.store, self.name, self.group = task, store, name, group
        self.recipe = task.rows.recipe
        self.settings, self.plan, self.learned = self.recipe.train, self.recipe.plan, self.recipe.learned()
        settings, network, cpu = self.settings, task.network, group.device.type == "cpu"
        self.autocast = settings.precision == "bf16" or (settings.precision == "auto" and not cpu)
        parallel = settings.parallel.decided(cpu, self.plan.train_flops / group.size)
        self.sharding = StepSharding(network, parallel, group, self.plan.batch, self.autocast)
        if parallel.micro_batch or not cpu:  # a GPU that has room for a step's samples need not have for more
            task.at_once = self.sharding.at_once
        self.precision = torch.autocast(group.device.type, torch.bfloat16, enabled=self.autocast)
        # On a CPU bf16 makes the backward pass of attention six times slower, though all the rest is faster.
        # Not for networks that compute activations again: backward passes, which do so, lie outside of it.
        wide = self.autocast and cpu and not self.sharding.recomputes
        self.attention = Float32(scaled_dot_product_attention) if wide else nullcontext()
        self.forward = self.sharding.wrap(task.step)
        self.parameters = list(trainable(network).values())
        optimizer = torch.optim.AdamW(
            self.parameters,
            lr=settings.lr,
            betas=settings.betas,
            weight_decay=settings.weight_decay,
            fused=True,  # one pass over the weights: on a CPU at small batches a third of a step's time
        )
        ema = Ema(network, settings.ema_half_life * self.plan.samples, settings.ema_warmup)
        self.state = TrainState(network, ema, optimizer, Guard(settings.guard))
        self.run = store.sub("run")
        self.log = Log(self.run, group.once(new_holder))
        self.saver = Saver(self.run, self.log, self.learned, settings.keep, group)
        self.trackers: Trackers | None = None
        self.loss, self.speed, self.phase = float("nan"), 0.0, "starting"

    def go(self, wait: bool, tracking: TrackingConfig) -> None:
        with catch_signals() as stop_requested:
            if not self.group.once(lambda: self._acquire(wait, stop_requested)):
                self.group.once(lambda: promote(self.store, self.log))
                self._say(f"{self.name}: finished already")
                return
            try:
                with ExitStack() as stack:
                    # Closed last: a write that is under way when the run ends, whatever ended it, is a
                    # checkpoint that the next process goes on from.
                    stack.callback(self.saver.close)
                    before = read_heartbeat(self.run) if self.group.first else None  # ours replaces it
                    self.heart = Heart(self.log, self.settings.lease, self._signs)
                    if self.group.first:
                        stack.enter_context(self.heart)
                    self._resume(before)
                    if self.group.first and (tracking.tensorboard or tracking.wandb != "off"):
                        self.trackers = Trackers()
                        stack.callback(self.trackers.close)
                        info = RunInfo(
                            id=self.state.tracker,
                            name=self.name,
                            role=self.plan.role,
                            start=sum(entry.kind == "acquire" for entry in self.log.entries()),
                            step=self.state.step,
                            settings=self.recipe.model_dump(mode="json"),
                        )
                        self.trackers.open(tracking, self.run, self.log.holder, info)
                    self._steps(stop_requested)
                    self._publish()
            except BaseException as error:
                # If the run is another's by now, a release of ours would stand in the log after its acquire,
                # and look as if that one had left.
                if self.group.first and not isinstance(error, Fenced):
                    failed = {"reason": "failed", "error": str(error) or type(error).__name__}
                    why = {"reason": "left"} if isinstance(error, Interrupted) else failed
                    try:
                        self.log.append("release", step=self.state.step, **why)
                    except StoreError as unsaid:  # the lease runs out by itself; the first error is the news
                        say(f"warning: {unsaid}")
                raise

    # Before and after.

    def _acquire(self, wait: bool, stop_requested: list[int]) -> bool:
        def pause(seconds: float) -> None:
            time.sleep(seconds)
            if stop_requested:
                raise Interrupted(f"{self.name} was told to leave while it waited", "run it again to go on")

        # The first start named the run for trackers; a restart under another name would be another curve.
        first = next((e for e in self.log.entries() if e.tracker), None)
        self.state.tracker = first.tracker if first else uuid.uuid4().hex[:8]
        about = {"tracker": self.state.tracker, "threads": self.settings.threads, "ranks": self.group.size}
        return acquire(self.log, self.settings.lease, wait=wait, pause=pause, **about)

    def _resume(self, before: Heartbeat | None) -> None:
        state = self.state
        resumed = resume(state, self.run, self.log, self.learned, self.group)
        if resumed:
            self.saver.committed = state.step
            self._say(f"{self.name}: resumed at step {state.step:,} of {self.plan.steps:,}")
        if self.group.first:
            # The heartbeat tells how far the process before came, its last commit what of that is left.
            reached = (before.step or 0) if before else 0
            if reached or resumed:
                self.log.append("resume", step=state.step, lost=max(0, reached - state.step))
            # Lines of metrics.jsonl that an interrupted process wrote after its last commit are logged anew.
            try:
                text = self.run.get("metrics.jsonl")
            except Absent:  # a run that was stopped before its first line
                text = b""
            for line in text.decode(errors="replace").splitlines():
                try:
                    known = MetricsLine.of_json(read_json(line), "metrics.jsonl")
                except (ValueError, AtollError):
                    say(f"warning: a damaged line of metrics.jsonl is left out: {line[:60]!r}")
                else:
                    state.metrics += [known] if known.step <= state.step else []

    def _publish(self) -> None:
        self.phase = "publishing"
        state, network = self.state, self.task.network
        # The average is what is published. Gathering is a collective: every rank takes part, tensor by
        # tensor, so that no GPU ever holds the whole network twice, and rank 0 alone keeps the result.
        kept = own(network, {**state.ema.weights, **kept_buffers(network)})
        gathered = ((name, whole(tensor)) for name, tensor in kept.items())
        weights = {name: tensor.cpu() for name, tensor in gathered if self.group.first}

        def write(store: Store, prefix: str) -> None:
            Checkpoint(store, prefix).write(network, weights, self.task.rows.card(network, state.seconds))

        def publish() -> None:
            publish_network(self.run, self.log, state.step, write)
            promote(self.store, self.log)

        self.group.once(publish)
        self._say(f"{self.name}: finished, {self.plan.samples:,} images in {duration(state.seconds)}")

    def _signs(self) -> dict[str, Any]:
        state = self.state  # for the heartbeat
        return {
            "phase": self.phase,
            "step": state.step,
            "steps": self.plan.steps,
            "samples": state.samples,
            "loss": self.loss if math.isfinite(self.loss) else None,
            "speed": round(self.speed, 3),
            "skipped": state.guard.skipped,
            "committed": max(0, self.saver.committed),
            "ranks": self.group.size,
        }

    def _say(self, message: str) -> None:
        if self.group.first:
            say(message)

    # The loop.

    def _steps(self, stop_requested: list[int]) -> None:
        state, settings, plan, sharding = self.state, self.settings, self.plan, self.sharding
        progress = Progress(self.name, plan.samples, state.samples, "images")
        first, start, saved = state.samples, time.monotonic(), time.monotonic()
        self.task.network.train()

        # A step's data follow from its position alone (row, noise, time, dropout). That is why batches can
        # be made ahead in a thread, why a resumed run is the same to the bit, and why the number of
        # processes does not show in what the network sees.
        def make(begin: int) -> list[tuple[float, Batch]]:
            parts = sharding.parts(begin) if begin < plan.samples else []
            return [(sharding.weight(part), self.task.batch(part)) for part in parts]

        ahead = state.samples, plan.batch, settings.data_timeout_s, self.group.device.type
        with Prefetcher(make, *ahead) as prefetcher:
            while state.step < plan.steps:
                self.phase = "training"
                started = time.monotonic()
                batches = prefetcher.next(stop_requested)

                # All ranks agree, by one sum before the step, whether to leave or save: both are collectives,
                # which one rank alone would wait in for ever. A signal may reach one rank only, and a rank
                # without data has been told to leave while it waited.
                every = settings.checkpoint_every_s
                every = max(every, WRITES_APART * self.saver.seconds) if every else 0.0
                due = self.group.first and time.monotonic() - saved > every
                told = batches is None or bool(stop_requested)
                leave, save, writing = self.group.sum([*map(float, (told, due, self.saver.writing))])
                if not writing:
                    self.saver.settle()
                if leave:
                    self._save()
                    # All wait for each other here: `torchrun` ends all processes of a run as soon as one
                    # of them is gone, and the writes of the others with them.
                    self.saver.settle(fatal=True)
                    where = f"step {state.step:,} of {plan.steps:,}"
                    if self.group.first:
                        raise Interrupted(f"{self.name} left at {where}", "run it again to go on")
                    raise SystemExit(Interrupted.exit_code)
                if save and not writing:  # else training would wait for the files of the last one
                    self._save()
                    saved = time.monotonic()
                # Still ours? A process that was held up for longer than its lease has been taken over; it
                # must stop before it spends another step, though the log would refuse its commits anyway.
                if self.group.first:
                    self.heart.check()

                assert batches is not None
                metrics = self._step(batches)
                state.seconds += time.monotonic() - started
                self.speed = (state.samples - first) / (time.monotonic() - start)

                if state.step % settings.log_every == 0 or state.step == plan.steps:
                    self._note(**metrics)
                    if self.group.first:
                        progress(state.samples, note=f"loss {self.loss:.4f}")
                self._validate()
                if _due(state.step, plan.steps, settings.milestones):
                    self._save(milestone=True)
            # The last commit must be there before anything is published: a kill in between then costs
            # nothing.
            self._save()
            self.saver.settle(fatal=True)

    def _step(self, batches: list[tuple[float, Batch]]) -> dict[str, Any]:
        # Loss, gradient, update; gives the step's line of metrics.
        state, settings, plan = self.state, self.settings, self.plan
        begin = state.samples
        lr = settings.learning_rate(begin + plan.batch, plan.samples)
        for group in state.optimizer.param_groups:
            group["lr"] = lr
        state.optimizer.zero_grad(set_to_none=True)
        sums: dict[str, float] = {}
        for number, (weight, batch) in enumerate(batches, 1):
            with self.sharding.accumulating(self.forward, number == len(batches)):
                with self.precision, self.attention:
                    loss, metrics = self.forward(batch.here())
                # Micro-batches may differ in size by one, so each counts by its samples. A multiplication by
                # 1 would be exact too, but is one more kernel in every plain run.
                (loss if weight == 1 else loss * weight).backward()
            for key, value in {"loss": float(loss.detach()), **metrics}.items():
                sums[key] = sums.get(key, 0.0) + value * weight / self.group.size
        means = dict(zip(sums, self.group.sum(list(sums.values())), strict=True))
        norm = clip(self.parameters, settings.clip)
        # The cursor moves whether the step is admitted or not: a batch that does harm is left behind (a
        # student's may come again), and a resumed run meets the same ones.
        state.samples, state.step = begin + plan.batch, state.step + 1
        self.loss = means["loss"]
        if state.guard.admits(self.loss, norm):
            state.optimizer.step()
            state.ema.update(state.samples, plan.batch)
        else:
            event = f"{self.name}: loss {self.loss:g}, gradient {norm:g} at step {state.step:,}"
            bound = f"(bound {state.guard.bound():.3g})"
            if state.guard.in_a_row >= settings.guard.patience:
                fix = "lower train.lr in a new campaign, or check the data (atoll data audit)"
                raise AtollError(f"{event}: the last {state.guard.in_a_row} steps were skipped {bound}", fix)
            self._say(f"warning: {event}: skipped {bound}")
        line = {**means, "lr": lr, "grad_norm": norm, "skipped": state.guard.skipped}
        line["seconds"] = round(state.seconds, 3)
        return {key: value if math.isfinite(value) else None for key, value in line.items()}

    def _validate(self) -> None:
        state, network = self.state, self.task.network
        wanted = self.settings.validations, self.settings.previews
        validate, draw = (_due(state.step, self.plan.steps, times) for times in wanted)
        if not validate and not draw:
            return
        self.phase = "validating"
        # All ranks validate, though rank 0 alone writes it down: of sharded weights every forward pass is a
        # collective.
        network.eval()
        with state.ema.in_place(), torch.no_grad(), self.precision, self.attention:
            if validate:
                started = time.monotonic()
                self._note(**self.task.validate(), validation_seconds=round(time.monotonic() - started, 3))
                if state.metrics[-1].ignores_captions and 2 * state.step >= self.plan.steps:
                    self._say(f"warning: {self.name} ignores its captions: lower train.lr in a new campaign")
            picture = self.task.preview() if draw else None
        network.train()
        if self.group.first:
            if picture is not None:
                if self.trackers is not None:
                    self.trackers.picture(state.step, picture)
                self._try_to_write(f"previews/{state.step:08d}.png", picture)
            self._write_metrics()

    # Saving.

    def _save(self, milestone: bool = False) -> None:
        # A milestone is committed even where this step has been: the log's entry is what keeps it for good.
        self.saver.settle()
        if milestone or self.saver.committed != self.state.step:
            self.phase = "saving"
            self.group.once(self._write_metrics)
            self.saver.save(self.state, milestone)

    def _note(self, **values: Any) -> None:
        line = MetricsLine(step=self.state.step, samples=self.state.samples, **values)
        self.state.metrics.append(line)
        if self.trackers is not None:
            self.trackers.line(line)

    def _write_metrics(self) -> None:
        try:
            self.log.check()  # a holder that was overtaken must not put its own lines over the run's
        except Fenced:
            raise
        except StoreError as error:
            say(f"warning: metrics.jsonl waits for the next time: {error}")
            return
        lines = (json.dumps(line.model_dump(exclude_unset=True)) + "\n" for line in self.state.metrics)
        self._try_to_write("metrics.jsonl", "".join(lines).encode())
        if self.trackers is not None:
            self.trackers.flush()

    def _try_to_write(self, key: str, data: bytes) -> None:
        # What the result does not depend on: a store that fails for a while must not end the run.
        try:
            self.run.put(key, data)
        except StoreError as error:
            say(f"warning: {error}")


def clip(parameters: list[nn.Parameter], most: float | None) -> float:
    """Scale the gradient to a norm of `most` if it is longer; the norm before."""
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    length = float(whole(norm))
    # Torch would multiply by 1 where nothing is to be done: a pass over all gradients, for nothing.
    if most is not None and not length < 0.999 * most:
        torch.nn.utils.clip_grads_with_norm_(parameters, most, norm)
    return length


def _due(step: int, steps: int, times: int) -> bool:
    # Whether the step is one of `times` evenly spaced ones that end with the last.
    return times > 0 and (step * times) // steps > ((step - 1) * times) // steps
