"""The order of samples: a permutation of every epoch, known at any position."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.base.processes import ProcessGroup
from atoll.campaign.settings.train import ParallelConfig
from atoll.data.order import BucketOrder, Order
from atoll.train.parallel import StepSharding

SIZES = [1, 2, 3, 4, 5, 16, 17, 255, 257, 4096, 4097, 9000, 65_537]


@pytest.mark.parametrize("rows", SIZES)
def test_an_epoch_is_a_permutation(rows: int) -> None:
    order = Order(rows, 0, "ids")
    for epoch in range(3):
        seen = order.at(range(epoch * rows, (epoch + 1) * rows))
        assert seen.dtype == np.int64
        assert np.array_equal(np.sort(seen), np.arange(rows))


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(
    rows=st.integers(1, 500),
    start=st.integers(0, 5000),
    count=st.integers(1, 700),
    cuts=st.lists(st.integers(1, 700), max_size=6),
)
def test_it_knows_nothing_of_batches(rows: int, start: int, count: int, cuts: list[int]) -> None:
    order = Order(rows, 7, "ids")
    whole = order.at(range(start, start + count))
    bounds = sorted({0, count, *(c for c in cuts if c < count)})
    parts = [order.at(range(start + a, start + b)) for a, b in itertools.pairwise(bounds)]
    assert np.array_equal(np.concatenate(parts), whole)
    assert np.array_equal(order.at([start + i for i in reversed(range(count))])[::-1], whole)


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(rows=st.integers(1, 9000), start=st.integers(0, 20_000), step=st.integers(1, 5))
def test_windows_hold_what_each_position_gives_alone(rows: int, start: int, step: int) -> None:
    """Window by window is position by position, also over the ends of windows and epochs."""
    order, positions = Order(rows, 5, "ids"), range(start, start + 120 * step, step)
    alone = [int(order.permute(np.array([p % rows], dtype=np.uint64), p // rows)[0]) for p in positions]
    assert order.at(positions).tolist() == alone


def test_epochs_seeds_and_ids_give_other_orders() -> None:
    n = 500
    first = Order(n, 0, "ids").at(range(n))
    others = [
        Order(n, 0, "ids").at(range(n, 2 * n)),
        Order(n, 1, "ids").at(range(n)),
        Order(n, 0, "ids of other rows").at(range(n)),
        np.arange(n),
    ]
    for other in others:
        assert np.mean(first == other) < 0.02  # 1 / n of two random permutations agree
    assert np.array_equal(first, Order(n, 0, "ids").at(range(n)))


def test_it_does_not_change_between_versions() -> None:
    """A run that is resumed by another version of Atoll or numpy must see the same rows."""
    expected = [6, 5, 8, 7, 1, 2, 4, 9, 0, 3, 9, 0, 3, 8, 4, 1, 2, 7, 6, 5]
    assert Order(10, 0, "ids").at(range(20)).tolist() == expected


def test_shuffles_are_even() -> None:
    """Each row comes first, and any two rows stand in either order, about equally often."""
    rows, epochs = 8, 4000
    table = Order(rows, 1, "ids").at(range(rows * epochs)).reshape(epochs, rows)
    counts = np.stack([np.bincount(table[:, place], minlength=rows) for place in range(rows)])
    chi = ((counts - epochs / rows) ** 2 / (epochs / rows)).sum(1)
    assert chi.max() < 30  # 7 degrees of freedom: 1e-4 is at 29.9
    place = np.argsort(table, 1)
    ahead = (place[:, :, None] < place[:, None, :]).mean(0)
    assert np.abs(ahead - 0.5)[~np.eye(rows, dtype=bool)].max() < 0.04


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(
    weights=st.just([1.0] * 300)
    | st.lists(st.sampled_from([0.0, 0.01, 0.3, 0.5, 1.0, 1.7, 3.0]), min_size=1, max_size=80).filter(any),
    seed=st.integers(0, 99),
)
def test_rows_are_seen_in_proportion_to_their_weights(weights: list[float], seed: int) -> None:
    """In every epoch a row is seen as often as its weight says, rounded down or up."""
    order = Order.weighted(np.array(weights), seed, "ids")
    assert order.rows == max(1, round(sum(weights)))
    share = np.array(weights) * order.rows / sum(weights)
    total = np.zeros(len(weights))
    for epoch in range(40):
        seen = order.at(range(epoch * order.rows, (epoch + 1) * order.rows))
        counts = np.bincount(seen, minlength=len(weights))
        assert (counts >= np.floor(share - 1e-9)).all() and (counts <= np.ceil(share + 1e-9)).all()
        total += counts
    assert np.abs(total / 40 - share).max() < 0.35  # the offset of 40 epochs is uniform, of sd 0.5 / sqrt(40)


def test_other_weights_are_another_order_in_the_same_process() -> None:
    """Windows are kept by the order they are of, which must know its weights."""
    first, second = (Order.weighted(np.array(w), 0, "ids") for w in ([1.0, 3.0], [3.0, 1.0]))
    assert np.bincount(first.at(range(400))).tolist() == [100, 300]
    assert np.bincount(second.at(range(400))).tolist() == [300, 100]


# Rows of several shapes.

BUCKETS = st.lists(st.integers(0, 3), min_size=1, max_size=120).map(lambda one: np.array(one, dtype=np.int64))


def each_step(order: BucketOrder, steps: int) -> np.ndarray:
    return order.at(range(steps * order.batch)).reshape(steps, order.batch)


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(buckets=BUCKETS, batch=st.integers(1, 40), epochs=st.integers(1, 6), seed=st.integers(0, 9))
def test_every_row_once_an_epoch_in_steps_of_one_shape(
    buckets: np.ndarray, batch: int, epochs: int, seed: int
) -> None:
    """After E epochs each row was seen E or E - 1 times; of a bucket smaller than a step, as it fills one."""
    order = BucketOrder(buckets, batch, seed, "ids")
    seen = each_step(order, int(order.steps_before(epochs).sum()))
    assert all(len(set(buckets[rows].tolist())) == 1 for rows in seen)
    counts = np.bincount(seen.ravel(), minlength=len(buckets))
    for bucket in np.unique(buckets):
        rows = buckets == bucket
        size = int(rows.sum())
        left_over = epochs * size - counts[rows].sum()
        assert 0 <= left_over < batch and left_over == epochs * size % batch
        assert counts[rows].max() - counts[rows].min() <= 1
        if size >= batch:
            assert set(counts[rows].tolist()) <= {epochs - 1, epochs}


@settings(max_examples=25, deadline=None, derandomize=True, database=None)
@given(
    buckets=BUCKETS,
    batch=st.integers(1, 24),
    begin=st.integers(0, 300),
    ranks=st.integers(1, 5),
    micro=st.integers(1, 9),
)
def test_any_number_of_processes_resumed_anywhere_sees_the_same(
    buckets: np.ndarray, batch: int, begin: int, ranks: int, micro: int
) -> None:
    order = BucketOrder(buckets, batch, 3, "ids")
    wanted = order.at(range(begin * batch, (begin + 4) * batch)).reshape(4, batch)
    again = BucketOrder(buckets, batch, 3, "ids")  # another process, which has seen nothing
    config, network = ParallelConfig(micro_batch=micro), torch.nn.Linear(1, 1)
    for step, rows in enumerate(wanted):
        seen = [
            again.at(part)
            for rank in range(min(ranks, batch))
            for part in StepSharding(network, config, ProcessGroup(rank, min(ranks, batch)), batch).parts(
                (begin + step) * batch
            )
        ]
        assert len({shape for part in seen for shape in buckets[part].tolist()}) == 1
        assert np.array_equal(np.concatenate(seen), rows)


def test_steps_of_all_buckets_are_mixed() -> None:
    buckets = np.repeat([0, 1, 2], 4000)
    shapes = buckets[each_step(BucketOrder(buckets, 10, 0, "ids"), 1200)[:, 0]]
    assert abs((shapes[1:] != shapes[:-1]).mean() - 2 / 3) < 0.05
    assert (shapes == buckets[each_step(BucketOrder(buckets, 10, 1, "ids"), 1200)[:, 0]]).mean() < 0.5


def test_other_buckets_ids_and_batches_are_another_order() -> None:
    buckets = np.arange(400) % 3
    orders = [
        BucketOrder(buckets, 8, 0, "ids"),
        BucketOrder(buckets, 8, 1, "ids"),
        BucketOrder(buckets, 8, 0, "other ids"),
        BucketOrder((np.arange(400) + 1) % 3, 8, 0, "ids"),
        BucketOrder(buckets, 9, 0, "ids"),
    ]
    assert len({tuple(order.at(range(40)).tolist()) for order in orders}) == len(orders)


def test_the_order_of_buckets_does_not_change_between_versions() -> None:
    found = BucketOrder(np.array([0, 0, 0, 1, 1, 1, 1]), 2, 0, "ids").at(range(14))
    assert found.tolist() == [3, 6, 4, 5, 2, 1, 5, 6, 0, 1, 0, 2, 4, 3]


@settings(max_examples=30, deadline=None, derandomize=True, database=None)
@given(
    weights=st.lists(st.sampled_from([0.0, 0.01, 0.3, 1.0, 1.7, 3.0]), min_size=1, max_size=60).filter(any),
    batch=st.integers(1, 12),
)
def test_weighted_rows_of_buckets_are_seen_in_proportion(weights: list[float], batch: int) -> None:
    """Of every bucket as many samples as its rows weigh, to within a step; of its rows in proportion."""
    mass, buckets = np.array(weights), np.arange(len(weights)) % 3
    order, epochs = BucketOrder(buckets, batch, 0, "ids", mass), 50
    seen = each_step(order, int(order.steps_before(epochs).sum()))
    counts = np.bincount(seen.ravel(), minlength=len(weights))
    assert (counts[mass == 0] == 0).all()
    for bucket in range(3):
        rows = buckets == bucket
        total = mass[rows].sum()
        assert abs(counts[rows].sum() - epochs * total) <= batch
        if total:
            share = counts[rows].sum() * mass[rows] / total
            assert np.abs(counts[rows] - share).max() <= 0.5 * epochs**0.5 * 2 + 2
