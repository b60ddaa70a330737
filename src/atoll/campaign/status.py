"""How all runs of a campaign stand, read from its store, wherever that is. Nothing of a run is written.

What happened is in a run's log; what happens now is in its heartbeat. Ages are by the store's clock.
"""

import json
import math
import shlex
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Literal

from atoll.base.console import say
from atoll.base.errors import AtollError, ConfigError, StoreError
from atoll.base.text import columns, count, many, printable, sharing_sentence, size
from atoll.campaign.folder import Campaign
from atoll.campaign.roles import RUNS
from atoll.campaign.runs import Run, RunPlan, runs_of, stored_bytes
from atoll.model.checkpoint import Checkpoint
from atoll.store.lease import Heartbeat, has_ended, last_sign, read_heartbeat, store_time
from atoll.store.log import History
from atoll.store.manifest import FileEntry
from atoll.store.signatures import UNSIGNED, signer

SCHEMA = 1
AT_ONCE = 16
"""Runs that are looked at side by side: a look is some waiting for the store."""
WIDTH = 100
HOST_WIDTH = 8
"""Columns of a terminal, and how many of them a host's name gets at least."""
HEAD = ("  run", "state", "step", "done", "loss", "img/s", "left", "saved", "age", "beat", "restarts")

State = Literal["waiting", "training", "stale", "failed", "left", "published", "unreadable"]
BAD: tuple[State, ...] = ("stale", "failed", "unreadable")
"""States that somebody has to do something about."""


@dataclass
class RunStatus:
    """How one run stands; None is not known, or not yet."""

    name: str
    role: str
    island: int | None = None
    state: State = "waiting"  # for somebody to start it; stale: it died or fell silent; left: told to, saved
    phase: str | None = None  # of its process: starting, training, validating, saving, publishing
    step: int | None = None  # optimizer steps that are known to be done, saved or not
    steps: int | None = None  # of the whole run
    batch: int | None = None
    loss: float | None = None  # of the last step
    speed: float | None = None  # images per second since its process started
    seconds_left: float | None = None  # at that speed
    committed: int | None = None  # step of the newest checkpoint
    commit_age: float | None = None  # seconds
    heartbeat_age: float | None = None  # seconds since its process last gave a sign of life
    ended: bool = False  # whether its process is known to have ended; only told for those of this machine
    holder: str | None = None  # the process that holds or last held it
    host: str | None = None
    ranks: int | None = None  # processes that share its batch
    restarts: int = 0
    lost: int = 0  # steps that had to be done again after restarts
    skipped: int | None = None  # steps that the guard left out
    set_aside: int = 0  # checkpoints that were damaged
    damaged: int = 0  # log entries that were damaged, of those that were read
    error: str | None = None  # why it failed or cannot be read
    train_flops: float = 0.0  # of the whole run
    published_bytes: int | None = None
    signer: str | None = None  # by the signature's own word; `unsigned`, or what is wrong with it

    @property
    def done_flops(self) -> float:
        """Operations that need not be done again if no more processes die."""
        done = self.step if self.state in ("training", "published") else self.committed
        return self.train_flops * (done or 0) / self.steps if self.steps else 0.0


@dataclass(frozen=True)
class TransferBytes:
    """Bytes that cross between places over the whole campaign."""

    data_out: int  # data sets and initial weights, from the partition to the islands
    islands: int  # whose data set is counted in
    networks_in: int  # published experts and the router, to the assembly
    networks: int  # that are counted in
    between_islands: int  # what experts' data sets name outside their folders; they open nothing but that


@dataclass(frozen=True)
class CampaignStatus:
    """How a campaign stands."""

    location: str
    partitioned: bool
    clock: Literal["store", "local"]  # whose clock ages are by: this machine's where the store is read-only
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

    @property
    def seconds_left(self) -> float | None:
        """Until all is trained, if as much goes on side by side as now; None while nothing trains."""
        rates = [
            run.speed * run.train_flops / (run.steps * run.batch)
            for run in self.runs
            if run.speed and run.steps and run.batch
        ]
        return sum(run.train_flops - run.done_flops for run in self.runs) / sum(rates) if sum(rates) else None

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
            "seconds_left": self.seconds_left,
            "bytes": asdict(self.transfer),
            "attention": [run.name for run in self.bad],
        }


class Observer:
    """Reads how a campaign stands, once or again and again; what cannot change is read once."""

    def __init__(self, campaign: Campaign) -> None:
        self.campaign = campaign
        self._histories = {r: History(campaign.store, f"{r.folder}/run") for r in runs_of(campaign.config)}
        self._plans: dict[Run, RunPlan] = {}
        self._bytes_out: dict[Run, tuple[int, int]] = {}
        # Asked once, and when ours is set: every question writes a file, and clocks hardly drift in a watch.
        self._ahead, self._ours = 0.0, math.inf  # seconds: the store's clock over ours, ours over monotonic
        self._clock: Literal["store", "local"] = "store"

    def read(self) -> CampaignStatus:
        """How it stands now; a run that cannot be read says so and hides no other."""
        store, config = self.campaign.store, self.campaign.config
        partitioned = self.campaign.is_partitioned
        if abs((ours := time.time() - time.monotonic()) - self._ours) > 1:
            # Ages are differences of the store's own times: clocks of islands may be hours apart. A file
            # beside `campaign.json`, gone at once, tells its time; a read-only store cannot.
            self._ours = ours
            try:
                self._ahead, self._clock = store_time(store) - time.time(), "store"
            except StoreError:
                self._ahead, self._clock = 0.0, "local"
        now = time.time() + self._ahead
        # Threads, as a look is nothing but waiting for the store: islands are not asked one after the other.
        with ThreadPoolExecutor(AT_ONCE) as pool:
            runs = list(pool.map(lambda run: self._read(run, now), self._histories))
            sent = list(pool.map(self._sent, self._histories)) if partitioned else []
        counted = [sizes for sizes in sent if sizes is not None]
        back = [run.published_bytes for run in runs if RUNS[run.role].assembled]
        published = [size for size in back if size is not None]
        data_out, between = (sum(sizes[part] for sizes in counted) for part in (0, 1))
        transfer = TransferBytes(data_out, len(counted), sum(published), len(published), between)
        shared = config.budget.pretrain, config.network.init != "scratch", bool(config.origin)
        common = sharing_sentence(*shared)
        return CampaignStatus(store.location, partitioned, self._clock, runs, common, transfer)

    def _sent(self, run: Run) -> tuple[int, int] | None:
        # Bytes that an island was sent, and those that it reads from elsewhere while it trains.
        if run.expert is None or run in self._bytes_out:
            return self._bytes_out.get(run)
        data, initial = stored_bytes(self.campaign.store, run.expert), 0
        with suppress(AtollError, KeyError, TypeError):  # weights that are drawn are not sent
            files = self.campaign.store.get_json(f"{run.folder}/init/init.json")["files"]
            initial = sum(FileEntry.parse(file, "init.json").bytes for file in files)
        if data is not None:
            self._bytes_out[run] = (data[0] + initial, data[1])
        return self._bytes_out.get(run)

    def _read(self, run: Run, now: float) -> RunStatus:
        status = RunStatus(run.name, *run)
        try:
            self._fill(status, run, now)
        except AtollError as error:
            return RunStatus(run.name, *run, state="unreadable", error=str(error))
        return status

    def _fill(self, status: RunStatus, run: Run, now: float) -> None:
        store, history = self.campaign.store, self._histories[run]
        if run not in self._plans and store.exists(run.plan):
            self._plans[run] = RunPlan.read(store, run.plan)
        if (plan := self._plans.get(run)) is not None:
            status.steps, status.batch, status.train_flops = plan.steps, plan.batch, plan.train_flops

        # What happened.
        history.refresh()
        entries = history.entries()
        kinds = [entry.kind for entry in entries]
        status.lost = sum(entry.lost for entry in entries)
        status.set_aside, status.damaged = kinds.count("set_aside"), kinds.count("damaged")
        if starts := [entry for entry in entries if entry.kind == "acquire"]:
            status.restarts, holder = len(starts) - 1, starts[-1]
            status.holder, status.ranks = holder.holder, holder.ranks
            status.host = holder.host or holder.holder
        end = history.last("acquire", "damaged", "release", "publish")
        if run.published(store):  # without an entry it was trained in a copy of the island
            status.state = "published"
        elif end is not None:
            last = end[0]
            if last.kind == "release":
                status.state = "failed" if last.reason == "failed" else "left"
                status.step, status.error = last.step, last.error
            else:  # what is damaged may be an acquire, and what is published not yet, or no more, be there
                status.state = "training"
        if (commit := history.last_commit()) is not None:
            entry, key = commit
            status.committed, status.step = entry.step, max(entry.step, status.step or 0)
            # The store's time is reckoned from one question, so a fresh file may lie in its future.
            status.commit_age = max(0.0, now - store.modified(key))

        # What happens now.
        if (acquired := history.last("acquire", "damaged")) is not None:
            beat = read_heartbeat(store, f"{run.folder}/run")
            # An earlier holder's heartbeat says nothing about this one, which may have had no time yet.
            if beat is None or beat.holder != status.holder:
                beat = Heartbeat(holder="")
            if beat.step is not None:
                status.step = max(beat.step, status.step or 0)
            status.ranks = beat.ranks or status.ranks
            status.loss, status.skipped = beat.loss, beat.skipped
            if status.state == "training":
                status.heartbeat_age = max(0.0, now - last_sign(store, *acquired, f"{run.folder}/run"))
                status.ended = has_ended(acquired[0].process)
                expiry = self.campaign.config.training(*run).lease.expiry_seconds
                if status.ended or status.heartbeat_age > expiry:
                    status.state = "stale"
                else:
                    status.phase, status.speed = beat.phase, beat.speed or None
                    if beat.speed and status.steps and status.batch:
                        left = max(0, status.steps - (status.step or 0))
                        status.seconds_left = left * status.batch / beat.speed

        # What came of it.
        if status.state == "published":
            if (publish := history.last("publish")) is not None:
                status.step = publish[0].step
                status.train_flops *= status.step > 0  # adopted: nothing is trained, nor left to train
                status.published_bytes = sum(file.bytes for file in publish[0].files)
            else:
                status.step = status.steps
                status.published_bytes = sum(store.size(key) for key in store.list(run.network))
            try:
                status.signer = signer(store, run.network) or UNSIGNED
                if status.signer != UNSIGNED and (trusted := self.campaign.config.trusted):
                    Checkpoint(store, run.network).check_trusted(trusted)
                elif status.signer != UNSIGNED:
                    status.signer += ", unchecked"
            except ConfigError as error:  # nothing here can check it
                status.signer = f"{status.signer}, unchecked ({error})"
            except AtollError as error:
                status.signer = f"nobody ({error})"


def show(campaign: Campaign, as_json: bool) -> CampaignStatus:
    """Print how a campaign stands."""
    status = Observer(campaign).read()
    say(json.dumps(status.to_json(), indent=2) if as_json else "\n".join(lines(status)))
    return status


def watch(campaign: Campaign, every: float, as_json: bool) -> CampaignStatus | None:
    """Print it again and again, until all runs are published or somebody interrupts; the last status."""
    observer, status = Observer(campaign), None
    # Clearing the screen is for a terminal: in a file or a pipe the codes would be noise.
    head = "\x1b[H\x1b[2J" if sys.stdout.isatty() and not as_json else ""
    try:
        while True:
            try:
                status = observer.read()
                text = [*lines(status), "", time.strftime("%H:%M:%S"), ""]
                print(head, end="")
                say(json.dumps(status.to_json()) if as_json else "\n".join(text))
                if status.finished:
                    return status
            except StoreError as error:  # it may come back
                print(printable(f"warning: {error}"), file=sys.stderr, flush=True)
            time.sleep(every)
    except KeyboardInterrupt:
        return status


def lines(status: CampaignStatus) -> list[str]:
    """The state as a person reads it, within `WIDTH` columns."""
    runs, sent = status.runs, status.transfer
    rows = columns([HEAD, *map(_row, runs)], left=(0, 1))
    # The host comes last and gives way: everything else is needed to the last digit.
    room = max(HOST_WIDTH, WIDTH - len(rows[0]) - 2)
    hosts = ["host"]
    for run in runs:
        ranks = f"{run.ranks}x " if run.host is not None and (run.ranks or 1) > 1 else ""
        host = printable(f"{ranks}{run.host or '-'}")
        hosts.append(host if len(host) <= room else host[: room - 1] + "…")
    text = [f"{row}  {host}" for row, host in zip(rows, hosts, strict=True)]

    # What happened to a run that was made up for, and is worth knowing.
    notes: list[str] = []
    for run in runs:
        events = (
            (run.lost, f"{run.lost:,} steps done again after {many(run.restarts, 'restart')}"),
            (run.skipped, f"{many(run.skipped or 0, 'step')} left out by the guard"),
            (run.set_aside, f"{many(run.set_aside, 'damaged checkpoint')} set aside"),
            (run.damaged, f"{run.damaged} damaged log entries"),
        )
        notes += [f"  {run.name}: {event}" for number, event in events if number]
    text += [*([""] if notes else []), *notes]

    # Totals.
    done, whole = sum(run.done_flops for run in runs), sum(run.train_flops for run in runs)
    islands = sum(run.island is not None for run in runs)
    published = sum(run.state == "published" for run in runs)
    # Rounded down, as in `_row`: 100% is said of finished work alone.
    share = f"{int(100 * done / whole)}% of {whole:.3g} training FLOPs; " if whole else ""
    left = "" if status.seconds_left is None else f"; about {_age(status.seconds_left)} left at this speed"
    out, back = size(sent.data_out), size(sent.networks_in)
    text += [
        "",
        f"Done: {share}{published} of {len(runs)} runs published{left}.",
        f"Exchanged: data out to {sent.islands} of {islands} islands {out}; {sent.networks} of {islands + 1} "
        f"networks in {back};",
        f"  between islands while they train {size(sent.between_islands)}.",
        *textwrap.wrap(status.in_common, WIDTH),
    ]

    # Who signed what is published.
    signed: dict[str, list[str]] = {}
    for run in runs:
        if run.signer is not None:
            signed.setdefault(run.signer, []).append(run.name)
    unsigned = signed.pop(UNSIGNED, [])
    text += [f"Signed by {key}: {', '.join(names)}." for key, names in signed.items()]
    if unsigned:
        text.append(f"Unsigned: {', '.join(unsigned)}." if signed else "Nothing that is published is signed.")
    if status.clock == "local":
        text.append("Ages are by this machine's clock: the store is read-only and cannot tell its own.")

    # What to do about it.
    text += [""] if status.bad or not status.partitioned else []
    for run in status.bad:
        text += textwrap.wrap(f"! {run.name} {trouble(run)}", WIDTH, subsequent_indent="    ")
    launch = f"atoll launch {shlex.quote(status.location)}"
    idle = [run for run in runs if run.state in ("left", "waiting")]
    if not status.partitioned:
        here = [run for run in runs if run.steps is not None]
        names, unfinished = ", ".join(run.name for run in here), any(run.state != "published" for run in here)
        copied = f"A copy of {names} alone: {'train it here, and ' * unfinished}copy it back to the campaign."
        text.append(copied if here else f"Not partitioned yet. Start: {launch}")
    elif any(run.state in ("stale", "failed") for run in status.bad):
        text.append(f"Go on from what is saved: {launch}")
    elif idle and not status.bad and not any(run.state == "training" for run in runs):
        text += ["", f"{many(len(idle), 'run')} to do: {launch}"]
    # Hosts and errors come from other machines: no control character of theirs may reach the terminal.
    return [printable(line) for line in text]


def _row(run: RunStatus) -> tuple[str, ...]:
    part = 1.0 if run.state == "published" else (run.step or 0) / run.steps if run.steps else 0.0
    return (
        f"{'!' if run.state in BAD else ' '} {run.name}",
        run.state,
        "-" if run.steps is None else f"{_short(run.step or 0)}/{_short(run.steps)}",
        f"{int(100 * part)}%",
        "-" if run.loss is None else f"{run.loss:.3g}",
        "-" if run.speed is None else _short(run.speed),
        _age(run.seconds_left),
        "-" if run.committed is None else _short(run.committed),
        _age(run.commit_age),
        _age(run.heartbeat_age),
        f"{run.restarts} (-{_short(run.lost)})" if run.lost else str(run.restarts),
    )


def trouble(run: RunStatus) -> str:
    """What is wrong with a run in a bad state, after its name."""
    if run.state != "stale":
        return f"{'failed' if run.state == 'failed' else 'cannot be read'}: {run.error}"
    saved = "nothing is saved" if run.committed is None else f"saved at step {run.committed:,}"
    why = "its process has ended" if run.ended else f"no sign of life for {_age(run.heartbeat_age)}"
    return f"is stale: {why} ({run.holder}); {saved}"


def _short(number: float) -> str:
    """A number in five characters or so: `9999`, `12.3k`, `1.2M`."""
    if number >= 1e4:
        return count(number).replace(" ", "").replace("B", "G")
    return f"{number:.0f}" if number >= 100 or number == int(number) else f"{number:.2g}"


def _age(seconds: float | None) -> str:
    """Seconds as `45s`, `12m`, `3.2h`, `5.1d`."""
    if seconds is None:
        return "-"
    for unit, name in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.2g}{name}" if seconds < 99.5 * unit else f"{seconds / unit:.0f}{name}"
    return f"{seconds:.0f}s"
