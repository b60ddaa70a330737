"""Checkpoints: everything that a run needs to go on, in one commit.

A checkpoint is a folder of safetensors and JSON under the holder's own name, verified and then made
real by `COMMIT.json`; the island's log names it, with the hash of that file. The newest one that is
whole wins; one that is torn or damaged is set aside in the log, where everybody sees it.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor, nn

from atoll.base.console import say
from atoll.base.errors import ConfigError, StoreError
from atoll.base.hashing import digest, sha256
from atoll.campaign.runs import MetricsLine
from atoll.store.log import COMMIT, Commit, Fenced, Log
from atoll.store.manifest import publish, read_published
from atoll.store.store import Absent, Damaged, Store
from atoll.train.ema import Ema
from atoll.train.parallel import fill, whole
from atoll.train.spike_guard import Guard


@dataclass
class TrainState:
    """What changes while a network trains.

    Attributes:
        network: the network.
        ema: the average of its weights.
        optimizer: AdamW over its parameters.
        guard: the rolling bound on the loss.
        tracker: name of the run in trackers, the same over all restarts.
        samples: training samples consumed: the cursor.
        step: optimizer steps done.
        seconds: time spent in steps, over all restarts.
        metrics: lines of metrics.jsonl up to here.
    """

    network: nn.Module
    ema: Ema
    optimizer: torch.optim.Optimizer
    guard: Guard
    tracker: str = ""
    samples: int = 0
    step: int = 0
    seconds: float = 0.0
    metrics: list[MetricsLine] = field(default_factory=list)

    def tensors(self, keep: bool = True) -> dict[str, dict[str, Tensor]]:
        """The state's tensors by file: whole, on the CPU, apart from the live ones.

        All ranks call it, since it gathers what is sharded; those that do not `keep` it get nothing.
        """
        weights = {name: p.detach() for name, p in self.network.named_parameters()}
        files = {"weights": weights, "ema": self.ema.weights, "optimizer": self._optimizer_tensors()}
        result: dict[str, dict[str, Tensor]] = {f"{file}.safetensors": {} for file in files}
        for part, tensors in zip(result.values(), files.values(), strict=True):
            for name, tensor in tensors.items():
                gathered = whole(tensor.detach())
                if keep:
                    part[name] = gathered.to("cpu", copy=True).contiguous()
        return result

    def restore(self, commit: Commit, blobs: dict[str, bytes]) -> None:
        """Take over a saved state, in place."""
        self.samples, self.step, self.seconds = commit.samples, commit.step, commit.seconds
        self.tracker = commit.tracker
        self.guard.restore(commit.guard)
        weights, average = load_tensors(blobs["weights.safetensors"]), load_tensors(blobs["ema.safetensors"])
        for name, parameter in self.network.named_parameters():
            fill(parameter.detach(), weights[name])
            fill(self.ema.weights[name], average[name])
        self._restore_optimizer(load_tensors(blobs["optimizer.safetensors"]))

    def _optimizer_tensors(self) -> dict[str, Tensor]:
        return {
            f"{name}/{key}": torch.as_tensor(value)
            for name, parameter in self.network.named_parameters()
            for key, value in self.optimizer.state.get(parameter, {}).items()
        }

    def _restore_optimizer(self, tensors: dict[str, Tensor]) -> None:
        parameters = dict(self.network.named_parameters())
        for full_name, value in tensors.items():
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
    write that is waited for, end the run.

    Args:
        store: narrowed to the run's folder.
        log: whose holder we are.
        learned: settings that the weights depend on; a resume must agree with them.
        keep: newest commits that stay, besides milestones.
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


Loaded = tuple[Commit, dict[str, bytes]]
"""Content of COMMIT.json and the blobs."""


def newest(store: Store, log: Log) -> tuple[str, str, Loaded] | None:
    """Name, hash and content of the newest whole checkpoint; damaged ones on the way are set aside."""
    for entry in reversed(log.commits()):
        name, hashed = entry.checkpoint, entry.sha256
        if not store.list(name):
            continue  # pruned
        try:
            return name, hashed, load(store, name, hashed)
        except (Absent, Damaged) as error:  # a store that does not answer says nothing about a checkpoint
            say(f"warning: checkpoint set aside: {error}")
            log.append("set_aside", checkpoint=name, reason=str(error))
    return None


def load(store: Store, name: str, hashed: str) -> Loaded:
    """A checkpoint, verified.

    Raises:
        Absent: a part of it is missing.
        Damaged: it is torn or has changed.
    """
    if sha256(store.get(f"{name}/{COMMIT}")) != hashed:
        raise Damaged(f"{name}/{COMMIT} is not what the log says", "it is damaged: an older one is used")
    return read_published(store, name, COMMIT, Commit)


def restore(state: TrainState, name: str, loaded: Loaded, learned: dict[str, Any]) -> None:
    """Go on from a checkpoint.

    Raises:
        ConfigError: it belongs to other settings.
    """
    commit, blobs = loaded
    if commit.recipe != digest(learned):
        raise ConfigError(f"{name} was made with other settings", "restore them, or remove the run's folder")
    state.restore(commit, blobs)
