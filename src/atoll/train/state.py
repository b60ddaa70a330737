"""What changes while a network trains, and its checkpoints: all that a run needs to go on, in one commit.

A checkpoint is a folder of safetensors and JSON under the holder's own name, verified and then made
real by `COMMIT.json`; the island's log names it, with the hash of that file. The newest one that is
whole wins; one that is torn or damaged is set aside in the log, where everybody sees it.

Files hold whole tensors, and which they hold depends on the network alone. They are dealt out to the
processes that write or read them, so a run goes on with any number of them, and none holds more than a share.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from atoll.base.console import say
from atoll.base.errors import ConfigError, StoreError
from atoll.base.hashing import digest, sha256
from atoll.base.processes import ProcessGroup
from atoll.campaign.runs import MetricsLine
from atoll.campaign.settings.train import GuardConfig
from atoll.networks.lora import trainable
from atoll.store.log import COMMIT, Commit, Fenced, Log
from atoll.store.manifest import FileEntry, check_file, write_blocks
from atoll.store.store import Absent, Damaged, Store
from atoll.store.tensors import read_tensors, to_blocks
from atoll.train.parallel import fill, gather_no_more, local, whole

LARGEST = 2 * 2**30
"""Bytes of tensors in one file of a checkpoint, where one tensor alone is not larger."""
WRITES_APART = 20
"""A checkpoint is due after so many times what the last one took: a twentieth of the time goes to them."""


class Ema:
    """An exponential moving average of the weights whose memory is a fraction of the run.

    Of sharded weights each process averages its own part. `half_life` are samples after which a weight's
    share has halved, at most the fraction `ramp` of the samples seen; 0 copies the weights.
    """

    def __init__(self, network: nn.Module, half_life: float, ramp: float) -> None:
        self.network, self.half_life, self.ramp = network, half_life, ramp
        self.parameters = trainable(network)  # kept: to look them up takes time at every step
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

    def counters(self) -> dict[str, Any]:
        """The state as plain numbers."""
        return {"window": list(self.window), "skipped": self.skipped, "in_a_row": self.in_a_row}

    def restore(self, counters: dict[str, Any]) -> None:
        """Take over a saved state."""
        self.window = deque(counters["window"], maxlen=self.config.window)
        self.skipped, self.in_a_row = counters["skipped"], counters["in_a_row"]


ALONE = ProcessGroup()
Files = dict[str, dict[str, Tensor]]
"""Named tensors by the file that holds them."""


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

    def files(self) -> Files:
        """The living tensors, in the order of their names, by the file that each is saved in."""
        weights = trainable(self.network)
        moments = {
            f"{name}/{key}": torch.as_tensor(value)
            for name, parameter in weights.items()
            for key, value in self.optimizer.state.get(parameter, {}).items()
        }
        files: Files = {}
        for kind, tensors in (("weights", weights), ("ema", self.ema.weights), ("optimizer", moments)):
            # In the order of names, so that files and their bytes are the same whoever writes them.
            parts, room = [dict[str, Tensor]()], LARGEST
            for name in sorted(tensors):
                size = tensors[name].nbytes  # of a sharded one, in whole
                if parts[-1] and size > room:
                    parts, room = [*parts, {}], LARGEST
                parts[-1][name], room = tensors[name], room - size
            for number, part in enumerate(parts, 1):
                of = f"-{number:05d}-of-{len(parts):05d}" if len(parts) > 1 else ""
                files[f"{kind}{of}.safetensors"] = part
        return files

    def tensors(self, group: ProcessGroup = ALONE) -> Files:
        """This process's share of the files: whole tensors on the CPU, apart from the living ones.

        All processes call it, since it gathers what is sharded.
        """
        files = self.files()
        owners = dealt({file: sum(t.nbytes for t in parts.values()) for file, parts in files.items()}, group)
        copies: Files = {file: {} for file in files if owners[file] == group.rank}
        for file, tensors in files.items():
            for name, tensor in tensors.items():
                # One by one: no GPU ever holds more than one tensor in whole.
                value = whole(tensor.detach())
                if file in copies:
                    copies[file][name] = value.to("cpu", copy=True).contiguous()
        return copies

    def restore(self, commit: Commit, files: Iterable[tuple[str, Iterable[tuple[str, Tensor]]]]) -> None:
        """Take over a saved state, in place, from the tensors of all its files."""
        self.samples, self.step, self.seconds = commit.samples, commit.step, commit.seconds
        self.tracker = commit.tracker
        self.guard.restore(commit.guard)
        parameters = trainable(self.network)
        own: dict[str, dict[str, Any]] = {"weights": parameters, "ema": self.ema.weights}
        for file, tensors in files:
            kind = file.partition(".")[0].partition("-")[0]
            for full_name, value in tensors:
                if kind in own:
                    fill(own[kind][full_name].detach(), value)
                    continue
                name, key = full_name.rsplit("/", 1)
                parameter = parameters[name]
                # Mapped bytes may be unaligned, and kernels then sum in another order: the same numbers,
                # other last bits two steps later. A copy is aligned as a fresh tensor is.
                moment = value.clone()
                if value.shape == parameter.shape and value.ndim:
                    fill(moment := torch.empty_like(parameter, dtype=value.dtype), value)
                self.optimizer.state[parameter][key] = moment.to(parameter.device)


def dealt(sizes: Mapping[str, int], group: ProcessGroup) -> dict[str, int]:
    """Which rank writes or reads each file: the largest first, each to the one that has least."""
    # All come to the same answer by themselves, from sizes that all know.
    loads, owners = [0] * group.size, dict[str, int]()
    for file in sorted(sizes, key=lambda file: (-sizes[file], file)):
        owners[file] = loads.index(min(loads))
        loads[owners[file]] += sizes[file]
    return owners


class Saver:
    """Commits checkpoints beside the training: the state is copied at once and written by a thread.

    All processes call it: each writes its own files, and rank 0 names those of all once they are there. A
    write that fails is told and made up for by the next one; only a takeover, and a failure of a milestone or
    of the write that is waited for, end the run. A resume must agree with `learned`, the settings that the
    weights depend on; of commits the newest `keep` stay, and milestones.
    """

    def __init__(
        self, store: Store, log: Log, learned: dict[str, Any], keep: int, group: ProcessGroup = ALONE
    ) -> None:
        self.store, self.log, self.learned, self.keep, self.group = store, log, learned, keep, group
        self.committed, self.seconds = -1, 0.0  # step of the last commit, and how long it took
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="saver")
        # The files that this process writes, what names those of all, and whether it is a milestone.
        self._pending: tuple[Future[list[FileEntry]], Callable[[list[FileEntry]], None], bool] | None = None

    def save(self, state: TrainState, milestone: bool = False) -> None:
        """Commit this state; returns when it has been copied, after the write before it is done."""
        # At most one write at a time: memory holds two states, the living one and its copy, and never a
        # third.
        self.settle()
        start = time.monotonic()
        commit = Commit(
            samples=state.samples,
            step=state.step,
            seconds=state.seconds,
            recipe=digest(self.learned),
            guard=state.guard.counters(),
            tracker=state.tracker,
        )
        name = f"checkpoints/{commit.step:08d}-{self.log.holder}"
        # An entry whose answer was lost may name what is there: it is not written over.
        there = self.group.once(lambda: _told(partial(self.store.exists, f"{name}/{COMMIT}"), fatal=False))
        files = self._thread.submit(self._write, name, {} if there else state.tensors(self.group))
        self._pending = files, partial(self._commit, name, commit, milestone, start), milestone

    @property
    def writing(self) -> bool:
        """Whether this process is still at its files."""
        return self._pending is not None and not self._pending[0].done()

    def close(self) -> None:
        """End the thread; a write that is under way is finished. Its error would hide what led here."""
        try:
            if self.group.size == 1:  # other ranks may never come to where they would agree on it
                _told(self.settle, fatal=False)
        finally:
            self._thread.shutdown()

    def settle(self, fatal: bool = False) -> None:
        """Wait until all files are written, and name them; a failure is told, or `fatal`: a `StoreError`."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        # No later write makes up for a milestone: a run that goes on from the commit before makes it again.
        files, commit, milestone = pending
        fatal = fatal or milestone
        written = self.group.each(lambda: _told(files.result, fatal))

        # Between two steps, since the files of several processes are known to all only there; it is quick.
        def name() -> int:
            if None not in written:
                _told(partial(commit, [entry for own in written for entry in own]), fatal)
            return self.committed

        self.committed = self.group.once(name)

    def _write(self, name: str, files: Files) -> list[FileEntry]:
        # Each is given up once it is written. First all files, then COMMIT.json, then the log's entry, then
        # old ones go: a kill between any two leaves a folder that nobody names, never a name without bytes.
        return [write_blocks(self.store, name, file, to_blocks(files.pop(file))) for file in list(files)]

    def _commit(
        self, name: str, commit: Commit, milestone: bool, start: float, files: list[FileEntry]
    ) -> None:
        key = f"{name}/{COMMIT}"
        if files:
            self.store.create_json(key, commit.model_copy(update={"files": files}).to_json())
        shown = commit.model_dump(include={"samples", "step", "seconds"})
        hashed = sha256(self.store.get(key))
        self.log.append("commit", checkpoint=name, sha256=hashed, milestone=milestone, **shown)
        self.committed, self.seconds = commit.step, time.monotonic() - start
        # What this holder and those before it left goes, but for the newest commits, the milestones, and what
        # was set aside for whoever wants to know why. What later holders wrote is never touched: this process
        # may have been overtaken without knowing it yet. Only now, with the newer commit in the log: a kill
        # at any line leaves one whole checkpoint at least.
        entries, commits = self.log.entries(), self.log.commits()
        stay = {entry.checkpoint for entry in entries if entry.kind == "set_aside"}
        stay |= {e.checkpoint for e in commits[-self.keep :]} | {e.checkpoint for e in commits if e.milestone}
        holders = [entry.holder for entry in entries if entry.kind == "acquire"]
        ours = set(holders[: holders.index(self.log.holder) + 1])
        paths = [key.split("/") for key in self.store.list("checkpoints")]
        old = [path for path in paths if "/".join(path[:2]) not in stay and path[1].partition("-")[2] in ours]
        # The last commit is whole as well with old ones beside it.
        _told(lambda: self.store.delete(*map("/".join, old)), fatal=False)


def _told(do: Callable[[], Any], fatal: bool) -> Any:
    try:
        return do()
    except StoreError as error:
        if fatal or isinstance(error, Fenced):
            raise
        say(f"warning: a checkpoint could not be saved or removed: {error}")  # the next one makes up for it
        return None


def resume(
    state: TrainState, store: Store, log: Log, learned: dict[str, Any], group: ProcessGroup = ALONE
) -> bool:
    """Go on from the newest whole checkpoint, if there is one; damaged ones on the way are set aside.

    Each process reads its share of the files, however many wrote them, and sends all others their tensors.
    `ConfigError` if it was made with other settings.
    """
    there = (entry for entry in reversed(log.commits()) if store.list(entry.checkpoint))  # others were pruned
    entry = group.once(lambda: next(there, None))
    if entry is None:
        return False
    name, files = entry.checkpoint, Files()

    def read() -> Commit | str:
        try:
            if sha256(store.get(f"{name}/{COMMIT}")) != entry.sha256:
                fix = "it is damaged: an older one is used"
                raise Damaged(f"{name}/{COMMIT} is not what the log says", fix)
            commit = Commit.read(store, f"{name}/{COMMIT}")
            owners = dealt({file.path: file.bytes for file in commit.files}, group)
            for file in commit.files:
                if owners[file.path] == group.rank:
                    path = check_file(store, name, file)
                    files[file.path] = read_tensors(path, store.name(f"{name}/{file.path}"))
                    if store.local is None:  # of a copy nobody but the map needs the name
                        path.unlink(missing_ok=True)
        except (Absent, Damaged) as error:  # a store that does not answer says nothing about a checkpoint
            return str(error)
        return commit

    def set_aside(reason: str) -> None:
        say(f"warning: checkpoint set aside: {reason}")
        log.append("set_aside", checkpoint=name, reason=reason)

    answers = group.each(read)
    for wrong in answers:
        if isinstance(wrong, str):
            group.once(partial(set_aside, wrong))
            return resume(state, store, log, learned, group)
    commit = answers[0]
    assert isinstance(commit, Commit)
    if commit.recipe != digest(learned):
        raise ConfigError(f"{name} was made with other settings", f"restore them, or remove {store.location}")
    owners = dealt({file.path: file.bytes for file in commit.files}, group)
    arriving = ((path, group.spread(files.pop(path, {}), owner)) for path, owner in owners.items())
    state.restore(commit, arriving)
    return True
