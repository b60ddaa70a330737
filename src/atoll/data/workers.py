"""A data stage that any number of processes, on one machine or many, work at together, shard by shard.

There is no coordinator: every process lists what is missing, claims a shard, writes it, and looks again. When
nothing is missing one of them finishes, and all have the result.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from posixpath import join
from typing import Generic, TypeVar

from atoll.base.rng import seed_of
from atoll.data.formats import ShardNote
from atoll.store.claims import Claims
from atoll.store.lease import LeaseConfig
from atoll.store.store import Absent, Conflict, Store

Result = TypeVar("Result")
SOONEST, LATEST = 0.05, 2.0
"""Seconds between two looks while others work."""


class Stage(Generic[Result]):
    """What is to be written, shard by shard. A note follows the files of a shard and makes it count.

    Args:
        store: where.
        folder: of the data set or column.
        notes: folder of the notes.
        identities: digest of what each shard is made from.
    """

    def __init__(self, store: Store, folder: str, notes: str, identities: Sequence[str]) -> None:
        self.store, self.folder, self.notes, self.identities = store, folder, notes, identities
        self.written: dict[int, ShardNote] = {}
        self.broken: set[int] = set()

    def done(self) -> Result | None:
        """The result, if somebody finished."""
        raise NotImplementedError

    def make(self, number: int, seen: ShardNote | None, untouched: Callable[[], bool]) -> ShardNote | None:
        """Write the files of a shard, over others only if it is `untouched`; None if it is not."""
        raise NotImplementedError

    def put_together(self, notes: list[ShardNote]) -> Result | None:
        """Finish, now that all shards are there."""
        raise NotImplementedError

    def report(self, left: int) -> None:
        """Tell how many shards are left."""
        raise NotImplementedError

    def owns(self) -> bool:
        """Whether the folder is still this stage's."""
        return True

    def missing(self) -> list[int]:
        """Numbers of the shards that have no note, or whose files are not what it says."""
        keys = set(self.store.list(self.notes))
        return [n for n in range(len(self.identities)) if n in self.broken or self.key(n) not in keys]

    def is_missing(self, number: int) -> bool:
        """Whether a shard is still one of those."""
        return number in self.broken or not self.store.exists(self.key(number))

    def key(self, number: int) -> str:
        """Key of a shard's note."""
        return join(self.notes, f"{number:05d}.json")

    def note(self, number: int) -> ShardNote | None:
        """A shard's note, if there is one of this stage."""
        return ShardNote.find(self.store, self.key(number), self.identities[number])

    def write(self, number: int) -> None:
        """Write a shard and its note, unless somebody has done so meanwhile."""
        seen = self.note(number)
        try:
            note = self.make(number, seen, lambda: self.owns() and self.note(number) == seen)
        except Absent:
            if self.done() is None:
                raise
            return
        self.broken.discard(number)
        if note is None:
            return
        try:
            if seen is not None:
                raise Conflict(self.key(number))
            self.store.create_json(self.key(number), note.to_json())
        except Conflict:
            if self.note(number) != seen:
                return
            self.store.put_json(self.key(number), note.to_json())
        self.written[number] = note

    def finish(self) -> Result | None:
        """Put the whole together; None if a shard turns out to be missing after all."""
        notes = []
        for number in range(len(self.identities)):
            note = self.note(number)
            if note is None or not (
                note == self.written.get(number) or note.is_there(self.store, self.folder)
            ):
                self.broken.add(number)
            else:
                notes.append(note)
        return None if self.broken else self.put_together(notes)


def work_together(stage: Stage[Result], lease: LeaseConfig | None) -> Result:
    """Bring a stage to its end, together with whoever else works at it; without a lease, as if alone."""
    claims: Claims | None = None
    pause = SOONEST
    while (result := stage.done()) is None:
        if lease is not None and claims is None:
            claims = Claims(stage.store, join(stage.folder, "claims"), lease)
        if missing := stage.missing():
            worked = _write_some(stage, claims, missing)
        else:
            with _claimed(claims, "finish") as worked:
                if worked and stage.done() is None and (result := stage.finish()) is not None:
                    return result
        if not worked:
            time.sleep(pause)
        pause = SOONEST if worked else min(2 * pause, LATEST)
    return result


def _write_some(stage: Stage[Result], claims: Claims | None, missing: list[int]) -> bool:
    """Write those of the missing shards that nobody holds; whether there was one."""
    left, wrote = len(missing), False
    if claims is not None and claims.others():  # begin elsewhere: every claim that is refused costs requests
        start = seed_of(0, claims.claim.holder) % left
        missing = missing[start:] + missing[:start]
    for number in missing:
        if claims is None or stage.is_missing(number):
            with _claimed(claims, f"{number:05d}") as mine:
                if not mine:
                    continue
                if claims is not None and stage.done() is not None:
                    return True  # finished elsewhere: its notes are gone, and nothing is missing
                if claims is None or stage.is_missing(number):
                    stage.write(number)
                    wrote = True
        left -= 1
        stage.report(left)
    return wrote


def _claimed(claims: Claims | None, part: str) -> AbstractContextManager[bool]:
    return nullcontext(True) if claims is None else claims.claimed(part)
