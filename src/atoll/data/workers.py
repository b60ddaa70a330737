"""A data stage that any number of processes, on one machine or many, work at together, shard by shard.

There is no coordinator: every process lists what is missing, claims a shard, writes it, and looks again. When
nothing is missing one of them finishes, and all have the result.
"""

import time
from contextlib import AbstractContextManager, nullcontext
from posixpath import join
from typing import Protocol, TypeVar

from atoll.base.rng import seed_of
from atoll.store.claims import Claims
from atoll.store.lease import LeaseConfig
from atoll.store.store import Store

Result = TypeVar("Result", covariant=True)
SOONEST, LATEST = 0.05, 2.0
"""Seconds between two looks while others work."""


class Stage(Protocol[Result]):
    """What is to be written, shard by shard. Whatever it writes twice it writes alike."""

    store: Store
    folder: str
    """Where it writes."""

    def done(self) -> Result | None:
        """The result, if somebody finished."""

    def missing(self) -> list[int]:
        """Numbers of the shards that are not there, ascending."""

    def is_missing(self, number: int) -> bool:
        """Whether one is not there."""

    def write(self, number: int) -> None:
        """Write a shard."""

    def finish(self) -> Result | None:
        """Put the whole together; None if a shard turns out to be missing after all."""

    def report(self, left: int) -> None:
        """Tell how many shards are left."""


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
        with _claimed(claims, f"{number:05d}") as mine:
            if mine and (claims is None or stage.is_missing(number)):
                stage.write(number)
                wrote = True
        if mine:
            left -= 1
            stage.report(left)
    return wrote


def _claimed(claims: Claims | None, part: str) -> AbstractContextManager[bool]:
    return nullcontext(True) if claims is None else claims.claimed(part)
