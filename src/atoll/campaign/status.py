"""How all runs of a campaign stand, read from its store, wherever that is. Nothing of a run is written.

What happened is in a run's log; what happens now is in its heartbeat. Ages are differences of two times that
the store gave, as in `store/lease.py`.
"""

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Literal

from atoll.base.errors import AtollError, StoreError
from atoll.base.text import in_common
from atoll.campaign.folder import Campaign
from atoll.campaign.roles import RUNS
from atoll.campaign.runs import Run, RunPlan, runs_of, stored_bytes
from atoll.store.lease import Heartbeat, has_ended, last_sign, read_heartbeat, store_time
from atoll.store.log import History
from atoll.store.signatures import UNSIGNED, signer

SCHEMA = 1
AT_ONCE = 16
"""Runs that are looked at side by side: a look is some waiting for the store."""

State = Literal["waiting", "training", "stale", "failed", "left", "published", "unreadable"]
BAD: tuple[State, ...] = ("stale", "failed", "unreadable")
"""States that somebody has to do something about."""


@dataclass
class RunStatus:
    """How one run stands; None is not known, or not yet.

    Attributes:
        name: `island 3`, `router`.
        role: a name of `RUNS`.
        island: number of the cluster.
        state: waiting (nobody started it), training, stale (its process died or fell silent), failed, left
            (told to, saved), published, unreadable.
        phase: what its process is doing: starting, training, validating, saving, publishing.
        step: optimizer steps that are known to be done, saved or not.
        steps: of the whole run.
        batch: samples per step.
        loss: of the last step.
        speed: images per second since its process started.
        seconds_left: at that speed.
        committed: step of the newest checkpoint.
        commit_age: seconds since that was saved.
        heartbeat_age: seconds since its process last gave a sign of life.
        ended: whether its process is known to have ended; only told for processes of this machine.
        holder: the process that holds or last held it.
        host: the machine of that.
        ranks: processes that share its batch.
        restarts: times that it was started again.
        lost: steps that had to be done again after restarts.
        skipped: steps that the guard left out.
        set_aside: checkpoints that were damaged.
        damaged: log entries that were damaged, of those that were read.
        error: why it failed or cannot be read.
        train_flops: operations of the whole run.
        published_bytes: size of the published network.
        signer: public key that signed it, `unsigned`, or what is wrong with the signature.
    """

    name: str
    role: str
    island: int | None = None
    state: State = "waiting"
    phase: str | None = None
    step: int | None = None
    steps: int | None = None
    batch: int | None = None
    loss: float | None = None
    speed: float | None = None
    seconds_left: float | None = None
    committed: int | None = None
    commit_age: float | None = None
    heartbeat_age: float | None = None
    ended: bool = False
    holder: str | None = None
    host: str | None = None
    ranks: int | None = None
    restarts: int = 0
    lost: int = 0
    skipped: int | None = None
    set_aside: int = 0
    damaged: int = 0
    error: str | None = None
    train_flops: float = 0.0
    published_bytes: int | None = None
    signer: str | None = None

    @property
    def done_flops(self) -> float:
        """Operations that need not be done again if no more processes die."""
        kept = self.step if self.state in ("training", "published") else self.committed
        return self.train_flops * (kept or 0) / self.steps if self.steps else 0.0


@dataclass(frozen=True)
class TransferBytes:
    """Bytes that cross between places over the whole campaign.

    Attributes:
        data_out: data sets and initial weights, from the partition to the islands.
        islands: islands whose data set is counted in.
        networks_in: published experts and the router, to the assembly.
        networks: how many are counted in.
        between_islands: what experts' data sets name outside their own folders, which they open nothing but.
    """

    data_out: int
    islands: int
    networks_in: int
    networks: int
    between_islands: int


@dataclass(frozen=True)
class CampaignStatus:
    """How a campaign stands.

    Attributes:
        location: folder or URL.
        partitioned: whether there are islands.
        clock: whose clock ages are by: the store's, or this machine's where the store is read-only.
        runs: pretrain, experts, router, monolith, student.
        in_common: what the experts have in common, as a sentence.
        transfer: bytes.
    """

    location: str
    partitioned: bool
    clock: Literal["store", "local"]
    runs: list[RunStatus]
    in_common: str
    transfer: TransferBytes

    @property
    def bad(self) -> list[RunStatus]:
        """Runs that somebody has to do something about."""
        return [run for run in self.runs if run.state in BAD]

    @property
    def finished(self) -> bool:
        """Whether all runs are published."""
        return all(run.state == "published" for run in self.runs)

    def to_json(self) -> dict[str, Any]:
        """Plain data; bytes, seconds, operations."""
        return {
            "schema": SCHEMA,
            "campaign": self.location,
            "partitioned": self.partitioned,
            "clock": self.clock,
            "runs": [asdict(run) for run in self.runs],
            "in_common": self.in_common,
            "train_flops": {
                "done": sum(run.done_flops for run in self.runs),
                "all": sum(run.train_flops for run in self.runs),
            },
            "bytes": asdict(self.transfer),
            "attention": [run.name for run in self.bad],
        }


class Observer:
    """Reads how a campaign stands, once or again and again; what cannot change is read once.

    Args:
        campaign: at any stage.
    """

    def __init__(self, campaign: Campaign) -> None:
        self.campaign = campaign
        self._runs = [_ObservedRun(campaign, run) for run in runs_of(campaign.config)]
        self._ahead: float | None = None  # seconds that the store's clock is ahead of ours
        self._clock: Literal["store", "local"] = "store"

    def read(self) -> CampaignStatus:
        """How it stands now; a run that cannot be read says so and hides no other."""
        store, config = self.campaign.store, self.campaign.config
        partitioned = self.campaign.is_partitioned
        if self._ahead is None:
            # Ages are differences of the store's own times: clocks of islands may be hours apart. A file
            # beside `campaign.json`, gone at once, tells its time; a read-only store cannot.
            try:
                self._ahead = store_time(store) - time.time()
            except StoreError:
                self._ahead, self._clock = 0.0, "local"
        now = time.time() + self._ahead
        with ThreadPoolExecutor(AT_ONCE) as pool:
            runs = list(pool.map(lambda run: run.read(now), self._runs))
            sent = list(pool.map(lambda run: run.bytes_out(), self._runs)) if partitioned else []
        counted = [sizes for sizes in sent if sizes is not None]
        back = [run.published_bytes for run in runs if RUNS[run.role].assembled]
        published = [size for size in back if size is not None]
        data_out, between = (sum(sizes[part] for sizes in counted) for part in (0, 1))
        transfer = TransferBytes(data_out, len(counted), sum(published), len(published), between)
        common = in_common(config.budget.pretrain, config.network.init != "scratch")
        return CampaignStatus(store.location, partitioned, self._clock, runs, common, transfer)


class _ObservedRun:
    def __init__(self, campaign: Campaign, run: Run) -> None:
        self.campaign, self.run, self.folder = campaign, run, run.folder
        self.history = History(campaign.store, f"{run.folder}/run")
        self.plan: RunPlan | None = None
        self._bytes_out: tuple[int, int] | None = None

    def bytes_out(self) -> tuple[int, int] | None:
        """Bytes that an island was sent, and those that it reads from elsewhere while it trains.

        None for other runs, or if its data set is not there.
        """
        if self.run.expert is None or self._bytes_out is not None:
            return self._bytes_out
        data, initial = stored_bytes(self.campaign.store, self.run.expert), 0
        with suppress(StoreError, KeyError, TypeError, ValueError):  # weights that are drawn are not sent
            files = self.campaign.store.get_json(f"{self.folder}/init/init.json")["files"]
            initial = sum(int(file["bytes"]) for file in files)
        self._bytes_out = None if data is None else (data[0] + initial, data[1])
        return self._bytes_out

    def read(self, now: float) -> RunStatus:
        status, store = RunStatus(self.run.name, *self.run), self.campaign.store
        try:
            if self.plan is None and store.exists(self.run.plan):
                self.plan = RunPlan.read(store, self.run.plan)
            if self.plan is not None:
                status.steps, status.batch = self.plan.steps, self.plan.batch
                status.train_flops = self.plan.train_flops
            self.history.refresh()
            self._read_log(status, now)
            self._read_heartbeat(status, now)
            if status.state != "published" and store.exists(f"{self.run.network}/card.json"):
                status.state = "published"  # trained in a copy of the island
            if status.state == "published":
                self._read_publication(status)
        except AtollError as error:
            return RunStatus(self.run.name, *self.run, state="unreadable", error=str(error))
        return status

    def _read_log(self, status: RunStatus, now: float) -> None:
        entries, history = self.history.entries(), self.history
        kinds = [entry.kind for entry in entries]
        status.lost = sum(entry.lost for entry in entries)
        status.set_aside, status.damaged = kinds.count("set_aside"), kinds.count("damaged")
        starts = [entry for entry in entries if entry.kind == "acquire"]
        if starts:
            status.restarts, holder = len(starts) - 1, starts[-1]
            status.holder, status.ranks = holder.holder, holder.ranks
            status.host = holder.host or holder.holder
        if (end := history.last("acquire", "damaged", "release", "publish")) is not None:
            last = end[0]
            if last.kind == "publish":
                status.state = "published"
            elif last.kind == "release":
                status.state = "failed" if last.reason == "failed" else "left"
                status.step, status.error = last.step, last.error
            else:  # what is damaged may be an acquire
                status.state = "training"
        if (commit := history.last_commit()) is not None:
            entry, key = commit
            status.committed, status.step = entry.step, _latest(status.step, entry.step)
            status.commit_age = max(0.0, now - history.store.modified(key))

    def _read_heartbeat(self, status: RunStatus, now: float) -> None:
        acquired = self.history.last("acquire", "damaged")
        if acquired is None:
            return
        folder, store = f"{self.folder}/run", self.campaign.store
        beat = read_heartbeat(store, folder)
        # An earlier holder's heartbeat says nothing about this one, which may not have had time for its own.
        if beat is None or beat.holder != status.holder:
            beat = Heartbeat(holder="")
        status.step, status.ranks = _latest(status.step, beat.step), beat.ranks or status.ranks
        status.loss, status.skipped = beat.loss, beat.skipped
        if status.state != "training":
            return
        status.heartbeat_age = max(0.0, now - last_sign(store, *acquired, folder))
        status.ended = has_ended(acquired[0].process)
        expiry = self.campaign.config.training(*self.run).lease.expiry_seconds
        if status.ended or status.heartbeat_age > expiry:
            status.state = "stale"
            return
        status.phase, status.speed = beat.phase, beat.speed or None
        if beat.speed and status.steps and status.batch:
            status.seconds_left = max(0, status.steps - (status.step or 0)) * status.batch / beat.speed

    def _read_publication(self, status: RunStatus) -> None:
        publish, store = self.history.last("publish"), self.campaign.store
        status.phase = status.error = None
        if publish is not None:
            status.step = publish[0].step  # 0 if it was adopted
            status.published_bytes = sum(file.bytes for file in publish[0].files)
        else:
            status.step = status.steps
            status.published_bytes = sum(store.size(key) for key in store.list(self.run.network))
        try:
            status.signer = signer(store, f"{self.run.network}/card.json") or UNSIGNED
        except AtollError as error:
            status.signer = f"nobody ({error})"


def _latest(one: int | None, other: int | None) -> int | None:
    return max((step for step in (one, other) if step is not None), default=None)
