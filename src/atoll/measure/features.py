"""Features of pictures: all of a set in memory (50,000 of Inception's take 0.4 GB), by number."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from atoll.base.console import Progress
from atoll.base.processes import ProcessGroup
from atoll.encoders.vision import VisionEncoder
from atoll.measure.pictures import Batch, Source

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
AT_ONCE = 64
"""Pictures that an extractor sees at once, however they are drawn: its rounding depends on their number."""

Number = TypeVar("Number", bound=np.generic)
Scorer = Callable[[VisionEncoder, F32, list[str]], F64]
"""Scores `(N,)` of pictures and their captions, from the pictures' features `(N, D)`."""


@dataclass(frozen=True, eq=False)
class Features:
    """Features `(N, D)` of pictures by number, and scores `(N,)` with captions by the metric that asked."""

    rows: F32
    scores: Mapping[str, F64] = field(default_factory=dict)


def extract(
    source: Source,
    encoder: VisionEncoder,
    what: str,
    batch: int,
    world: ProcessGroup | None = None,
    scorers: Mapping[str, Scorer] | None = None,
    watch: Callable[[Batch], None] | None = None,
) -> Features | None:
    """Features of all pictures of a source, on the first process; None on the others.

    Each process takes its share of them, `batch` at once, and shows every batch to `watch`.
    """
    world, scorers = world or ProcessGroup(), scorers or {}
    parts = [share(len(source), batch, rank, world.size) for rank in range(world.size)]
    part = parts[world.rank]
    rows = np.empty((len(part), encoder.width), dtype=np.float32)
    scores = {name: np.empty(len(part)) for name in scorers}
    progress, done = Progress(what, len(part), unit="pictures"), 0
    for numbers, pictures, captions in _chunks(source, part, batch, watch):
        index = np.array(numbers) - part.start
        rows[index] = encoder.encode(pictures).numpy()
        for name, scorer in scorers.items():
            scores[name][index] = scorer(encoder, rows[index], captions)
        done += len(numbers)
        if world.first:
            progress(done)
    whole = _gathered(world, rows, parts)
    marks = {name: _gathered(world, values, parts) for name, values in scores.items()}
    return Features(whole, marks) if world.first else None


def share(count: int, batch: int, rank: int, size: int) -> range:
    """The numbers of one process out of several: whole batches, so that each batch is that of one process."""
    batches = -(-count // batch)
    first, last = (min(count, batches * part // size * batch) for part in (rank, rank + 1))
    return range(first, last)


def _chunks(
    source: Source, part: range, batch: int, watch: Callable[[Batch], None] | None
) -> Iterator[tuple[list[int], list[Image.Image], list[str]]]:
    """Numbers, pictures and captions, as many as the extractor sees at once."""
    numbers, pictures, captions = list[int](), list[Image.Image](), list[str]()
    for drawn in source.batches(part, batch):
        if watch is not None:
            watch(drawn)
        numbers += drawn.numbers
        pictures += drawn.pictures
        captions += drawn.captions or []
        while len(numbers) >= AT_ONCE:
            yield numbers[:AT_ONCE], pictures[:AT_ONCE], captions[:AT_ONCE]
            del numbers[:AT_ONCE], pictures[:AT_ONCE], captions[:AT_ONCE]
    if numbers:
        yield numbers, pictures, captions


def _gathered(world: ProcessGroup, values: NDArray[Number], parts: list[range]) -> NDArray[Number]:
    """What all processes have, in the order of their shares, on the first one."""
    whole = [values]
    for rank in range(1, world.size):
        if world.rank == rank:
            world.send_to_first([torch.from_numpy(values)], rank)
        elif world.first:
            theirs = np.empty((len(parts[rank]), *values.shape[1:]), dtype=values.dtype)
            world.send_to_first([torch.from_numpy(theirs)], rank)
            whole.append(theirs)
    return np.concatenate(whole)
