"""The training loop. There is one; expert, router and monolith each supply a `Task`."""

import json
import math
import time
import uuid
from contextlib import ExitStack
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from atoll.base.console import Progress, say
from atoll.base.errors import AtollError, StoreError
from atoll.base.processes import ProcessGroup, joined
from atoll.base.text import duration
from atoll.campaign.publication import announce, settle, tidy
from atoll.campaign.settings.loggers import TrackingConfig
from atoll.campaign.settings.train import Recipe
from atoll.networks.families import kept_buffers
from atoll.store.lease import Heart, acquire, new_holder, read_heartbeat
from atoll.store.log import Fenced, Log
from atoll.store.store import Store
from atoll.train import state as checkpoint
from atoll.train.ema import Ema
from atoll.train.loggers import Subject, Tracks
from atoll.train.parallel import StepSharding, whole
from atoll.train.preemption import Interrupted, leaving
from atoll.train.prefetch import Ahead
from atoll.train.spike_guard import Guard
from atoll.train.state import Saver, TrainState


class Task(Protocol):
    """What differs between the networks that are trained."""

    @property
    def network(self) -> nn.Module:
        """The network that learns, on its device."""
        ...

    def batch(self, positions: range) -> Any:
        """Everything that the samples at these positions bring: data, noise, times, dropout."""
        ...

    def step(self, batch: Any) -> tuple[Tensor, dict[str, float]]:
        """Mean loss (a scalar with a graph) and mean metrics of one batch."""
        ...

    def validate(self) -> dict[str, Any]:
        """Metrics on held-out rows with the weights that the network holds now."""
        ...

    def preview(self) -> bytes | None:
        """A PNG that shows what the network can do now, or None."""
        ...

    def publish(self, store: Store, prefix: str, weights: dict[str, Tensor], seconds: float) -> None:
        """Write the finished network below `prefix`, its card last."""
        ...


def train(
    task: Task,
    recipe: Recipe,
    store: Store,
    name: str,
    *,
    wait: bool = False,
    tracking: TrackingConfig | None = None,
) -> None:
    """Train to the end, or go on where an earlier process stopped; alone or as one rank of `torchrun`.

    Args:
        task: network, data and objective.
        recipe: settings and numbers.
        store: narrowed to the run's own folder (`islands/K`, `router`, `monolith`).
        name: for messages.
        wait: wait while another living process holds the run.
        tracking: where its metrics are shown, besides metrics.jsonl.

    Raises:
        Interrupted: SIGTERM or SIGINT came; the state is saved.
        Held: another living process holds the run.
        Fenced: another process took the run over.
        AtollError: too many steps in a row were skipped; data or another rank did not come.
    """
    torch.set_num_threads(recipe.train.threads)
    with joined(recipe.train.parallel.collective_timeout_s) as group:
        if group.once(lambda: _is_finished(store)):
            _say(group, f"{name}: finished already")
            return
        _Run(task, recipe, store, name, group).go(wait, tracking or TrackingConfig())


class _Run:
    """One process's part in one run."""

    def __init__(self, task: Task, recipe: Recipe, store: Store, name: str, group: ProcessGroup) -> None:
        self.task, self.recipe, self.store, self.name, self.group = task, recipe, store, name, group
        self.settings, self.plan, self.learned = recipe.train, recipe.plan, recipe.learned()
        settings = self.settings
        self.autocast = settings.precision == "bf16" or (
            settings.precision == "auto" and group.device.type != "cpu"
        )
        self.sharding = StepSharding(task.network, settings.parallel, group, self.plan.batch, self.autocast)
        self.forward = self.sharding.wrap(task.step)
        optimizer = torch.optim.AdamW(
            task.network.parameters(),
            lr=settings.lr,
            betas=settings.betas,
            weight_decay=settings.weight_decay,
            fused=True,  # one pass over the weights: on a CPU at small batches a third of a step's time
        )
        ema = Ema(task.network, settings.ema_half_life * self.plan.samples, settings.ema_warmup)
        self.state = TrainState(task.network, ema, optimizer, Guard(settings.guard))
        self.run = store.sub("run")
        self.log = Log(self.run, new_holder())
        self.saver = Saver(self.run, self.log, self.learned, settings.keep)
        self.tracks = Tracks()
        self.loss, self.speed, self.phase = float("nan"), 0.0, "starting"

    def go(self, wait: bool, tracking: TrackingConfig) -> None:
        """Take the run over, train, publish, and say in the log how it ended."""
        with leaving() as stop_requested:
            if not self.group.once(lambda: self._acquire(wait, stop_requested)):
                self.group.once(lambda: settle(self.store, self.log))
                _say(self.group, f"{self.name}: finished already")
                return
            try:
                self._hold(stop_requested, tracking)
            except Fenced:
                raise
            except BaseException as error:
                self._release(error)
                raise

    def _hold(self, stop_requested: list[int], tracking: TrackingConfig) -> None:
        """What is done as the holder."""
        with ExitStack() as stack:
            stack.callback(self.saver.close)
            self.heart = Heart(self.log, self.settings.lease, self._signs)
            if self.group.first:
                stack.enter_context(self.heart)
            self._resume()
            stack.callback(self.tracks.close)
            if self.group.first:
                self.tracks.open(tracking, self.run, self.log.holder, self._subject())
            self._steps(stop_requested)
            self._publish()

    # Before and after.

    def _acquire(self, wait: bool, stop_requested: list[int]) -> bool:
        def pause(seconds: float) -> None:
            time.sleep(seconds)
            if stop_requested:
                raise Interrupted(f"{self.name} was told to leave while it waited", "run it again to go on")

        first = next((e for e in self.log.entries() if e.tracker), None)
        self.state.tracker = first.tracker if first else uuid.uuid4().hex[:8]
        own = {"tracker": self.state.tracker, "threads": self.settings.threads, "ranks": self.group.size}
        return acquire(self.log, self.settings.lease, wait=wait, pause=pause, **own)

    def _resume(self) -> None:
        state, before = self.state, read_heartbeat(self.run) if self.group.first else None
        mine: list[checkpoint.Loaded] = []

        def find() -> tuple[str, str] | None:
            found = checkpoint.newest(self.run, self.log)
            if found is None:
                return None
            mine.append(found[2])
            return found[:2]

        found = self.group.once(find)
        if found is not None:
            loaded = mine[0] if mine else checkpoint.load(self.run, *found)
            checkpoint.restore(state, found[0], loaded, self.learned)
            self.saver.committed = state.step
            _say(self.group, f"{self.name}: resumed at step {state.step:,} of {self.plan.steps:,}")
        if self.group.first:
            reached = (before.step or 0) if before else 0
            if reached or found:
                self.log.append("resume", step=state.step, lost=max(0, reached - state.step))
            state.metrics = _metrics_until(self.run, state.step)

    def _subject(self) -> Subject:
        return Subject(
            id=self.state.tracker,
            name=self.name,
            role=self.plan.role,
            start=sum(entry.kind == "acquire" for entry in self.log.entries()),
            step=self.state.step,
            settings=self.recipe.model_dump(mode="json"),
        )

    def _publish(self) -> None:
        self.phase = "publishing"
        state = self.state
        kept = {**state.ema.weights, **kept_buffers(self.task.network)}
        gathered = ((name, whole(tensor)) for name, tensor in kept.items())
        weights = {name: tensor.cpu() for name, tensor in gathered if self.group.first}

        def write() -> None:
            announce(
                self.run, self.log, state.step, lambda s, p: self.task.publish(s, p, weights, state.seconds)
            )
            settle(self.store, self.log)

        self.group.once(write)
        _say(self.group, f"{self.name}: finished, {self.plan.samples:,} images in {duration(state.seconds)}")

    def _release(self, error: BaseException) -> None:
        if not self.group.first:
            return
        left = isinstance(error, Interrupted)
        why = {} if left else {"error": str(error) or type(error).__name__}
        try:
            self.log.append("release", reason="left" if left else "failed", step=self.state.step, **why)
        except StoreError as unsaid:
            say(f"warning: {unsaid}")

    def _signs(self) -> dict[str, Any]:
        state = self.state
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

    # The loop.

    def _steps(self, stop_requested: list[int]) -> None:
        state, settings, plan, sharding = self.state, self.settings, self.plan, self.sharding
        progress = Progress(self.name, plan.samples, state.samples, "images")
        first, start, saved = state.samples, time.monotonic(), time.monotonic()
        self.task.network.train()

        def make(begin: int) -> list[Any]:
            return [self.task.batch(part) for part in sharding.parts(begin)] if begin < plan.samples else []

        with Ahead(make, state.samples, plan.batch, settings.data_timeout_s) as ahead:
            while state.step < plan.steps:
                self.phase = "training"
                started = time.monotonic()
                batches = ahead.take(stop_requested)

                # All ranks agree whether to leave or save; a rank without data has been told to leave.
                due = self.group.first and time.monotonic() - saved > settings.checkpoint_every_s
                leave, save = self.group.sum([float(batches is None or bool(stop_requested)), float(due)])
                if leave:
                    self._leave()
                if save:
                    self._save()
                    saved = time.monotonic()
                self._still_ours()

                assert batches is not None
                metrics = self._step(batches)
                state.seconds += time.monotonic() - started
                self.speed = (state.samples - first) / (time.monotonic() - start)

                # Report.
                if state.step % settings.log_every == 0 or state.step == plan.steps:
                    self._note(metrics)
                    if self.group.first:
                        progress(state.samples, note=f"loss {self.loss:.4f}")
                self._look()
                if _due(state.step, plan.steps, settings.milestones):
                    self._save(milestone=True)
            self._save()
            self.saver.wait()

    def _step(self, batches: list[Any]) -> dict[str, Any]:
        """Loss, gradient, update; returns the step's line of metrics."""
        state, settings, plan = self.state, self.settings, self.plan
        begin = state.samples
        lr = settings.learning_rate(begin + plan.batch, plan.samples)
        for group in state.optimizer.param_groups:
            group["lr"] = lr
        state.optimizer.zero_grad(set_to_none=True)
        sums: dict[str, float] = {}
        parts = self.sharding.parts(begin)
        for part, batch in zip(parts, batches, strict=True):
            weight = self.sharding.weight(part)
            with self.sharding.accumulating(self.forward, part is parts[-1]):
                with self._precision():
                    loss, metrics = self.forward(batch)
                (loss if weight == 1 else loss * weight).backward()
            for key, value in {"loss": loss.detach(), **metrics}.items():
                sums[key] = sums.get(key, 0.0) + float(value) * weight / self.group.size
        means = dict(zip(sums, self.group.sum(list(sums.values())), strict=True))
        norm = self._clip(settings.clip)
        state.samples, state.step = begin + plan.batch, state.step + 1
        if state.guard.admits(means["loss"], norm):
            state.optimizer.step()
            state.ema.update(self.task.network, state.samples, plan.batch)
        else:
            self._skip(means["loss"], norm)
        self.loss = means["loss"]
        line = {"step": state.step, "samples": state.samples, **means, "lr": lr, "grad_norm": norm}
        line |= {"skipped": state.guard.skipped, "seconds": round(state.seconds, 3)}
        return {key: value if math.isfinite(value) else None for key, value in line.items()}

    def _precision(self) -> torch.autocast:
        return torch.autocast(self.group.device.type, torch.bfloat16, enabled=self.autocast)

    def _clip(self, most: float | None) -> float:
        """The gradient's norm, and the gradient no longer than `most`."""
        parameters = list(self.task.network.parameters())
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        length = float(whole(norm))
        # Torch would multiply by 1 where nothing is to be done: a pass over all gradients, for nothing.
        if most is not None and not length < 0.999 * most:
            torch.nn.utils.clip_grads_with_norm_(parameters, most, norm)
        return length

    def _skip(self, loss: float, norm: float) -> None:
        guard, step = self.state.guard, self.state.step
        what = f"{self.name}: loss {loss:g}, gradient {norm:g} at step {step:,}"
        if guard.exhausted:
            raise AtollError(
                f"{what}: the last {guard.in_a_row} steps were skipped (bound {guard.bound():.3g})",
                "lower train.lr or check the data (atoll data audit); the last checkpoint is kept",
            )
        _say(self.group, f"warning: {what}: skipped (bound {guard.bound():.3g})")

    def _look(self) -> None:
        """Validate and draw with the averaged weights where it is time to."""
        state, steps = self.state, self.plan.steps
        validate = _due(state.step, steps, self.settings.validations)
        draw = _due(state.step, steps, self.settings.previews)
        if not validate and not draw:
            return
        self.phase = "validating"
        self.task.network.eval()
        with state.ema.in_place(self.task.network), torch.no_grad(), self._precision():
            if validate:
                self._note({"step": state.step, "samples": state.samples, **self.task.validate()})
            picture = self.task.preview() if draw else None
        self.task.network.train()
        if not self.group.first:
            return
        if picture is not None:
            self.tracks.picture(state.step, picture)
            self._try_to_write(f"previews/{state.step:08d}.png", picture)
        self._write_metrics()

    # Saving and leaving.

    def _save(self, milestone: bool = False) -> None:
        if not milestone and not self.group.once(lambda: self.saver.lacks(self.state.step)):
            return
        self.phase = "saving"
        tensors = self.state.tensors(self.group.first)
        if self.group.first:
            self._write_metrics()
            self.saver.save(self.state, tensors, milestone)

    def _leave(self) -> None:
        self._save()
        self.group.once(self.saver.wait)  # whoever leaves earlier takes the others along
        where = f"step {self.state.step:,} of {self.plan.steps:,}"
        if self.group.first:
            raise Interrupted(f"{self.name} left at {where}", "run it again to go on")
        raise SystemExit(Interrupted.exit_code)

    def _still_ours(self) -> None:
        if self.group.first:
            self.heart.check()
            self.saver.poll()

    def _note(self, line: dict[str, Any]) -> None:
        self.state.metrics.append(line)
        self.tracks.line(line)

    def _write_metrics(self) -> None:
        try:
            self.log.check()  # a holder that was overtaken must not put its own lines over the run's
        except Fenced:
            raise
        except StoreError as error:
            say(f"warning: metrics.jsonl waits for the next time: {error}")
            return
        lines = "".join(json.dumps(line) + "\n" for line in self.state.metrics)
        self._try_to_write("metrics.jsonl", lines.encode())
        self.tracks.flush()

    def _try_to_write(self, key: str, data: bytes) -> None:
        """Write what the result does not depend on; a store that fails for a while must not end the run."""
        try:
            self.run.put(key, data)
        except StoreError as error:
            say(f"warning: {error}")


def _is_finished(store: Store) -> bool:
    if not store.exists("expert/card.json"):
        return False
    tidy(store)
    return True


def _say(group: ProcessGroup, message: str) -> None:
    if group.first:
        say(message)


def _due(step: int, steps: int, times: int) -> bool:
    """Whether the step is one of `times` evenly spaced ones that end with the last."""
    return times > 0 and (step * times) // steps > ((step - 1) * times) // steps


def _metrics_until(run: Store, step: int) -> list[dict[str, Any]]:
    """Lines up to a step; what an interrupted process logged after its last commit is logged anew."""
    try:
        text = run.get("metrics.jsonl").decode(errors="replace")
    except StoreError:
        return []
    found = []
    for line in text.splitlines():
        try:
            made = json.loads(line)
            found.append({**made, "step": int(made["step"])})
        except (ValueError, TypeError, KeyError):
            say(f"warning: a damaged line of metrics.jsonl is left out: {line[:60]!r}")
    return [line for line in found if line["step"] <= step]
