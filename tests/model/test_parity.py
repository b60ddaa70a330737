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
from atoll.model.bank import Bank
from atoll.model.checkpoint import Checkpoint
from atoll.model.dispatch import Networks, Trace
from atoll.model.expert import Expert, StoredExpert
from atoll.model.generate import Conditions, Sampling, generate
from atoll.model.generation import Generation, Residency
from atoll.model.residency import ResidentExperts
from atoll.model.routing import Routing
from atoll.model.sampler import Row, Sampler, starting_noise
from atoll.networks.settings import DataShape
from atoll.store.store import Store
from helpers_networks import CLASSES, TEXT, Logits, conditions, denoiser, expert, null, router
from model.reference import reference_sample
from model.stores import on_disk, publish

K, B, STEPS, SEED = 4, 8, 3, 5  # B == W == H == 8: a broadcast over the wrong axis would be silent
NULL = "once null sample-1"


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

    def bank(self, experts: Networks | None = None) -> Bank:
        return Bank(self.experts if experts is None else experts, self.router)

    @functools.cache  # noqa: B019
    def plain(self, routing: str) -> tuple[Tensor, Tensor]:
        """One batch of the experts in memory."""
        return run(self, self.bank(), routing)

    @functools.cache  # noqa: B019
    def reference(self, routing: str, guidance: float = 2.5, missing: tuple[int, ...] = ()) -> tuple:
        named = Routing.named(routing)
        draws, null_draws = (
            [uniforms(SEED, f"{stream}/{step}", range(B), (1,)).tolist() for step in range(STEPS)]
            for stream in ("route", "route-null")
        )
        strategy, _, other = str(named).partition(" null ")
        assert other in ("", "sample-1")
        return reference_sample(
            self.experts, self.router, self.cond, null(self.shape), self.noise, STEPS,
            strategy.split(" every")[0], guidance, draws, named.every, missing, null_draws if other else None,
        )  # fmt: skip


def new_world(shape: DataShape, folder: Path) -> World:
    """Two experts of one architecture, one deeper, one that predicts noise on another schedule."""
    name = "pixart" if shape.text_width else "dit"
    deeper = Expert(denoiser(2, shape, depth=2), name, "v", "rectified-flow")
    experts = [expert(0, shape), expert(1, shape), deeper, expert(3, shape, "eps", "vp-cosine")]
    store = Store.open(folder)
    stored = on_disk(store, experts, shape)
    experts = [replace(e, card=s.card) for e, s in zip(experts, stored, strict=True)]
    noise = starting_noise(SEED, range(B), (shape.channels, shape.size, shape.size))
    return World(shape, experts, stored, store, Logits(router(9, K, shape)), conditions(B, shape), noise)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return new_world(TEXT, tmp_path_factory.mktemp("parity"))


@pytest.fixture(scope="module", params=["text", "class"])
def either(request: pytest.FixtureRequest, world: World, tmp_path_factory: pytest.TempPathFactory) -> World:
    return world if request.param == "text" else new_world(CLASSES, tmp_path_factory.mktemp("parity"))


def run(world: World, bank: Bank, routing: str, guidance: float = 2.5) -> tuple[Tensor, Tensor]:
    """One batch: latents and weights."""
    how = Generation(guidance=guidance, routing=routing, seed=SEED, steps=STEPS)
    sampler = Sampler(bank, world.cond, null(world.shape), Row.each(how, range(B)), world.noise)
    return sampler.run(), sampler.trace.stacked()


def same(result: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    torch.testing.assert_close(result[1].double(), expected[1].double(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(result[0], expected[0], rtol=0, atol=1e-5 * float(expected[0].abs().max()))


@pytest.mark.parametrize(
    ("routing", "guidance"),
    [("full", 1.0), ("once", 1.0), ("top-1", 2.5), ("top-3", 2.5), ("full", 2.5), ("once", 2.5),
     ("top-1 every 2", 2.5), (NULL, 2.5), ("top-1 every 2 null sample-1", 2.5)],
)  # fmt: skip
def test_an_ensemble_is_the_plain_loop(routing: str, guidance: float, either: World) -> None:
    result = run(either, either.bank(), routing, guidance)
    same(result, either.reference(routing, guidance))
    assert len(result[1].sum((0, 1)).nonzero()) > 2  # several experts take part


WAYS: dict[str, Callable[[World], Networks]] = {
    "reloaded from disk": lambda w: [Checkpoint(w.store, f"experts/{k}").expert() for k in range(K)],
    "all resident": lambda w: ResidentExperts(w.stored),
    "one resident": lambda w: ResidentExperts(w.stored, Residency(experts=1)),
    "one place": lambda w: ResidentExperts(w.stored, Residency(experts=1, prefetch=False)),
    "two and one ahead": lambda w: ResidentExperts(w.stored, Residency(experts=2)),
    "three places": lambda w: ResidentExperts(w.stored, Residency(experts=3, prefetch=False)),
    "from memory": lambda w: ResidentExperts([StoredExpert.of(e) for e in w.experts], Residency(experts=1)),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("routing", ["top-3", NULL])
def test_where_experts_lie_changes_no_bit(routing: str, way: str, world: World) -> None:
    expected = world.plain(routing)
    bank = world.bank(WAYS[way](world))
    for _ in range(2):  # the second time some are resident, others first in line
        result = run(world, bank, routing)
        assert torch.equal(result[0], expected[0]) and torch.equal(result[1], expected[1])


@pytest.mark.parametrize("batch", [3, 100])
@pytest.mark.parametrize("way", ["in memory", "one resident", "two and one ahead"])
@pytest.mark.parametrize("routing", ["top-1", NULL])
def test_batches_by_expert_are_the_plain_loop(routing: str, way: str, batch: int, world: World) -> None:
    bank = world.bank(None if way == "in memory" else WAYS[way](world))
    how = Generation(routing=routing, guidance=2.5, steps=STEPS, seed=SEED)
    conditions = Conditions.of_rows(world.cond, null(world.shape), B)
    parts = list(generate(bank, Sampling(how, conditions, tuple(world.noise.shape[1:]), B, batch=batch)))
    rows = [row for part in parts for row in part.rows]
    assert sorted(rows) == list(range(B)) and max(len(part.rows) for part in parts) <= batch
    order = torch.tensor(rows).argsort()
    trace = Trace.joined([part.trace for part in parts if part.trace])
    latents = torch.cat([part.latents for part in parts])[order]
    same((latents, trace.stacked()[:, order]), world.reference(routing))
    assert trace.router_calls == {"top-1": B * STEPS, NULL: B + B * STEPS}[routing]


@pytest.mark.parametrize("routing", ["top-2", "full", NULL])
def test_a_partial_ensemble_is_the_loop_over_those_that_exist(
    routing: str, world: World, tmp_path: Path
) -> None:
    partial = Bank([e if k != 1 else None for k, e in enumerate(world.experts)], world.router)
    assert partial.missing == (1,)
    expected = run(world, partial, routing)
    same(expected, world.reference(routing, missing=(1,)))
    stored = [s if k != 1 else None for k, s in enumerate(world.stored)]
    bank = ResidentExperts(stored, Residency(experts=1))
    assert torch.equal(run(world, Bank(bank, world.router, (1,)), routing)[0], expected[0])
    # The last island arrives: with all experts present it is the whole ensemble, to the bit.
    store = Store.open(tmp_path)
    stored[1] = Checkpoint(store, publish(store, 1, world.experts[1], world.shape)).open_lazily()
    complete = run(world, world.bank(ResidentExperts(stored, Residency(experts=1))), routing)
    assert torch.equal(complete[0], world.plain(routing)[0])
