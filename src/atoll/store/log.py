"""The log of one island: who holds it, what was committed, what was published.

Entries are `log/NNNNNN.json`, each created if-absent at the next number, so conditional create is all
that a store must offer. An `acquire` fences every earlier holder: its next append finds the number
taken, learns of the newer holder, and leaves.
"""

import time
from typing import Any

from atoll.base.errors import StoreError
from atoll.store.store import Conflict, Store

Entry = dict[str, Any]


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
        self._next = len(self.entries())

    def entries(self) -> list[Entry]:
        """All entries in order."""
        keys = [key for key in self.store.list("log") if key.endswith(".json")]
        return [self.store.get_json(key) for key in keys]

    def acquire(self, **fields: Any) -> None:
        """Become the holder. Every earlier holder is fenced from here on."""
        while True:
            try:
                self._append("acquire", fields)
                return
            except Conflict:
                self._next = len(self.entries())

    def append(self, kind: str, **fields: Any) -> None:
        """Add an entry as the holder; `Fenced` if somebody else acquired the island since."""
        try:
            self._append(kind, fields)
        except Conflict:
            raise self._fenced() from None

    def check(self) -> None:
        """`Fenced` if somebody else acquired the island: to be asked before a file that all holders share."""
        if self.store.exists(self._key()):
            raise self._fenced()

    def _fenced(self) -> Fenced:
        taker = [entry["holder"] for entry in self.entries() if entry["kind"] == "acquire"][-1]
        return Fenced(f"this run was taken over by {taker}", "let that one finish")

    def _key(self) -> str:
        return f"log/{self._next:06d}.json"

    def _append(self, kind: str, fields: dict[str, Any]) -> None:
        entry = {"kind": kind, "holder": self.holder, "time": round(time.time(), 3), **fields}
        self.store.create_json(self._key(), entry)
        self._next += 1
