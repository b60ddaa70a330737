"""Batches in flight: what must hold of a picture whatever the weights are.

Of texts, whose lengths differ; `test_parity.py` asks class labels too.
"""

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler
from torch import Tensor

from atoll.base.condition import Condition
from atoll.base.errors import ConfigError
from atoll.model.bank import Bank
from atoll.model.dispatch import Dispatch
from atoll.model.generation import Generation
from atoll.model.sampler import Row, Sampler, starting_noise, times
from helpers_networks import Logits, conditions, expert, noise, null, router

K, B = 4, 8  # B == W == H == 8: a broadcast over the wrong axis would be silent
STRATEGIES = ["full", "top-1", "top-2", "threshold(0.2)", "sample-2", "nucleus(0.9)", "oracle", "once"]
T = torch.linspace(0.05, 0.95, B)
X, COND, NULL, LABELS = noise(B), conditions(B), null(), torch.arange(B) % K


def new_bank() -> tuple[Bank, Logits]:
    """Four experts, the network they started from, and their router, which counts its calls."""
    counting = Logits(router(9, K))
    return Bank([expert(k) for k in range(K)], counting, pretrain=expert(K)), counting


@pytest.fixture(scope="module")
def bank() -> Bank:
    return new_bank()[0]


def start(
    bank: Bank, routing: str, guidance: float = 1.0, steps: int = 1, numbers: Sequence[int] = range(B)
) -> Sampler:
    """A batch of these samples before its first step."""
    how, rows = Generation(guidance=guidance, routing=routing, steps=steps, seed=5), torch.tensor(numbers)
    return Sampler(bank, COND.select(rows), NULL, Row.each(how, numbers, LABELS[rows]), X[rows])


def stepped(bank: Bank, routing: str, guidance: float = 3.0) -> tuple[Tensor, Sampler]:
    """Velocity of the step that begins at 0.7."""
    sampler = start(bank, routing, guidance, 10)
    advance_from(3, sampler)
    assert sampler.v is not None
    return sampler.v, sampler


def advance_from(step: int, sampler: Sampler) -> None:
    for row in sampler.rows:
        row.step = step
    sampler.advance()


def close(a: Tensor, b: Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def test_the_parts_of_these_tests_differ(bank: Bank) -> None:
    """Experts, posteriors and conditions are far apart, so that no equality below holds by accident."""
    each = torch.stack([e.velocity(X, T, COND) for e in bank.experts])
    assert each.std(0).mean() > 0.1
    posterior = bank.logits(X, T, COND).softmax(1)
    assert float(posterior.std(0).min()) > 0.02 and float(posterior.max()) < 0.999
    assert float((bank.experts[0].velocity(X, T, conditions(B, seed=1)) - each[0]).abs().mean()) > 1e-3


# Identities.


def test_copies_of_one_expert_are_that_expert() -> None:
    one = expert(0)
    copies = Bank([one] * K, Logits(router(9, K)))
    close(copies.velocity(X, T, COND), one.velocity(X, T, COND))
    alone = start(Bank([one]), "top-2", 2.5, 2).run()  # of one network the routing does not count
    for routing in STRATEGIES:
        close(start(copies, routing, 2.5, 2).run(), alone)


def test_the_denoiser_is_the_sum_over_all_experts(bank: Bank) -> None:
    posterior = bank.logits(X, T, COND).softmax(1)
    each = torch.stack([e.velocity(X, T, COND) for e in bank.experts], 1)
    close(bank.velocity(X, T, COND), torch.einsum("bk,bkchw->bchw", posterior, each))


def test_an_expert_sees_only_the_samples_that_chose_it(bank: Bank) -> None:
    """And the sparse sum is the dense one."""
    seen: dict[int, tuple[Tensor, Tensor, Condition]] = {}

    class Watched:
        def __init__(self, number: int) -> None:
            self.number = number

        def velocity(self, x_t: Tensor, t: Tensor, cond: Condition) -> Tensor:
            assert self.number not in seen
            seen[self.number] = (x_t, t, cond)
            return bank.experts[self.number].velocity(x_t, t, cond)

    source = torch.Generator().manual_seed(3)
    weights = torch.rand(B, K, generator=source) * (torch.rand(B, K, generator=source) > 0.5)
    weights[:, 2] = 0  # nobody asks expert 2
    weights[3] = torch.tensor([0.0, 1.0, 0.0, 0.0])
    sparse = Dispatch(weights, COND).run([Watched(k) for k in range(K)], X, T)
    dense = sum(weights[:, k].view(-1, 1, 1, 1) * e.velocity(X, T, COND) for k, e in enumerate(bank.experts))
    close(sparse, dense)
    assert sorted(seen) == [0, 1, 3]
    for number, (x_t, t, cond) in seen.items():
        rows = weights[:, number].nonzero().flatten()
        assert 0 < len(rows) < B and torch.equal(x_t, X[rows]) and torch.equal(t, T[rows])
        assert torch.equal(cond.text, COND.text[rows]) and torch.equal(cond.mask, COND.mask[rows])


# Steps: `test_parity.py` follows Euler's method by hand.


@pytest.mark.parametrize("shift", [1.0, 3.0, 0.7])
def test_times_are_those_of_diffusers_to_the_bit(shift: float) -> None:
    scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
    for steps in (1, 3, 7, 50):
        scheduler.set_timesteps(sigmas=np.linspace(1.0, 1.0 / steps, steps).tolist())
        assert times(steps, shift) == tuple(scheduler.sigmas.tolist())


def test_noise_of_a_sample_depends_on_seed_and_number_only() -> None:
    many = starting_noise(4, range(10), (2, 3, 3))
    assert torch.equal(starting_noise(4, [7, 2], (2, 3, 3)), many[[7, 2]])
    assert not torch.equal(starting_noise(5, [7], (2, 3, 3)), many[[7]])
    assert len(many.flatten(1).unique(dim=0)) == 10
    assert abs(float(starting_noise(0, range(200), (3, 8, 8)).std()) - 1) < 0.02


# Batches.


@pytest.mark.parametrize(
    "routing",
    ["monolith", "full", "top-2", "sample-2", "oracle", "once null sample-1", "top-1 null pretrain"],
)
def test_a_picture_does_not_depend_on_its_batch(routing: str, bank: Bank) -> None:
    def run(rows: list[int]) -> Tensor:
        if routing == "monolith":
            return start(Bank([bank.experts[0]]), "once", 2.0, 3, rows).run()
        return start(bank, routing, 2.0, 3, rows).run()

    together = run(list(range(B)))
    for groups in ([[i] for i in range(B)], [[6, 1, 4], [7], [0, 5, 3, 2]]):
        order = torch.tensor([i for rows in groups for i in rows]).argsort()
        assert torch.equal(torch.cat([run(rows) for rows in groups])[order], together)


@torch.inference_mode()
def test_samples_of_any_kind_share_a_batch_and_do_not_notice(bank: Bank) -> None:
    """Strategies, guidance, seeds and steps differ by row, and rows come and go between the steps."""
    ways = [
        Generation(steps=3, guidance=2.0, routing="top-1 every 2", seed=1),
        Generation(steps=5, guidance=1.0, routing="full", seed=2),
        Generation(steps=4, guidance=3.0, routing="once null sample-1", seed=3, shift=3.0),
        Generation(steps=5, guidance=2.0, routing="oracle", seed=4),
        Generation(steps=2, guidance=2.0, routing="sample-2", seed=1),
        Generation(steps=3, guidance=2.5, routing="top-1 null pretrain", seed=2),
    ]

    def alone(row: int) -> Sampler:
        own = slice(row, row + 1)
        return Sampler(bank, COND.select(own), NULL, Row.each(ways[row], [row], [row % K]), X[own])

    expected = [alone(row).run() for row in range(len(ways))]
    ended: dict[int, Tensor] = {}
    sampler, begun = Sampler.merge([alone(0), alone(1)]), 2
    for turn in range(8):
        if turn in (1, 2, 4, 5):  # another one joins
            sampler, begun = Sampler.merge([sampler, alone(begun)]), begun + 1
        sampler.advance()
        stay = [n for n, row in enumerate(sampler.rows) if row.step < row.generation.steps]
        ended |= {row.position: sampler.x[n] for n, row in enumerate(sampler.rows) if n not in stay}
        if stay:
            sampler = sampler.take(stay)
    assert sorted(ended) == list(range(len(ways)))
    for row, x in enumerate(expected):
        assert torch.equal(ended[row][None], x)


def test_rows_whose_turn_it_is_go_on_before_more_that_begin(bank: Bank) -> None:
    """However many begin with other experts beside them."""
    sampler = start(bank, "top-1", numbers=range(4))
    for row, experts in zip(sampler.rows, ({2}, {0}, {0}, {0}), strict=True):
        row.experts = frozenset(experts)
    assert sampler.split(1, frozenset({2})) == ([0], [[1, 2, 3]])
    assert sampler.split(1, frozenset()) == ([1, 2, 3], [[0]])
    assert sampler.split(2, frozenset({2})) == ([0, 1, 2, 3], [])
    other = start(bank, "top-1", numbers=range(1))
    other.rows[0].experts = frozenset({1})
    assert not sampler.can_join(other, 2) and sampler.can_join(other, 3)


def test_a_step_that_calls_twice_asks_once() -> None:
    bank, counting = new_bank()
    sampler = start(bank, "top-1", steps=2)
    for t in (1.0, 0.5):
        sampler.advance()
        again = sampler.velocity(0.5 * X, torch.full((B,), t - 0.5))  # as Heun, at the ends of its step
        assert sampler.v is not None and not torch.equal(again, sampler.v)
    assert counting.calls == 2
    assert len(sampler.trace.weights) == 2 and sampler.trace.expert_calls == 4 * B


def test_oracle_follows_the_labels(bank: Bank) -> None:
    sampler = start(bank, "oracle", steps=2)
    sampler.run()
    assert sampler.trace.stacked().argmax(2).tolist() == [[i % K for i in range(B)]] * 2
    assert [row.experts for row in sampler.rows] == [{i % K} for i in range(B)]
    with pytest.raises(ConfigError, match="needs the cluster of every sample"):
        Sampler(bank, COND, NULL, Row.each(Generation(routing="oracle"), range(B)), X)


# Guidance.


def by_hand(bank: Bank, choose: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Tensor:
    """Velocity at 0.7, guidance 3; `choose(posterior, null posterior)` are the weights of the branches."""
    time, branches = torch.full((B,), times(10)[3]), [COND, NULL.expand(B)]
    posteriors = [bank.logits(X, time, c).softmax(1) for c in branches]
    v = []
    for weights, cond in zip(choose(*posteriors), branches, strict=True):
        each = [e.velocity(X, time, cond) for e in bank.experts]
        v.append(torch.einsum("bk,kbchw->bchw", weights, torch.stack(each)))
    return v[1] + 3.0 * (v[0] - v[1])


def top(posterior: Tensor) -> Tensor:
    return torch.nn.functional.one_hot(posterior.argmax(1), K).float()


@pytest.mark.parametrize("routing", ["top-1", "once", "oracle"])
def test_a_null_branch_of_its_own(routing: str, bank: Bank) -> None:
    """Its weights come from its own posterior, whatever the conditional branch does."""
    (v, sampler), (shared, plain) = stepped(bank, f"{routing} null top-1"), stepped(bank, routing)
    served = sampler.trace.weights[0]
    close(v, by_hand(bank, lambda p, p_null: (served, top(p_null))))
    assert torch.equal(plain.trace.weights[0], served) and float((v - shared).abs().max()) > 1e-2
    assert sampler.trace.router_calls == plain.trace.router_calls + B
    assert sampler.trace.expert_calls == plain.trace.expert_calls == 2 * B


@pytest.mark.parametrize("routing", ["full", "top-1", "once"])
def test_a_null_branch_of_shared_pretraining(routing: str, bank: Bank) -> None:
    """The bank's last member serves it for all samples; the router is asked for the others only."""
    (v, sampler), time = stepped(bank, f"{routing} null pretrain"), torch.full((B,), times(10)[3])
    served = sampler.trace.weights[0]
    each = torch.stack([one.velocity(X, time, COND) for one in bank.experts])
    guide = bank[K]
    assert guide is not None and served.shape == (B, K) and len(bank) == K + 1
    away = guide.velocity(X, time, NULL.expand(B))
    close(v, away + 3.0 * (torch.einsum("bk,kbchw->bchw", served, each) - away))
    assert float((v - stepped(bank, routing)[0]).abs().max()) > 1e-2
    _, plain = stepped(bank, routing, 1.0)
    assert sampler.trace.router_calls == plain.trace.router_calls == B
    assert sampler.trace.expert_calls == plain.trace.expert_calls + B
    assert len(sampler.calls) == K and all(row.experts <= {*range(K)} for row in sampler.rows)
    with pytest.raises(ConfigError, match="there is no network of shared pretraining"):
        start(Bank(bank.experts, bank.router), f"{routing} null pretrain")


@pytest.mark.parametrize("routing", ["full", "top-2", "once", "once null sample-1"])
def test_experts_left_out_are_as_if_they_were_missing(routing: str, bank: Bank) -> None:
    missing = Bank([None if k in (0, 2) else expert(k) for k in range(K)], Logits(router(9, K)))
    conditional, *of_null = routing.split(" null ")
    named = " null ".join([f"{conditional} without 0,2", *of_null])
    assert torch.equal(stepped(bank, named, 2.0)[0], stepped(missing, routing, 2.0)[0])


def test_the_null_branchs_draws_average_to_its_posterior(bank: Bank) -> None:
    """And are none of those that the conditional branch had."""
    draws = 400
    rows = torch.arange(B).repeat(draws)
    how = Generation(guidance=3.0, routing="top-1 null sample-1", seed=5, steps=10)
    sampler = Sampler(bank, COND.select(rows), NULL, Row.each(how, range(draws * B)), X[rows])
    advance_from(3, sampler)
    assert sampler.v is not None
    drawn = sampler.v.view(draws, B, *X.shape[1:])
    expected = by_hand(bank, lambda p, p_null: (top(p), p_null))
    error = (drawn.mean(0) - expected).abs().mean() / (drawn - expected).abs().mean()
    assert float(error) < 2 / draws**0.5  # the mean's is 1 / sqrt(draws) of one draw's, and no bias beside it
    (_, apart), (_, alone) = (stepped(bank, name) for name in ("sample-1 null sample-1", "sample-1"))
    assert torch.equal(apart.trace.weights[0], alone.trace.weights[0])


@pytest.mark.parametrize(
    ("routing", "guidance", "calls"),
    [
        ("top-1", 1.0, 6),
        ("top-1", 2.0, 6),
        ("top-1 every 3", 1.0, 2),
        ("oracle", 1.0, 0),
        ("full", 1.0, 6),
        ("once null sample-1", 1.0, 1),
        ("once null sample-1", 2.0, 1 + 6),
        ("top-1 every 3 null sample-1 every 2", 2.0, 2 + 3),
        ("oracle null top-1 every 6", 2.0, 1),
        ("full", 2.0, 12),
        ("full every 2", 2.0, 6),
    ],
)
def test_each_branch_asks_at_its_own_steps(routing: str, guidance: float, calls: int) -> None:
    """Without guidance there is no second branch."""
    bank, counting = new_bank()
    sampler = start(bank, routing, guidance, 6)
    sampler.run()
    assert counting.calls == calls and len(sampler.trace.weights) == 6
    assert sampler.trace.router_calls == calls * B
    experts, branches = K if "full" in routing else 1, 1 if guidance == 1 else 2
    assert sampler.trace.expert_calls == 6 * B * experts * branches


def test_parts_that_do_not_go_together_are_refused(bank: Bank) -> None:
    partial = Bank([expert(0)] * K, Logits(router(9, K)), (1,))
    sparse = Bank([None, expert(1), None, expert(3)], Logits(router(9, K)))
    for run, message in (
        (lambda: start(partial, "oracle").run(), "cluster 1 has no expert"),
        (lambda: start(bank, "full without 4"), "there is no expert 4"),
        (lambda: start(sparse, "full without 1,3"), "leaves no expert"),
        (
            lambda: Bank([expert(0)] * 3, Logits(router(9, K))).velocity(X, T, COND),
            "the router knows 4 experts, the ensemble has 3",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            run()
