"""The training loop. There is one; expert, router and monolith each supply a `Task`."""

import json
import os
import signal
import socket
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import FrameType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from atoll.base.console import Progress, duration, say
from atoll.base.errors import AtollError, StoreError
from atoll.store.log import Log
from atoll.store.store import Store
from atoll.train import state as checkpoint
from atoll.train.ema import Ema
from atoll.train.settings import Recipe
from atoll.train.state import TrainState

INTERRUPTED = 75
"""Exit code of a run that was told to leave, saved its state and can be resumed (EX_TEMPFAIL)."""


class Interrupted(AtollError):
    """The run was told to leave; its state is saved."""

    exit_code = INTERRUPTED


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
        """Loss (a scalar with a graph) and metrics of one batch."""
        ...

    def validate(self) -> dict[str, Any]:
        """Metrics on held-out rows with the weights that the network holds now."""
        ...

    def preview(self) -> bytes | None:
        """A PNG that shows what the network can do now, or None."""
        ...

    def publish(self, store: Store, weights: dict[str, Tensor], seconds: float) -> None:
        """Write the finished network below `expert/`, its card last."""
        ...


def train(task: Task, recipe: Recipe, store: Store, name: str) -> None:
    """Train to the end, or go on where an earlier process stopped.

    Args:
        task: network, data and objective.
        recipe: settings and numbers.
        store: narrowed to the run's own folder (`islands/K`, `router`, `monolith`).
        name: for messages.

    Raises:
        Interrupted: SIGTERM or SIGINT came; the state is saved.
        Fenced: another process took the run over.
    """
    if store.exists("expert/card.json"):
        say(f"{name}: finished already")
        return

    # Set up.
    settings, plan = recipe.train, recipe.plan
    torch.set_num_threads(settings.threads)
    device = next(task.network.parameters()).device
    autocast = settings.precision == "bf16" or (settings.precision == "auto" and device.type != "cpu")
    optimizer = torch.optim.AdamW(
        task.network.parameters(),
        lr=settings.lr,
        betas=settings.betas,
        weight_decay=settings.weight_decay,
        fused=True,  # one pass over the weights: on a CPU at small batches a third of a step's time
    )
    ema = Ema(task.network, settings.ema_half_life * plan.samples, settings.ema_ramp)
    state = TrainState(task.network, ema, optimizer)
    run = store.sub("run")
    log = Log(run, holder=f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:6]}")

    # Take the island over and go on where it was left.
    log.acquire(host=socket.gethostname(), threads=settings.threads)
    learned = recipe.learned()
    if checkpoint.resume(run, log, state, learned):
        say(f"{name}: resumed at step {state.step:,} of {plan.steps:,}")
    state.metrics = _metrics_until(run, state.step)
    progress = Progress(name, plan.samples, state.samples, "images")
    saved = time.monotonic()

    with _leaving() as told, ThreadPoolExecutor(max_workers=1) as ahead:
        ready = ahead.submit(task.batch, range(state.samples, state.samples + plan.batch))
        while state.step < plan.steps:
            started = time.monotonic()

            # Data of this step; the next step's is made meanwhile.
            batch = ready.result()
            begin = state.samples + plan.batch
            ready = ahead.submit(task.batch, range(begin, begin + plan.batch))

            # Loss, gradient, update.
            lr = settings.learning_rate(begin, plan.samples)
            for group in optimizer.param_groups:
                group["lr"] = lr
            task.network.train()
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
                loss, metrics = task.step(batch)
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(task.network.parameters(), settings.clip or float("inf"))
            if not torch.isfinite(norm) or not torch.isfinite(loss.detach()):
                fix = "lower train.lr or check the data (atoll data audit); the last checkpoint is kept"
                raise AtollError(
                    f"{name}: loss {float(loss.detach()):g}, gradient {float(norm):g} at step {state.step}",
                    fix,
                )
            optimizer.step()
            state.samples, state.step = begin, state.step + 1
            ema.update(task.network, state.samples, plan.batch)
            state.seconds += time.monotonic() - started

            # Report.
            last = state.step == plan.steps
            if state.step % settings.log_every == 0 or last:
                state.metrics.append(
                    {
                        "step": state.step,
                        "samples": state.samples,
                        "loss": float(loss.detach()),
                        "lr": lr,
                        "grad_norm": float(norm),
                        "seconds": round(state.seconds, 3),
                        **metrics,
                    }
                )
                progress(state.samples, note=f"loss {state.metrics[-1]['loss']:.4f}")
            _look(task, state, run, log, settings.validations, settings.previews, plan.steps)

            # Save.
            due = time.monotonic() - saved > 60 * settings.checkpoint_minutes
            if due or last or told:
                _write_metrics(run, log, state)
                checkpoint.save(run, log, state, learned, settings.keep)
                saved = time.monotonic()
            if told and not last:
                raise Interrupted(
                    f"{name} left at step {state.step:,} of {plan.steps:,}", "run it again to go on"
                )

    # Publish.
    log.append("publish", step=state.step, samples=state.samples)
    task.publish(store, ema.weights, state.seconds)
    say(f"{name}: finished, {plan.samples:,} images in {duration(state.seconds)}")


def _look(
    task: Task, state: TrainState, run: Store, log: Log, validations: int, previews: int, steps: int
) -> None:
    """Validate and draw with the averaged weights where it is time to."""
    validate, draw = _due(state.step, steps, validations), _due(state.step, steps, previews)
    if not validate and not draw:
        return
    task.network.eval()
    with state.ema.in_place(task.network), torch.inference_mode():
        if validate:
            state.metrics.append({"step": state.step, "samples": state.samples, **task.validate()})
        picture = task.preview() if draw else None
    _write_metrics(run, log, state)
    if picture is not None:
        run.put(f"previews/{state.step:08d}.png", picture)


def _due(step: int, steps: int, times: int) -> bool:
    """Whether the step is one of `times` evenly spaced ones that end with the last."""
    return times > 0 and (step * times) // steps > ((step - 1) * times) // steps


def _write_metrics(run: Store, log: Log, state: TrainState) -> None:
    log.check()  # the file is the run's: a holder that was overtaken must not put its own over it
    run.put("metrics.jsonl", "".join(json.dumps(line) + "\n" for line in state.metrics).encode())


def _metrics_until(run: Store, step: int) -> list[dict[str, Any]]:
    """Lines up to a step; what an interrupted process logged after its last commit is logged anew."""
    try:
        text = run.get("metrics.jsonl").decode()
    except StoreError:
        return []
    found = []
    for line in text.splitlines():
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            say(f"warning: a damaged line of metrics.jsonl is left out: {line[:60]!r}")
    return [line for line in found if line["step"] <= step]


@contextmanager
def _leaving() -> Iterator[list[int]]:
    """SIGTERM and SIGINT are noted, not obeyed at once: the loop saves and leaves after the step."""
    told: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        told.append(number)

    before = {s: signal.signal(s, note) for s in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield told
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
