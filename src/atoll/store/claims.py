"""Who works at which part of a stage: claims that expire, so that any number of processes share the parts.

A claim is an object that is created only if its name is free. It says who holds it and is written again every
`heartbeat_seconds`; one that has not been for `expiry_seconds` by the store's own clock, or whose process is
known to have ended, is taken over by creating the next number. Claims decide who works, never what is right:
two processes that believe to hold one part write the same bytes.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from posixpath import join

from atoll.base.errors import AtollError
from atoll.base.format import File
from atoll.store.lease import LeaseConfig, has_ended, new_holder, process, store_time
from atoll.store.log import Process
from atoll.store.store import Conflict, Store, check_conditional_create


class Claim(File):
    """Who works at a part of a data stage; gone when the part is done."""

    FORMAT, PLACE = "atoll/claim", "DATASET/claims/PART.N.json, DATASET/columns/NAME/claims/PART.N.json"

    holder: str
    """Host, process and six random letters."""
    process: Process
    """Which process."""


class Claims:
    """Claims of one process on the parts of a stage.

    Args:
        store: where the stage writes.
        folder: the claims' own folder there.
        lease: when a claim counts as left behind.

    Raises:
        StoreError: the store has no conditional create.
    """

    def __init__(self, store: Store, folder: str, lease: LeaseConfig | None = None) -> None:
        self.store, self.folder, self.lease = store, folder, lease or LeaseConfig()
        self.claim = Claim(holder=new_holder(), process=process())
        check_conditional_create(store, folder)

    @contextmanager
    def claimed(self, part: str) -> Iterator[bool]:
        """Hold a part meanwhile; False if somebody alive holds it."""
        key = self._take(part)
        if key is None:
            yield False
            return
        stop = threading.Event()
        beat = threading.Thread(target=self._beat, args=(key, stop), daemon=True, name="claim")
        beat.start()
        try:
            yield True
        finally:
            stop.set()
            beat.join(timeout=30)
            self.store.delete(key)

    def others(self) -> bool:
        """Whether anybody holds a part."""
        return bool(self.store.list(self.folder))

    def _take(self, part: str) -> str | None:
        """Key of the claim that now is ours, if it could be had."""
        start = join(self.folder, part)
        keys = sorted((k for k in self.store.list(self.folder) if k.startswith(f"{start}.")), key=_number)
        if keys and not self._is_left(keys[-1]):
            return None
        mine = f"{start}.{_number(keys[-1]) + 1 if keys else 0}.json"
        try:
            self.store.create_json(mine, self.claim.to_json())
        except Conflict:
            return None
        self.store.delete(*keys)
        return mine

    def _is_left(self, key: str) -> bool:
        """Whether the holder of a claim has ended, or is silent for too long."""
        try:
            written = self.store.modified(key)
            with suppress(AtollError):  # what cannot be read says nothing, and expires
                if has_ended(Claim.read(self.store, key).process):
                    return True
            return store_time(self.store.sub(self.folder)) - written > self.lease.expiry_seconds
        except AtollError:
            return False  # just now given back, or the store is out of reach: look again later

    def _beat(self, key: str, stop: threading.Event) -> None:
        while not stop.wait(self.lease.heartbeat_seconds):
            with suppress(AtollError):  # the next beat may come through
                if not self.store.exists(key):
                    return  # somebody took over
                self.store.put_json(key, self.claim.to_json())


def _number(key: str) -> int:
    """Number of a claim among those of its part."""
    number = key.removesuffix(".json").rpartition(".")[2]
    return int(number) if number.isdecimal() else 0
