"""What changes while a network trains, and its checkpoints: all that a run needs to go on, in one commit.

A checkpoint is a folder of safetensors and JSON under the holder's own name, verified and then made
real by `COMMIT.json`; the island's log names it, with the hash of that file. The newest one that is
whole wins; one that is torn or damaged is set aside in the log, where everybody sees it.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor, nn

from atoll.base.console import say
from atoll.base.errors import ConfigError, StoreError
from atoll.base.hashing import digest, sha256
from atoll.campaign.runs import MetricsLine
from atoll.campaign.settings.train import GuardConfig
from atoll.store.log import COMMIT, Commit, Fenced, Log
from atoll.store.manifest import publish, read_published
from atoll.store.store import Absent, Damaged, Store
from atoll.train.parallel import fill, gather_no_more, local, whole


class Ema:
    """An exponential moving average of the weights whose memory is a fraction of the run.

    Of sharded weights each process averages its own part. `half_life` are samples after which a weight's
    share has halved, at most the fraction `ramp` of the samples seen; 0 copies the weights.
    """

    def __init__(self, network: nn.Module, half_life: float, ramp: float) -> None:
        self.network, self.half_life, self.ramp = network, half_life, ramp
        self.parameters = dict(network.named_parameters())  # kept: to look them up takes time at every step
        self.weights: dict[str, Tensor] = {name: p.detach().clone() for name, p in self.parameters.items()}

    def decay(self, samples: int, batch: int) -> float:
        """Share of the old average that stays in the step that ends at `samples`."""
        # Early on the average must forget the random start: EDM2's warm-up, arXiv 2312.02696.
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


class Guard:
    """A rolling bound on the loss, over which steps are skipped, as are those that are not finite.

    The bound is robust: median + factor x 1.4826 x the median absolute deviation, and never less than
    twice the median, so that a window of nearly equal losses does not take ordinary noise for a spike.
    All ranks give it the same numbers, so they decide alike.
    """

    def __init__(self, config: GuardConfig) -> None:
        self.config = config
        self.window: deque[float] = deque(maxlen=config.window)
        self.skipped = self.in_a_row = 0

    def bound(self) -> float:
        """Largest loss that is let through now; none before a quarter of the window is filled."""
        if len(self.window) < self.config.window // 4:
            return math.inf
        middle = median(self.window)
        deviation = 1.4826 * median(abs(loss - middle) for loss in self.window)
        return middle + max(middle, self.config.factor * deviation)

    def admits(self, loss: float, norm: float) -> bool:
        """Whether a step of this loss and gradient norm may change the weights; counts it if not."""
        # Skipped losses stay out of the window: a burst of them would raise the bound until it lets them
        # through.
        if math.isfinite(loss) and math.isfinite(norm) and loss <= self.bound():
            self.window.append(loss)
            self.in_a_row = 0
            return True
        self.skipped += 1
        self.in_a_row += 1
        return False

    @property
    def exhausted(self) -> bool:
        """Whether too many steps in a row were skipped to go on."""
        return self.in_a_row >= self.config.patience

    def counters(self) -> dict[str, Any]:
        """The state as plain numbers."""
        return {"window": list(self.window), "skipped": self.skipped, "in_a_row": self.in_a_row}

    def restore(self, counters: dict[str, Any]) -> None:
        """Take over a saved state."""
        self.window = deque(counters["window"], maxlen=self.config.window)
        self.skipped, self.in_a_row = counters["skipped"], counters["in_a_row"]


Spread = Callable[[dict[str, Tensor]], Iterable[tuple[str, Tensor]]]
OWN: Spread = dict[str, Tensor].items  # one process has all


@dataclass
class TrainState:
    """What changes while a network trains; counters and `tracker` as in `Commit`."""

    network: nn.Module
    ema: Ema
    optimizer: torch.optim.Optimizer
    guard: Guard
    tracker: str = ""
    samples: int = 0
    step: int = 0
    seconds: float = 0.0
    metrics: list[MetricsLine] = field(default_factory=list)  # of metrics.jsonl up to here

    def tensors(self, keep: bool = True) -> dict[str, dict[str, Tensor]]:
        """The state's tensors by file: whole, on the CPU, apart from the live ones.

        All ranks call it, since it gathers what is sharded; those that do not `keep` it get nothing.
        """
        weights = dict(self.network.named_parameters())
        moments = {
            f"{name}/{key}": torch.as_tensor(value)
            for name, parameter in weights.items()
            for key, value in self.optimizer.state.get(parameter, {}).items()
        }
        files: dict[str, dict[str, Tensor]] = {}
        for file, tensors in (("weights", weights), ("ema", self.ema.weights), ("optimizer", moments)):
            # One by one: no GPU ever holds more than one tensor in whole.
            gathered = ((name, whole(tensor.detach())) for name, tensor in tensors.items())
            copies = {name: t.to("cpu", copy=True).contiguous() for name, t in gathered if keep}
            files[f"{file}.safetensors"] = copies
        return files

    def restore(self, commit: Commit, blobs: dict[str, bytes], spread: Spread = OWN) -> None:
        """Take over a saved state, in place; `spread` brings tensors of rank 0's blobs to every process."""
        self.samples, self.step, self.seconds = commit.samples, commit.step, commit.seconds
        self.tracker = commit.tracker
        self.guard.restore(commit.guard)
        parameters = dict(self.network.named_parameters())
        for file, own in (("weights", parameters), ("ema", self.ema.weights)):
            for name, value in spread(_tensors(blobs, file)):
                fill(own[name].detach(), value)
        for full_name, value in spread(_tensors(blobs, "optimizer")):
            name, key = full_name.rsplit("/", 1)
            parameter = parameters[name]
            # Mapped bytes may be unaligned, and kernels then sum in another order: the same numbers, other
            # last bits two steps later. A copy is aligned as a fresh tensor is.
            moment = value.clone()
            if value.shape == parameter.shape and value.ndim:
                moment = torch.empty_like(parameter, dtype=value.dtype)
                fill(moment, value)
            self.optimizer.state[parameter][key] = moment.to(parameter.device)


class Saver:
    """Commits checkpoints beside the training: the state is copied at once and written by a thread.

    A write that fails is told and made up for by the next one; only a takeover, and a failure of the
    write that is waited for, end the run. A resume must agree with `learned`, the settings that the weights
    depend on; of commits the newest `keep` stay, and milestones.
    """

    def __init__(self, store: Store, log: Log, learned: dict[str, Any], keep: int) -> None:
        self.store, self.log, self.learned, self.keep = store, log, learned, keep
        self.committed = -1
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="saver")
        self._pending: Future[None] | None = None

    def lacks(self, step: int) -> bool:
        """Whether this step is yet to be committed; waits for a write that is under way."""
        self.settle()
        return self.committed != step

    def save(self, state: TrainState, tensors: dict[str, dict[str, Tensor]], milestone: bool = False) -> None:
        """Commit this state; returns when it has been copied, after the write before it is done."""
        # At most one write at a time: memory holds two states, the living one and its copy, and never a
        # third.
        self.settle()
        commit = Commit(
            samples=state.samples,
            step=state.step,
            seconds=state.seconds,
            recipe=digest(self.learned),
            guard=state.guard.counters(),
            tracker=state.tracker,
        )
        self._pending = self._thread.submit(self._write, commit, tensors, milestone)

    def poll(self) -> None:
        """Raise `Fenced` if a finished write found that the run was taken over."""
        if self._pending is not None and self._pending.done():
            self.settle()

    def close(self) -> None:
        """End the thread; a write that is under way is finished."""
        self._thread.shutdown()

    def settle(self, fatal: bool = False) -> None:
        """Wait until the last write is done; one that failed is told, or `fatal`: a `StoreError`."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        try:
            pending.result()
        except Fenced:
            raise
        except StoreError as error:
            if fatal:
                raise
            say(f"warning: a checkpoint could not be saved, the next one is tried when it is due: {error}")

    def _write(self, commit: Commit, tensors: dict[str, dict[str, Tensor]], milestone: bool) -> None:
        # First all blobs, then COMMIT.json, then the log's entry, then old ones go: a kill between any two
        # leaves a folder that nobody names, never a name without its bytes.
        name = f"checkpoints/{commit.step:08d}-{self.log.holder}"
        if self.committed == commit.step:
            return
        # A milestone may follow a commit of the same step: its blobs are there already.
        if not self.store.exists(f"{name}/{COMMIT}"):
            blobs = {file: save_tensors(parts) for file, parts in tensors.items()}
            publish(self.store, name, blobs, COMMIT, commit)
        shown = commit.model_dump(include={"samples", "step", "seconds"})
        hashed = sha256(self.store.get(f"{name}/{COMMIT}"))
        self.log.append("commit", checkpoint=name, sha256=hashed, milestone=milestone, **shown)
        self.committed = commit.step
        _prune(self.store, self.log, self.keep)


def _prune(store: Store, log: Log, keep: int) -> None:
    """Remove what this holder and those before it left, but for the newest commits and the milestones.

    What later holders wrote is never touched: this process may have been overtaken without knowing it yet.
    What was set aside stays for whoever wants to know why.
    """
    # Only now, with the newer commit in the log: a kill at any line leaves one whole checkpoint at least.
    entries, commits = log.entries(), log.commits()
    aside = {entry.checkpoint for entry in entries if entry.kind == "set_aside"}
    kept = {e.checkpoint for e in commits[-keep:]} | {e.checkpoint for e in commits if e.milestone}
    holders = [entry.holder for entry in entries if entry.kind == "acquire"]
    ours = set(holders[: holders.index(log.holder) + 1])
    for key in store.list("checkpoints"):
        folder, name = "/".join(key.split("/")[:2]), key.split("/")[1]
        if folder not in kept | aside and name.partition("-")[2] in ours:
            store.delete(key)


def _tensors(blobs: dict[str, bytes], file: str) -> dict[str, Tensor]:
    return load_tensors(blobs[f"{file}.safetensors"]) if blobs else {}


Loaded = tuple[Commit, dict[str, bytes]]  # content of COMMIT.json and the blobs


def newest(store: Store, log: Log) -> tuple[str, Loaded] | None:
    """Name and content of the newest whole checkpoint; damaged ones on the way are set aside."""
    for entry in reversed(log.commits()):
        name, hashed = entry.checkpoint, entry.sha256
        if not store.list(name):
            continue  # pruned
        try:
            return name, load(store, name, hashed)
        except (Absent, Damaged) as error:  # a store that does not answer says nothing about a checkpoint
            say(f"warning: checkpoint set aside: {error}")
            log.append("set_aside", checkpoint=name, reason=str(error))
    return None


def load(store: Store, name: str, hashed: str) -> Loaded:
    """A checkpoint; `Absent` or `Damaged` unless it is what the log says."""
    if sha256(store.get(f"{name}/{COMMIT}")) != hashed:
        raise Damaged(f"{name}/{COMMIT} is not what the log says", "it is damaged: an older one is used")
    return read_published(store, name, COMMIT, Commit)


def restore(
    state: TrainState,
    name: str,
    loaded: Loaded,
    learned: dict[str, Any],
    spread: Spread = OWN,
) -> None:
    """Go on from a checkpoint, whose blobs rank 0 has; `ConfigError` if it was made with other settings."""
    commit, blobs = loaded
    if commit.recipe != digest(learned):
        raise ConfigError(f"{name} was made with other settings", "restore them, or remove the run's folder")
    state.restore(commit, blobs, spread)
