"""The log of one run: who holds it, what was committed, what was published.

Entries are `log/NNNNNN.json`, each created if-absent at the next number, so conditional create is all
that a store must offer. An `acquire` fences every earlier holder: its next append finds the number
taken, learns of the newer holder, and leaves. A `publish` ends the log: nobody acquires after it.
Whether a holder still lives is a question of patience only (`lease.py`); nothing here reads a clock.
"""

import threading
import time
from typing import Any, Literal

from pydantic import Field

from atoll.base.config import Config
from atoll.base.console import say
from atoll.base.errors import StoreError
from atoll.base.format import File
from atoll.base.hashing import digest
from atoll.base.safe_parse import read_json
from atoll.store.manifest import OwnFiles, Published
from atoll.store.store import Conflict, Store

COMMIT = "COMMIT.json"
"""File of a checkpoint that is written last and makes it real."""
MOST_STEPS = 10**9  # of the optimizer, in one run
EntryKind = Literal["acquire", "resume", "commit", "set_aside", "release", "publish", "damaged"]


class Commit(Published):
    """A whole checkpoint of a run: weights, their average and the optimizer's state."""

    FORMAT, VERSION, PLACE = "atoll/checkpoint", 2, "ROLE/run/checkpoints/STEP-HOLDER/COMMIT.json"
    REMEDY = "use the version of Atoll that wrote it, or remove run/ to start the run anew"

    samples: int
    """Training samples consumed: the cursor."""
    step: int
    """Optimizer steps done."""
    seconds: float
    """Time spent in steps, over all restarts."""
    recipe: str
    """Digest of all settings that decide the weights; a resume with others is refused."""
    guard: dict[str, Any]
    """`window` of the last losses, number of steps `skipped` and `in_a_row`."""
    tracker: str
    """As in the log."""


class Process(Config):
    """A process, told so that another one on the same machine can tell whether it has ended."""

    pid: int
    """Its number."""
    machine: str
    """Boot and process namespace: where numbers mean the same; empty where there is no /proc."""
    started: int | None
    """When it started, in clock ticks since boot."""


class Entry(File):
    """One entry of a run's log, with the fields of its kind and, last, a `digest` of all of them."""

    FORMAT, PLACE = "atoll/log-entry", "ROLE/run/log/NNNNNN.json"

    kind: EntryKind
    """What happened; `damaged` is not written: it stands for an entry that its digest does not fit."""
    holder: str = "?"
    """Host, process and six random letters; one for each start of the run."""
    time: float = 0.0
    """Seconds since 1970 by that machine's clock; for people only."""
    host: str = ""
    """acquire: where."""
    process: Process | None = None
    """acquire: which process."""
    tracker: str = ""
    """acquire: name of the run in TensorBoard and Weights & Biases, over all restarts."""
    threads: int | None = None
    """acquire: CPU threads of a process."""
    ranks: int | None = None
    """acquire: processes."""
    step: int = Field(default=0, ge=0, le=MOST_STEPS)
    """resume: step that it went on from; commit, release, publish: steps done."""
    lost: int = Field(default=0, ge=0, le=MOST_STEPS)
    """resume: steps that the process before had done and not saved."""
    checkpoint: str = ""
    """commit, set_aside: folder of the checkpoint, from `run/`."""
    sha256: str = ""
    """commit: digest of its `COMMIT.json`."""
    milestone: bool = False
    """commit: whether it stays for good."""
    samples: int = 0
    """commit: samples consumed."""
    seconds: float = 0.0
    """commit: time spent in steps, over all restarts."""
    reason: str = ""
    """set_aside: what was wrong with it; release: `left` (it was told to) or `failed`."""
    error: str | None = None
    """release: why it failed."""
    export: str = ""
    """publish: folder of what was published, from `run/`."""
    files: OwnFiles = []
    """publish: the files there, which `expert/` must match."""


class Fenced(StoreError):
    """Another process took this run over; what this one does no longer counts."""


class Log:
    """The append-only log in the folder `log/` of a run."""

    def __init__(self, store: Store, holder: str) -> None:
        self.store, self.holder = store, holder
        self._read: list[Entry] = []  # entries never change, so each is fetched once
        self._lock = threading.RLock()  # training, saving and heartbeat share this log
        self._next = len(self.entries())

    def entries(self) -> list[Entry]:
        """All entries in order."""
        with self._lock:
            keys = [key for key in self.store.list("log") if key.endswith(".json")]
            # A gap would let a fenced holder append there without a collision, as if it still held the run.
            for number, key in enumerate(keys):
                if key != _key(number):
                    where = self.store.name(_key(number))
                    fix = f"put it back, or remove {self.store.location} to start the run anew"
                    raise StoreError(f"{where} is missing, but later entries are there", fix)
            for key in keys[len(self._read) :]:
                entry = read_entry(self.store, key)
                # A torn entry must not end the run, nor may its number be used again: whoever wrote it
                # believes that it stands.
                if entry.kind == "damaged":
                    say(f"warning: {key} is damaged; it counts as an entry that says nothing")
                self._read.append(entry)
            return list(self._read)

    def commits(self) -> list[Entry]:
        """The commits in order, without those whose checkpoint was set aside since."""
        entries = self.entries()
        damaged = {entry.checkpoint for entry in entries if entry.kind == "set_aside"}
        return [entry for entry in entries if entry.kind == "commit" and entry.checkpoint not in damaged]

    def publication(self) -> Entry | None:
        """The entry that names what the run published, if it did."""
        return next((entry for entry in self.entries() if entry.kind == "publish"), None)

    def holding(self) -> tuple[Entry, str] | None:
        """The `acquire` of the process that holds the run, with its key; None if none does or it released."""
        entries = self.entries()
        for number in range(len(entries) - 1, -1, -1):
            entry = entries[number]
            # What cannot be read may be an acquire. To take it for nothing could put two holders to work, so
            # the last known writer gets the doubt, and has to fall silent first.
            if entry.kind == "damaged":
                known = [earlier.holder for earlier in entries[:number] if earlier.kind != "damaged"]
                entry = entry.model_copy(update={"holder": known[-1] if known else "?"})
            if entry.kind in ("acquire", "damaged"):
                return entry, _key(number)
            if entry.kind in ("release", "publish"):
                return None
        return None

    def acquire(self, **fields: Any) -> None:
        """Become the holder; every earlier one is fenced from here on.

        `Conflict` if somebody else added an entry since this log was last read: look again, then decide.
        """
        self._append("acquire", fields)

    def append(self, kind: EntryKind, **fields: Any) -> None:
        """Add an entry as the holder; `Fenced` if somebody else acquired the run since."""
        try:
            self._append(kind, fields)
        except Conflict:
            raise self._fenced() from None

    def check(self) -> None:
        """`Fenced` if somebody else acquired the run: to be asked before a file that all holders share."""
        # Appending fences by collision, but an overwrite (of a heartbeat, of metrics) collides with nothing.
        # This look leaves a window of one request; what must never be mixed lies under a holder's own prefix.
        with self._lock:
            while self.store.exists(_key(self._next)):
                if not self._passes_own():
                    raise self._fenced()

    def refresh(self) -> None:
        """Take notice of what others wrote, so that the next `acquire` is an answer to it."""
        with self._lock:
            self._next = len(self.entries())

    def _fenced(self) -> Fenced:
        takers = [entry.holder for entry in self.entries() if entry.kind in ("acquire", "damaged")]
        return Fenced(f"this run was taken over by {takers[-1]}", "let that one finish")

    def _append(self, kind: EntryKind, fields: dict[str, Any]) -> None:
        entry = Entry(kind=kind, holder=self.holder, time=round(time.time(), 3), **fields)
        content = {**entry.header(), **entry.model_dump(mode="json", exclude_unset=True)}
        # A store without atomic writes (NFS, a full disk) may keep a part that is still JSON.
        content["digest"] = digest(content)
        with self._lock:
            # Create-if-absent is the whole lock. `_next` moves on success only: never re-read it from the
            # listing here, or a holder that was fenced would simply write after its successor.
            while True:
                try:
                    self.store.create_json(_key(self._next), content)
                    break
                except Conflict:
                    if not self._passes_own():
                        raise
            self._next += 1

    def _passes_own(self) -> bool:
        # The store may have written our entry and lost its answer: the retry then collides with ourselves.
        if read_entry(self.store, _key(self._next)).holder != self.holder:
            return False
        self._next += 1
        return True


class History:
    """A run's log as somebody else reads it: few reads however long it is, and nothing written."""

    def __init__(self, store: Store, folder: str) -> None:
        self.store, self.folder = store, folder
        self._keys: list[str] = []
        self._states: dict[str, object] = {}
        self._read: dict[int, Entry] = {}  # entries never change, so each is fetched once

    def refresh(self) -> None:
        """Take notice of what was added, or of a run that was removed and begun anew."""
        before, there = self._states, self.store.states(f"{self.folder}/log")
        self._states = {key: state for key, state in there.items() if key.endswith(".json")}
        if not before.items() <= self._states.items():
            self._keys, self._read = [], {}
        seen, self._keys = max(0, len(self._keys) - 1), [*self._states]
        if self._keys:
            self._fill(seen, len(self._keys) - 1)

    def entries(self) -> list[Entry]:
        """The entries in order; commits between commits are left out."""
        return [self._read[number] for number in sorted(self._read)]

    def last(self, *kinds: EntryKind) -> tuple[Entry, str] | None:
        """The last entry of these kinds (not of commits) and its key."""
        for number in sorted(self._read, reverse=True):
            if self._read[number].kind in kinds:
                return self._read[number], self._keys[number]
        return None

    def last_commit(self) -> tuple[Entry, str] | None:
        """The newest commit that was not set aside, and its key; whether it is whole is not looked at."""
        aside = {entry.checkpoint for entry in self.entries() if entry.kind == "set_aside"}
        for number in range(len(self._keys) - 1, -1, -1):
            entry = self._entry(number)
            if entry.kind == "commit" and entry.checkpoint not in aside:
                return entry, self._keys[number]
        return None

    def _fill(self, low: int, high: int) -> None:
        # Entries of one holder lie side by side: an acquire, what it did before its first step, its commits,
        # and how it ended. So between two commits of one holder there are only commits, and a run of weeks
        # is looked at with some dozens of reads: halve a stretch until its ends say what is inside.
        first, last = self._entry(low), self._entry(high)
        if high - low < 2 or (first.kind == "commit" and first.holder == last.holder):
            return
        middle = (low + high) // 2
        self._fill(low, middle)
        self._fill(middle, high)

    def _entry(self, number: int) -> Entry:
        if number not in self._read:
            self._read[number] = read_entry(self.store, self._keys[number])
        return self._read[number]


def read_entry(store: Store, key: str) -> Entry:
    """One entry; if it is not what was written, one of the kind `damaged` that says nothing else."""
    try:
        content = read_json(store.get(key))
        if content.pop("digest") != digest(content):
            return Entry(kind="damaged")
    except (ValueError, AttributeError, KeyError, TypeError):
        return Entry(kind="damaged")
    return Entry.of_json(content, store.name(key))


def _key(number: int) -> str:
    return f"log/{number:06d}.json"
