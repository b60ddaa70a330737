"""However an ensemble is held and batched, it samples what a plain loop samples.

Bits are equal where the same sums are taken in the same order: wherever experts lie, in whatever order they
run. Another batch or grouping gives matrix products of another shape, whose sums the libraries take in
another order; there the bound is 1e-5 of the largest number in float32, given the same routing.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from atoll.base.condition import Condition
from atoll.base.rng import uniforms
from atoll.ensemble.dispatch import Experts
from atoll.ensemble.ensemble import Ensemble, Trace
from atoll.ensemble.expert import Expert
from atoll.ensemble.generate import Conditions, Sampling, generate
from atoll.ensemble.generation import Generation
from atoll.ensemble.integrate import sample, starting_noise
from atoll.ensemble.residency import ResidentExperts
from atoll.ensemble.routing import Routing
from atoll.ensemble.settings import Residency
from atoll.ensemble.stored import StoredExpert
from atoll.networks.settings import DataShape
from atoll.store.store import Store
from ensemble.reference import reference_sample
from ensemble.stores import on_disk, publish
from helpers_networks import CLASSES, TEXT, Logits, conditions, expert, null, router

K, B, STEPS, SEED = 4, 8, 3, 5  # B == W == H == 8: a broadcast over the wrong axis would be silent
STRATEGIES = ["top-1", "top-2", "top-3", "full", "once", "top-1 every 2"]
NULL = ["once null sample-1", "top-1 every 2 null sample-1"]


@dataclass(eq=False)
class World:
    """Experts in memory and on disk, and what they are asked."""

    shape: DataShape
    experts: list[Expert]
    stored: list[StoredExpert | None]
    store: Store
    router: Logits
    cond: Condition
    noise: Tensor

    def ensemble(self, experts: Experts | None = None) -> Ensemble:
        return Ensemble(self.experts if experts is None else experts, self.router)


@pytest.fixture(scope="module", params=["text", "class"])
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    shape = {"text": TEXT, "class": CLASSES}[request.param]
    # Two of one architecture, one deeper, one that predicts noise on another schedule.
    experts = [expert(0, shape), expert(1, shape), deeper(2, shape), expert(3, shape, "eps", "vp-cosine")]
    store = Store.open(tmp_path_factory.mktemp("parity"))
    stored = on_disk(store, experts, shape)
    experts = [replace(one, card=own.card) for one, own in zip(experts, stored, strict=True)]
    own = Logits(router(9, K, shape))
    noise = starting_noise(SEED, range(B), (shape.channels, shape.size, shape.size))
    return World(shape, experts, stored, store, own, conditions(B, shape), noise)


def deeper(seed: int, shape: DataShape) -> Expert:
    from helpers_networks import denoiser

    return Expert(
        denoiser(seed, shape, depth=2), "pixart" if shape.text_width else "dit", "v", "rectified-flow"
    )


def run(
    world: World, ensemble: Ensemble, routing: str, guidance: float, rows: list[int] | None = None
) -> tuple[Tensor, Tensor]:
    """One batch: latents and weights."""
    rows = list(range(B)) if rows is None else rows
    field = ensemble.field(
        world.cond.take(rows),
        null(world.shape),
        Generation(guidance=guidance, routing=routing, seed=SEED),
        rows,
    )
    return sample(field, world.noise[rows], STEPS), field.trace.stacked()


@functools.cache
def reference(world: World, routing: str, guidance: float, missing: tuple[int, ...] = ()) -> tuple:
    named = Routing.named(routing)
    draws, null_draws = (
        [uniforms(SEED, f"{stream}/{step}", range(B), (1,)).tolist() for step in range(STEPS)]
        for stream in ("route", "route-null")
    )
    own, _, other = str(named).partition(" null ")
    assert other in ("", "sample-1")
    return reference_sample(
        world.experts, world.router, world.cond, null(world.shape), world.noise, STEPS,
        own.split(" every")[0], guidance, draws, named.every, missing, null_draws if other else None,
    )  # fmt: skip


def same(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    torch.testing.assert_close(found[1].double(), expected[1].double(), rtol=1e-4, atol=1e-5)
    bound = 1e-5 * float(expected[0].abs().max())
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=bound)


@pytest.mark.parametrize("guidance", [1.0, 2.5])
@pytest.mark.parametrize("routing", STRATEGIES + NULL)
def test_an_ensemble_is_the_plain_loop(routing: str, guidance: float, world: World) -> None:
    found = run(world, world.ensemble(), routing, guidance)
    same(found, reference(world, routing, guidance))
    assert len(found[1].sum((0, 1)).nonzero()) > 2  # several experts take part


WAYS: dict[str, Callable[[World], Experts]] = {
    "reloaded from disk": lambda w: [Expert.load(w.store, f"experts/{k}") for k in range(K)],
    "all resident": lambda w: ResidentExperts(w.stored),
    "one resident": lambda w: ResidentExperts(w.stored, Residency(experts=1)),
    "one place": lambda w: ResidentExperts(w.stored, Residency(experts=1, prefetch=False)),
    "two and one ahead": lambda w: ResidentExperts(w.stored, Residency(experts=2)),
    "three places": lambda w: ResidentExperts(w.stored, Residency(experts=3, prefetch=False)),
    "from memory": lambda w: ResidentExperts([StoredExpert.of(e) for e in w.experts], Residency(experts=1)),
}


@functools.cache
def plain(world: World, routing: str) -> tuple[Tensor, Tensor]:
    """One batch of the experts in memory."""
    return run(world, world.ensemble(), routing, 2.5)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("routing", ["top-1", "top-3", "once", NULL[0]])
def test_where_experts_lie_changes_no_bit(routing: str, way: str, world: World) -> None:
    expected = plain(world, routing)
    ensemble = world.ensemble(WAYS[way](world))
    for _ in range(2):  # the second time some are resident, others first in line
        found = run(world, ensemble, routing, 2.5)
        assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])


@pytest.mark.parametrize("way", ["in memory", "one resident"])
@pytest.mark.parametrize("routing", ["top-1", "top-2", "once", NULL[0]])
def test_a_sample_does_not_depend_on_its_batch(routing: str, way: str, world: World) -> None:
    ensemble = world.ensemble(None if way == "in memory" else WAYS[way](world))
    expected = reference(world, routing, 2.5)
    for groups in ([[i] for i in range(B)], [[6, 1, 4], [7], [0, 5, 3, 2]]):
        parts = [run(world, ensemble, routing, 2.5, rows) for rows in groups]
        order = torch.tensor([i for rows in groups for i in rows]).argsort()
        same(
            (torch.cat([p[0] for p in parts])[order], torch.cat([p[1] for p in parts], 1)[:, order]), expected
        )


@pytest.mark.parametrize("batch", [3, 100])
@pytest.mark.parametrize("way", ["in memory", "one resident", "two and one ahead"])
@pytest.mark.parametrize("routing", ["once", "top-1", NULL[0]])
def test_batches_by_expert_are_the_plain_loop(routing: str, way: str, batch: int, world: World) -> None:
    ensemble = world.ensemble(None if way == "in memory" else WAYS[way](world))
    shape = tuple(world.noise.shape[1:])
    how = Generation(routing=routing, guidance=2.5, steps=STEPS, seed=SEED)
    rows = Conditions.of_rows(world.cond, null(world.shape), B)
    drawn = list(generate(ensemble, Sampling(how, rows, shape, B, batch=batch)))
    rows = [row for part in drawn for row in part.rows]
    assert sorted(rows) == list(range(B)) and max(len(part.rows) for part in drawn) <= batch
    order = torch.tensor(rows).argsort()
    trace = Trace.joined([part.trace for part in drawn if part.trace])
    found = torch.cat([part.latents for part in drawn])[order], trace.stacked()[:, order]
    same(found, reference(world, routing, 2.5))
    assert trace.router_calls == {"once": B, "top-1": B * STEPS, NULL[0]: B + B * STEPS}[routing]


@pytest.mark.parametrize("routing", ["top-2", "full", "once", NULL[0]])
def test_a_partial_ensemble_is_the_loop_over_those_that_exist(
    routing: str, world: World, tmp_path: Path
) -> None:
    there = [0, 2, 3]
    partial = Ensemble([e if k in there else None for k, e in enumerate(world.experts)], world.router)
    assert partial.missing == (1,)
    expected = run(world, partial, routing, 2.5)
    same(expected, reference(world, routing, 2.5, (1,)))
    stored = [s if k in there else None for k, s in enumerate(world.stored)]
    bank = ResidentExperts(stored, Residency(experts=1))
    assert bank.missing == (1,)
    found = run(world, Ensemble(bank, world.router, bank.missing), routing, 2.5)
    assert torch.equal(found[0], expected[0])
    # The last island arrives: with all experts present it is the whole ensemble, to the bit.
    store = Store.open(tmp_path)
    stored[1] = StoredExpert.find(store, publish(store, 1, world.experts[1], world.shape))
    complete = run(world, world.ensemble(ResidentExperts(stored, Residency(experts=1))), routing, 2.5)
    assert torch.equal(complete[0], plain(world, routing)[0])
