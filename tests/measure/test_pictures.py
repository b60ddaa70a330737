"""Features of pictures that come in any order and on several processes, and what is seen beside them."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import pytest
import torch
from PIL import Image

from atoll.base.processes import ProcessGroup
from atoll.encoders.vision import VisionEncoder
from atoll.measure import pictures
from atoll.measure.pictures import Batch, extract, share


@dataclass
class Shuffled:
    """Pictures of one grey each, in batches whose numbers jump."""

    count: int
    size: tuple[int, int] = (4, 4)
    subject: dict[str, Any] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return self.count

    def batches(self, part: range, batch: int) -> Iterator[Batch]:
        order = np.random.default_rng(0).permutation(part)
        for numbers in np.array_split(order, max(1, len(part) // batch)):
            pictures = [Image.new("L", self.size, int(n)) for n in numbers]
            yield Batch(numbers.tolist(), pictures, [str(n) for n in numbers])


class Grey:
    """An extractor that also says how many pictures it saw at once."""

    width, device = 2, "cpu"

    def __init__(self) -> None:
        self.seen: list[int] = []

    def encode(self, pictures: list[Image.Image]) -> torch.Tensor:
        self.seen.append(len(pictures))
        return torch.tensor([[float(np.asarray(p)[0, 0]), 1.0] for p in pictures])


def test_rows_are_by_number_and_the_extractor_sees_as_many_however_they_are_drawn() -> None:
    seen = []
    for batch in (7, 30, 200):
        encoder = Grey()
        made = extract(Shuffled(150), cast(VisionEncoder, encoder), "greys", batch)
        assert made is not None and made.rows[:, 0].tolist() == list(range(150))
        seen.append(encoder.seen)
    assert seen == [[64, 64, 22]] * 3


def test_captions_are_scored_with_their_pictures() -> None:
    def scorer(encoder: Any, rows: np.ndarray, captions: list[str]) -> np.ndarray:
        assert [str(int(row)) for row in rows[:, 0]] == captions
        return rows[:, 0] * 2.0

    made = extract(Shuffled(90), cast(VisionEncoder, Grey()), "greys", 9, scorers={"twice": scorer})
    assert made is not None and made.scores["twice"].tolist() == [2.0 * n for n in range(90)]


def test_processes_bring_their_shares_to_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes one after the other, with a letter box between them."""
    box: list[torch.Tensor] = []

    def send_to_first(self: ProcessGroup, tensors: list[torch.Tensor], rank: int) -> None:
        for tensor in tensors:
            if self.rank == rank:
                box.append(tensor.clone())
            else:
                tensor.copy_(box.pop(0))

    monkeypatch.setattr(pictures.ProcessGroup, "send_to_first", send_to_first)
    source, encoder = Shuffled(45), cast(VisionEncoder, Grey())
    assert extract(source, encoder, "greys", 8, ProcessGroup(1, 2)) is None
    whole = extract(source, encoder, "greys", 8, ProcessGroup(0, 2))
    assert whole is not None and whole.rows[:, 0].tolist() == list(range(45))


@pytest.mark.parametrize(
    ("count", "batch", "size"), [(45, 8, 2), (45, 8, 7), (3, 8, 2), (16, 8, 3), (8, 1, 8)]
)
def test_shares_are_whole_batches_of_all_pictures(count: int, batch: int, size: int) -> None:
    parts = [share(count, batch, rank, size) for rank in range(size)]
    assert [number for part in parts for number in part] == list(range(count))
    assert all(part.start % batch == 0 for part in parts if part)
