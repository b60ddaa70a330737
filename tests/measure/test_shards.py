"""Rows that are made in shards: by whom does not count, and what is there is not made again."""

from typing import Any

import pytest
import torch
from torch import Tensor

from atoll.base.part import Part
from atoll.measure.shards import FEW, MOST, ShardedRows
from atoll.store.store import Store
from helpers import flip

Made = list[range]


def squares(
    store: Store, made: Made, about: Any = "squares", count: int = 100, batch: int = 8
) -> ShardedRows:
    """Squares of numbers; of the first ten also a letter, and of each shard its first number."""

    def make(part: range) -> dict[str, Tensor]:
        made.append(part)
        rows = {"square": torch.tensor([n * n for n in part]), "first": torch.tensor([part.start])}
        few = [n + 65 for n in part if n < 10]
        return rows | ({"letter": torch.tensor(few, dtype=torch.uint8)} if few else {})

    return ShardedRows(store, about, "squares", count, batch, make)


@pytest.mark.parametrize("count", [1, 15, 16, 17, 100, 1000, 50_000])
@pytest.mark.parametrize("batch", [1, 7, 16, 250])
def test_shards_are_whole_batches_of_all_rows(store: Store, count: int, batch: int) -> None:
    shards = squares(store, [], count=count, batch=batch).shards
    assert [number for shard in shards for number in shard] == list(range(count))
    assert len(shards) <= MOST and all(shard.start % batch == 0 for shard in shards)
    assert all(len(shard) >= FEW for shard in shards[:-1]) and len({*map(len, shards[:-1])}) <= 1


def test_parts_make_every_shard_once_and_the_whole_makes_none_again(store: Store) -> None:
    alone, parts, made = Made(), list[Made](), Made()
    whole = squares(Store.open("memory://alone", create=True), alone).whole()
    for number in range(3):
        parts.append([])
        squares(store, parts[-1]).write_part(Part(number, 3))
    assert sorted(part.start for own in parts for part in own) == [part.start for part in alone]
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    rows = squares(store, made)
    again = rows.whole()
    assert made == [] and all(torch.equal(again[name], whole[name]) for name in whole)
    assert whole["square"].tolist() == [n * n for n in range(100)]
    assert bytes(whole["letter"].tolist()) == b"ABCDEFGHIJ"
    assert whole["first"].tolist() == [*range(0, 100, 16)]
    rows.tidy()
    assert store.list("reports/work") == []


def test_works_of_one_shard_are_not_all_the_first_ones(store: Store) -> None:
    made = [Made() for _ in range(2)]
    for about in range(40):
        for number in range(2):
            squares(store, made[number], about, count=10).write_part(Part(number, 2))
    assert sum(map(len, made)) == 40 and min(map(len, made)) > 5


def test_what_is_damaged_or_of_something_else_is_made_again(store: Store) -> None:
    made = Made()
    squares(store, made).write_part(Part(0, 1))
    folder = store.path(squares(store, made).folder)
    first, second, third, *_ = sorted(folder.iterdir())
    flip(first)
    second.write_bytes(second.read_bytes()[:20])
    third.unlink()
    before = len(list(folder.iterdir()))
    made.clear()
    whole = squares(store, made).whole()
    assert [part.start for part in made] == [0, 16, 32]
    assert whole["square"].tolist() == [n * n for n in range(100)]
    assert len(list(folder.iterdir())) == before + 1
    others: list[dict[str, Any]] = [{"about": "cubes"}, {"batch": 9}, {"count": 99}]
    for other in (squares(store, made, **how) for how in others):
        made.clear()
        other.whole()
        assert len(made) == len(other.shards)


def test_what_nothing_decides_is_kept_nowhere(store: Store) -> None:
    made = Made()
    for _ in range(2):
        squares(store, made, None).whole()
    assert len(made) == 14 and store.list() == []
