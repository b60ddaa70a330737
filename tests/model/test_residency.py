"""Experts within a budget: what is brought, what makes room, what stays the same, what is refused."""

import copy
import json
import math
import os
import shutil
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from atoll.base.condition import Condition
from atoll.base.errors import ConfigError, StoreError
from atoll.model.bank import Bank
from atoll.model.card import WEIGHTS
from atoll.model.checkpoint import Checkpoint
from atoll.model.dispatch import Costs
from atoll.model.expert import Expert, FileWeights, StoredExpert
from atoll.model.generate import Conditions, Sampling, by_expert, generate
from atoll.model.generation import Generation, Residency
from atoll.model.residency import ALIGNMENT, Layout, ResidentExperts
from atoll.model.sampler import Row, Sampler
from atoll.store.store import Store
from helpers_networks import CLASSES, conditions, denoiser, expert, noise, null
from model.stores import on_disk, publish

K, B = 4, 8
T = torch.linspace(0.1, 0.9, B)


@pytest.fixture(scope="module")
def experts() -> list[Expert]:
    return [expert(k, CLASSES) for k in range(K)]


@pytest.fixture(scope="module")
def stored(experts: list[Expert], tmp_path_factory: pytest.TempPathFactory) -> list[StoredExpert | None]:
    return on_disk(Store.open(tmp_path_factory.mktemp("experts")), experts, CLASSES)


def places(number: int) -> Residency:
    return Residency(experts=number, prefetch=False)


def velocity(bank: ResidentExperts | list[Expert], number: int) -> Tensor:
    return bank[number].velocity(noise(B, CLASSES), T, conditions(B, CLASSES))


class Wants:
    """A router that wants what it is told to."""

    def __init__(self, rows: list[list[int]]) -> None:
        self.rows, self.calls = rows, 0

    def logits(self, x_t: Tensor, t: Tensor, cond: Condition) -> Tensor:
        wanted = torch.tensor(self.rows[min(self.calls, len(self.rows) - 1)])
        self.calls += 1
        return 100 * torch.nn.functional.one_hot(wanted, K).float()


# Within the budget.


@pytest.mark.parametrize("budget", [1, 2, 3, 9])
def test_there_are_no_more_places_than_the_budget_has(budget: int, stored: list[StoredExpert | None]) -> None:
    bank, ahead = ResidentExperts(stored, places(budget)), ResidentExperts(stored, Residency(experts=budget))
    assert bank.device_bytes == 0  # nobody was asked yet
    for number in (0, 1, 2, 3, 1, 0):
        velocity(bank, number)
        assert len(bank.resident) <= budget and number in bank.resident
        ahead.prefetch([number, (number + 1) % K])
        velocity(ahead, number)
    assert bank.device_bytes == min(K, budget) * bank.place_bytes
    assert ahead.device_bytes <= min(K, budget + 1) * ahead.place_bytes


def test_a_budget_in_bytes_counts_everything(stored: list[StoredExpert | None]) -> None:
    size = ResidentExperts(stored).place_bytes
    assert size >= sum(p.numel() * 4 for p in denoiser(0, CLASSES).parameters())
    for budget, capacity in ((size, 1), (2 * size, 1), (3 * size - 1, 1), (3 * size, 2), (4 * size, 4)):
        bank = ResidentExperts(stored, Residency(bytes=budget))
        assert bank.capacity == capacity
        for number in (0, 1, 2, 3, 1, 0):
            bank.prefetch([number, (number + 1) % K])
            velocity(bank, number)
            assert bank.device_bytes <= budget
    assert ResidentExperts(stored, Residency(bytes=3 * size, prefetch=False)).capacity == 3
    with pytest.raises(ConfigError, match=f"residency.bytes is {size - 1}, and an expert takes {size}"):
        ResidentExperts(stored, Residency(bytes=size - 1))
    for setting in ({"experts": 0}, {"bytes": 0}, {"host_experts": 0}, {"expert": 1}):
        with pytest.raises(ConfigError, match=next(iter(setting))):
            Residency.parse(setting, "a test")


def test_the_least_recently_used_makes_room(stored: list[StoredExpert | None]) -> None:
    bank = ResidentExperts(stored, places(2))
    for number, resident, loads in ((0, (0,), 1), (1, (0, 1), 2), (0, (0, 1), 2), (2, (0, 2), 3)):
        velocity(bank, number)
        assert (bank.resident, bank.loads) == (resident, loads)
    assert bank.loaded_bytes == 3 * bank.place_bytes


@pytest.mark.parametrize("budget", [1, 3, K])
def test_residents_run_first_so_that_a_step_brings_only_what_is_not_there(
    budget: int, stored: list[StoredExpert | None]
) -> None:
    bank = ResidentExperts(stored, places(budget))
    ensemble = Bank(bank, Wants([list(range(K)) * 2]))
    for count, loads in ((1, K), (5, K + 5 * (K - budget))):  # in the plain order each step would bring all
        before = set(bank.resident)
        assert set(bank.prefetch(range(K))[: len(before)]) == before
        rows = Row.each(Generation(routing="top-1", steps=count), range(B))
        Sampler(ensemble, conditions(B, CLASSES), null(CLASSES), rows, noise(B, CLASSES)).run()
        assert bank.loads == loads


@pytest.mark.parametrize("residency", [places(1), Residency(experts=1), Residency(experts=2), None])
def test_under_commit_each_expert_is_brought_once_over_all_batches(
    residency: Residency | None, stored: list[StoredExpert | None]
) -> None:
    bank = ResidentExperts(stored, residency)
    ensemble, count = Bank(bank, Wants([[n % 3, 3] for n in range(9)])), 18
    rows = Conditions.of_rows(conditions(count, CLASSES), null(CLASSES), count)
    drawn = list(generate(ensemble, Sampling(Generation(steps=3), rows, (3, 8, 8), count, batch=2)))
    assert bank.loads == K
    served = [part.trace.weights[0].argmax(1).tolist() for part in drawn if part.trace]
    assert sorted(k for batch in served for k in batch) == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 9
    assert max(len(set(batch)) for batch in served) <= bank.capacity
    assert sum(part.trace.router_calls for part in drawn if part.trace) == count


def test_batches_are_full_where_the_budget_lets_them(stored: list[StoredExpert | None]) -> None:
    experts = [0, 1, 0, 2, 1, 0, 3, 0]
    whole = Bank(ResidentExperts(stored), Wants([[0]]))
    assert by_expert(experts, whole, 3) == ([[0, 2, 5], [7, 1, 4], [3, 6]], [[0], [0, 1], [2, 3]])
    one = Bank(ResidentExperts(stored, places(1)), Wants([[0]]))
    assert by_expert(experts, one, 3) == ([[0, 2, 5], [7], [1, 4], [3], [6]], [[0], [0], [1], [2], [3]])
    velocity(one.experts, 2)  # type: ignore[arg-type]
    assert by_expert(experts, one, 8)[1] == [[2], [0], [1], [3]]


# Ahead of time.


class Watched(Mapping[str, Tensor]):
    """Weights that know when they are read, and fail on demand."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self.weights, self.read, self.broken = weights, threading.Event(), False

    def __getitem__(self, name: str) -> Tensor:
        self.read.set()
        if self.broken:
            raise StoreError("the disk is gone", "find it")
        return self.weights[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.weights)

    def __len__(self) -> int:
        return len(self.weights)


def watched(experts: list[Expert]) -> tuple[list[StoredExpert | None], list[Watched]]:
    """The experts in memory, and their weights, which nobody has read yet."""
    stored = [StoredExpert.of(e) for e in experts]
    weights = [Watched(s.weights) for s in stored]
    return [replace(s, weights=w) for s, w in zip(stored, weights, strict=True)], weights


def test_what_is_wanted_next_is_brought_before_it_is_asked(experts: list[Expert]) -> None:
    stored, weights = watched(experts)
    bank = ResidentExperts(stored, Residency(experts=1))
    for w in weights:
        w.read.clear()
    assert bank.prefetch([2, 3], next=[0]) == [2, 3]
    assert weights[2].read.wait(10) and weights[3].read.wait(10)
    assert bank.resident == (2, 3) and not weights[0].read.is_set()  # both places are wanted first
    velocity(bank, 2)
    velocity(bank, 3)  # 2 is done, so its place is free for what comes later
    assert weights[0].read.wait(10)
    assert torch.equal(velocity(bank, 0), velocity(experts, 0))
    assert bank.loads == 3
    slow = ResidentExperts(stored, places(2))  # without prefetch
    for w in weights:
        w.read.clear()
    slow.prefetch([2, 3])
    velocity(slow, 2)
    assert [w.read.is_set() for w in weights] == [False, False, True, False]


@pytest.mark.parametrize("prefetch", [True, False])
def test_an_expert_that_cannot_be_read_says_so_and_may_come_back(
    prefetch: bool, experts: list[Expert]
) -> None:
    stored, weights = watched(experts)
    bank = ResidentExperts(stored, Residency(experts=1, prefetch=prefetch))
    velocity(bank, 0)
    weights[1].broken = True
    for _ in range(2):
        bank.prefetch([0, 1])
        assert torch.equal(velocity(bank, 0), velocity(experts, 0))
        with pytest.raises(StoreError, match="the disk is gone"):
            velocity(bank, 1)
    weights[1].broken = False
    assert torch.equal(velocity(bank, 1), velocity(experts, 1))


def test_experts_share_a_network_and_closing_gives_the_memory_back(
    stored: list[StoredExpert | None], experts: list[Expert]
) -> None:
    bank = ResidentExperts(stored, Residency(experts=2))
    networks = {id(one.expert.network) for one in bank._experts.values()}
    network = bank._experts[0].expert.network
    before = [id(p) for p in network.parameters()]
    bank.prefetch(range(K))
    for number in range(K):
        velocity(bank, number)
    assert networks == {id(network)} and [id(p) for p in network.parameters()] == before
    bank.close()
    assert bank.device_bytes == 0 and bank.resident == ()
    assert sum(p.numel() for p in network.parameters()) == 0
    assert torch.equal(velocity(bank, 3), velocity(experts, 3))


@pytest.mark.parametrize("inference", [True, False])
def test_exchanged_weights_do_not_compile_the_network_again(
    inference: bool, stored: list[StoredExpert | None], experts: list[Expert]
) -> None:
    torch.compiler.reset()
    counter = CompileCounter()
    bank = ResidentExperts(stored, places(2))
    bank[0].network.compile(backend=counter, dynamic=False)
    counts = set()
    for number in (0, 1, 2, 3, 0):
        with torch.inference_mode(inference):
            v = velocity(bank, number)
        torch.testing.assert_close(v, velocity(experts, number))
        counts.add(counter.frame_count)
    assert len(counts) == 1 and 0 not in counts
    torch.compiler.reset()


def test_weights_in_half_the_bytes(stored: list[StoredExpert | None], experts: list[Expert]) -> None:
    whole, half = ResidentExperts(stored, places(1)), ResidentExperts(stored, places(1), dtype=torch.bfloat16)
    assert half.place_bytes < 0.6 * whole.place_bytes
    for number in (0, 3, 0):
        cast = copy.deepcopy(experts[number])
        cast.network.to(torch.bfloat16)
        v = velocity(half, number)
        assert v.dtype == torch.float32 and torch.equal(v, velocity([cast], 0))


# What is refused.


def test_a_missing_expert_has_no_stand_in(stored: list[StoredExpert | None], experts: list[Expert]) -> None:
    bank = ResidentExperts([stored[0], None, stored[2], None])
    assert len(bank) == K
    with pytest.raises(ConfigError, match="expert 1 is missing"):
        bank[1]
    with pytest.raises(IndexError):
        bank[K]
    with pytest.raises(ConfigError, match="there is no expert"):
        ResidentExperts([None, None])
    ensemble = Bank([experts[0], None, experts[2], None], Wants([[1] * B]))
    assert ensemble.missing == (1, 3)
    ensemble.missing = ()
    with pytest.raises(ConfigError, match="expert 1 is missing, and yet was asked"):
        ensemble.velocity(noise(B, CLASSES), T, conditions(B, CLASSES))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop("proj_out_1.bias"), r"no tensor proj_out_1\.bias"),
        (lambda w: w.update(more=torch.zeros(2)), "a tensor more"),
        (lambda w: w.update({"proj_out_1.bias": torch.zeros(2)}), r"has shape \(2,\)"),
    ],
)
def test_weights_of_another_network_are_refused(change, message: str, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    one = StoredExpert.of(expert(0, CLASSES))
    weights = dict(one.weights)
    change(weights)
    save_file(weights, tmp_path / "a")
    for held in (weights, FileWeights(tmp_path / "a")):
        other = replace(one, weights=held)
        for stored in ([other], [one, other]):  # the first of its architecture, or not
            with pytest.raises(StoreError, match=message):
                ResidentExperts(stored)


def test_a_file_that_changes_while_it_is_open(experts: list[Expert], tmp_path: Path) -> None:
    """Replaced it does no harm, and cut short that is said."""
    store = Store.open(tmp_path)
    prefixes = [publish(store, k, experts[k], CLASSES) for k in range(2)]
    bank = ResidentExperts([Checkpoint(store, prefix).open_lazily() for prefix in prefixes], places(1))
    shutil.copy(tmp_path / prefixes[0] / WEIGHTS, tmp_path / "new")
    os.replace(tmp_path / "new", tmp_path / prefixes[1] / WEIGHTS)
    assert torch.equal(velocity(bank, 1), velocity(experts, 1))
    os.truncate(tmp_path / prefixes[0] / WEIGHTS, 2000)
    with pytest.raises(StoreError, match="ends within"):
        velocity(bank, 0)


# Files.


def test_tensors_are_read_as_safetensors_reads_them(tmp_path: Path) -> None:
    source = torch.Generator().manual_seed(0)
    tensors = {
        str(dtype): torch.randn(3, 5, generator=source).to(dtype)
        for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8)
    }
    tensors |= {"scalar": torch.tensor(2.5), "empty": torch.zeros(0, 3), "bool": torch.tensor([True, False])}
    save_file(tensors, tmp_path / "a", metadata={"format": "pt"})
    weights, theirs = FileWeights(tmp_path / "a"), load_file(tmp_path / "a")
    assert set(weights) == set(theirs) and len(weights) == len(theirs)
    for name, tensor in theirs.items():
        assert weights[name].dtype == tensor.dtype and torch.equal(weights[name], tensor)
    other = torch.empty(3, 5, dtype=torch.bfloat16)
    weights.read("torch.float32", other)
    assert torch.equal(other, theirs["torch.float32"].bfloat16())


def test_what_lies_outside_the_file_is_refused(tmp_path: Path) -> None:
    def write(about: dict[str, object]) -> Path:
        header = json.dumps({"a": about}).encode()
        (tmp_path / "a").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
        return tmp_path / "a"

    good = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    assert FileWeights(write(good))["a"].tolist() == [0, 0]
    offsets = ({"data_offsets": value} for value in ([8, 16], [-8, 0], [0, 4], None))
    for change in (*offsets, {"shape": [3]}, {"dtype": "pickle"}):
        with pytest.raises(StoreError, match=r"is damaged|has 7[0-9] bytes instead of"):
            FileWeights(write({**good, **change}))


def test_places_are_aligned_and_do_not_overlap() -> None:
    layout = Layout({str(n): torch.empty(n, device="meta") for n in (1, 63, 64, 65, 0, 7)})
    views = layout.views(torch.zeros(layout.nbytes, dtype=torch.uint8))
    for number, view in enumerate(views.values()):
        assert (view.storage_offset() * 4) % ALIGNMENT == 0
        view.fill_(number + 1)
    for number, (name, view) in enumerate(views.items()):
        assert view.shape == (int(name),) and bool((view == number + 1).all())


# What it costs.


@pytest.mark.parametrize(("routing", "router_calls"), [("top-1", 10), ("top-1 every 5", 2), ("oracle", 0)])
def test_the_trace_says_what_the_router_cost(routing: str, router_calls: int, experts: list[Expert]) -> None:
    costs, labels = Costs(3.0, [100.0, 200.0, 300.0, 400.0]), torch.tensor([0, 1, 1, 3, 3, 3, 3, 3])
    cond, how = conditions(B, CLASSES), Generation(routing=routing, steps=10)
    for known in (costs, None):
        ensemble = Bank(experts, Wants([labels.tolist()]), costs=known)
        sampler = Sampler(ensemble, cond, null(CLASSES), Row.each(how, range(B), labels), noise(B, CLASSES))
        sampler.run()
        trace = sampler.trace
        assert trace.router_calls == B * router_calls and trace.expert_calls == 2 * B * 10
        assert trace.expert_runs == 3 * 10
        if known is None:
            assert math.isnan(trace.expert_flops)  # it is not made up
        else:
            assert trace.router_flops == 3 * B * router_calls
            assert trace.expert_flops == 2 * 10 * (100 + 2 * 200 + 5 * 400)
