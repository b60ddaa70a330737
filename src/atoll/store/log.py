"""The log of one island: who holds it, what was committed, what was published.

Entries are `log/NNNNNN.json`, each created if-absent at the next number, so conditional create is all
that a store must offer. An `acquire` fences every earlier holder: its next append finds the number
taken, learns of the newer holder, and leaves. A `publish` ends the log: nobody acquires after it.
Whether a holder still lives is a question of patience only (`lease.py`); nothing here reads a clock.
"""

import json
import threading
import time
from typing import Any

from atoll.base.console import say
from atoll.base.errors import StoreError
from atoll.base.hashing import digest
from atoll.store.store import Conflict, Store

Entry = dict[str, Any]


COMMIT = "COMMIT.json"
"""File of a checkpoint that is written last and makes it real."""


class Fenced(StoreError):
    """Another process took this island over; what this one does no longer counts."""


class Log:
    """The append-only log in the folder `log/` of a run.

    Args:
        store: the store, narrowed to the run's folder.
        holder: name of this process, unique among all that ever run the island.
    """

    def __init__(self, store: Store, holder: str) -> None:
        self.store, self.holder = store, holder
        self._read: list[Entry] = []  # entries never change, so each is fetched once
        self._lock = threading.RLock()  # training, saving and heartbeat share this log
        self._next = len(self.entries())

    def entries(self) -> list[Entry]:
        """All entries in order; one that is not what was written has the kind `damaged`."""
        with self._lock:
            keys = [key for key in self.store.list("log") if key.endswith(".json")]
            for number, key in enumerate(keys):
                if key != _key(number):
                    where = self.store.name(_key(number))
                    raise StoreError(f"{where} is missing, but later entries are there", "put it back")
            for key in keys[len(self._read) :]:
                self._read.append(self._entry(key))
            return list(self._read)

    def commits(self) -> list[Entry]:
        """The commits in order, without those whose checkpoint was set aside since."""
        entries = self.entries()
        damaged = {entry["checkpoint"] for entry in entries if entry["kind"] == "set_aside"}
        return [e for e in entries if e["kind"] == "commit" and e["checkpoint"] not in damaged]

    def publication(self) -> Entry | None:
        """The entry that names what the run published, if it did."""
        return next((entry for entry in self.entries() if entry["kind"] == "publish"), None)

    def holding(self) -> tuple[Entry, str] | None:
        """The `acquire` of the process that holds the run, with its key; None if none does or it released."""
        entries = self.entries()
        for number in range(len(entries) - 1, -1, -1):
            kind = entries[number]["kind"]
            if kind in ("acquire", "damaged"):  # an unreadable entry may be one: its writer gets the doubt
                known = [e["holder"] for e in entries[:number] if "holder" in e]
                return {"holder": known[-1] if known else "?", **entries[number]}, _key(number)
            if kind in ("release", "publish"):
                return None
        return None

    def acquire(self, **fields: Any) -> None:
        """Become the holder. Every earlier holder is fenced from here on.

        Raises:
            Conflict: somebody else added an entry since this log was last read: look again, then decide.
        """
        self._append("acquire", fields)

    def append(self, kind: str, **fields: Any) -> None:
        """Add an entry as the holder; `Fenced` if somebody else acquired the island since."""
        try:
            self._append(kind, fields)
        except Conflict:
            raise self._fenced() from None

    def check(self) -> None:
        """`Fenced` if somebody else acquired the island: to be asked before a file that all holders share."""
        with self._lock:
            while self.store.exists(_key(self._next)):
                if not self._is_own():
                    raise self._fenced()

    def refresh(self) -> None:
        """Take notice of what others wrote, so that the next `acquire` is an answer to it."""
        with self._lock:
            self._next = len(self.entries())

    def _fenced(self) -> Fenced:
        taker = [e.get("holder", "?") for e in self.entries() if e["kind"] in ("acquire", "damaged")][-1]
        return Fenced(f"this run was taken over by {taker}", "let that one finish")

    def _append(self, kind: str, fields: dict[str, Any]) -> None:
        entry = {"kind": kind, "holder": self.holder, "time": round(time.time(), 3), **fields}
        written = {**entry, "digest": digest(entry)}
        with self._lock:
            while True:
                try:
                    self.store.create_json(_key(self._next), written)
                    break
                except Conflict:
                    if not self._is_own():
                        raise
            self._next += 1

    def _is_own(self) -> bool:
        """Whether the next number holds an entry of ours whose answer was lost; it is passed over then."""
        if self._entry(_key(self._next)).get("holder") != self.holder:
            return False
        self._next += 1
        return True

    def _entry(self, key: str) -> Entry:
        entry = read_entry(self.store, key)
        if entry["kind"] == "damaged":
            say(f"warning: {key} is damaged; it counts as an entry that says nothing")
        return entry


def read_entry(store: Store, key: str) -> Entry:
    """One entry; if it is not what was written, one of the kind `damaged` that holds nothing else."""
    try:
        content = json.loads(store.get(key))
        claimed = content.pop("digest")
        if digest(content) == claimed:
            return dict(content)
    except (ValueError, AttributeError, KeyError, UnicodeDecodeError):
        pass
    return {"kind": "damaged"}


def _key(number: int) -> str:
    return f"log/{number:06d}.json"
