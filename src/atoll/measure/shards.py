"""Rows by number that take long to make, such as features of drawn pictures: in shards, that several share.

A shard is some whole batches, whoever makes it and beside how many others, so its bytes are always the same.
Its file lies in the store until what it was made for is written: a process that is killed loses one shard.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from safetensors.torch import save as save_tensors
from torch import Tensor

from atoll.base.console import Progress
from atoll.base.format import code_version
from atoll.base.hashing import digest, sha256
from atoll.base.part import Part
from atoll.store.store import Absent, Store
from atoll.store.tensors import read_tensors

FOLDER = "reports/work"
MOST = 64
"""Shards of a piece of work, so that 50,000 pictures are some files and 1,000 can still be shared."""
FEW = 16
"""Pictures below which an extractor's rounding depends on how many it sees."""
Tensors = dict[str, Tensor]


@dataclass(frozen=True, eq=False)
class ShardedRows:
    """So many rows, `batch` of which are made at once: `make` gives their tensors for a range of numbers.

    `about` is plain data that decides them beside `count` and `batch`; None if nothing does, and they are
    made anew each time. Tensors of one name are joined along their first axis, and a shard may lack one.
    """

    store: Store
    about: Any
    name: str
    count: int
    batch: int
    make: Callable[[range], Tensors]

    @cached_property
    def shards(self) -> list[range]:
        """The numbers of each shard."""
        batch = self.batch * -(-FEW // self.batch)  # no shard ends in fewer than a whole run would
        return [*cut(range(self.count), batch * max(1, -(-self.count // (batch * MOST))))]

    @cached_property
    def folder(self) -> str:
        """Where the shards lie: named by all that decides them, so that others are not taken for them."""
        about = {"code": code_version(), "about": self.about, "count": self.count, "batch": self.batch}
        return f"{FOLDER}/{digest(about)[:16]}"

    def __iter__(self) -> Iterator[tuple[range, Tensors]]:
        """Every shard in order, with its numbers; what is not there is made."""
        return self._shards(range(len(self.shards)))

    def whole(self) -> Tensors:
        """All shards as one."""
        parts = [tensors for _, tensors in self]
        names = dict.fromkeys(name for tensors in parts for name in tensors)
        return {name: torch.cat([part[name] for part in parts if name in part]) for name in names}

    def write_part(self, part: Part) -> None:
        """Make one part of the shards, and leave the rest to others; none where nothing could be kept."""
        if self.about is None:
            return
        # Shifted by a number that all know: else one process would get every work of a single shard.
        first = int(self.folder[-8:], 16) + part.number
        for _ in self._shards(n for n in range(len(self.shards)) if (first + n) % part.total == 0):
            pass

    def tidy(self) -> None:
        """Remove the shards: what they were made for is written."""
        self.store.delete(*self.store.list(self.folder))
        self.store.sweep(self.folder)  # a process that was killed leaves its passing file
        if self.store.local is not None:
            with suppress(OSError):  # a second process has not finished
                self.store.path(self.folder).rmdir()

    def _shards(self, numbers: Iterable[int]) -> Iterator[tuple[range, Tensors]]:
        numbers, done = [*numbers], 0
        progress = Progress(self.name, sum(len(self.shards[number]) for number in numbers), unit="pictures")
        for number in numbers:
            tensors = None if self.about is None else self._saved(number)
            progress.first += len(self.shards[number]) * (tensors is not None)  # else the rest seems as quick
            if tensors is None:
                tensors = self.make(self.shards[number])
                if self.about is not None:
                    data = save_tensors({name: rows.contiguous() for name, rows in tensors.items()})
                    # The name says what the file holds, so a damaged one is known without a second file.
                    key = f"{self.folder}/{number:05d}-{sha256(data)[:16]}.safetensors"
                    self.store.put(key, data)
            done += len(self.shards[number])
            progress(done)
            yield self.shards[number], tensors

    def _saved(self, number: int) -> Tensors | None:
        for key in self.store.list(self.folder):  # anew for each shard: others write meanwhile
            name = re.fullmatch(rf".*/{number:05d}-([0-9a-f]{{16}})\.safetensors", key)
            if name is None:
                continue
            try:
                data = self.store.get(key)
            except Absent:  # another process has finished, and tidied up
                continue
            if sha256(data).startswith(name[1]):
                return read_tensors(data, self.store.name(key))
            self.store.delete(key)
        return None


def cut(part: range, batch: int) -> Iterator[range]:
    """A range in batches."""
    return (part[first : first + batch] for first in range(0, len(part), batch))
