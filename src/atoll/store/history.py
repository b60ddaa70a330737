"""The log of a run as somebody else reads it: few reads however long it is, and nothing written."""

from atoll.store.log import Entry, EntryKind, read_entry
from atoll.store.store import Store


class History:
    """What happened to a run, by its log.

    Entries of one holder lie side by side: an `acquire`, what it did before its first step, its commits, and
    how it ended. So between two commits of one holder there are only commits, which need not be read.
    """

    def __init__(self, store: Store, folder: str) -> None:
        self.store, self.folder = store, folder
        self._keys: list[str] = []
        self._read: dict[int, Entry] = {}  # entries never change, so each is fetched once

    def refresh(self) -> None:
        """Take notice of what was added."""
        seen = max(0, len(self._keys) - 1)
        self._keys = [key for key in self.store.list(f"{self.folder}/log") if key.endswith(".json")]
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
        """Read the ends of a stretch, and what lies between unless it can only be commits."""
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
