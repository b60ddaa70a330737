"""Routing: names, weights of every strategy, and the draws' distribution."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare
from torch import Tensor

from atoll.base.errors import ConfigError
from atoll.model.dispatch import route
from atoll.model.routing import Routing

CANONICAL = ["full", "top-1", "top-3", "threshold(0.1)", "sample-2", "sample-1(0.5)", "oracle", "once"]
CANONICAL += ["nucleus(0.9)", "nucleus(0.9, 2.0)", "once(0.5)", "top-1 every 5", "once null sample-1"]
CANONICAL += ["top-2 every 5 null pretrain", "top-1 every 5 null nucleus(0.9, 2.0) every 2"]
CANONICAL += ["once without 0,2 null sample-1"]
P = torch.tensor([[0.5, 0.3, 0.15, 0.05]], dtype=torch.float64)


def weights(name: str, p: Tensor = P, u: list[float] | None = None, labels: Tensor | None = None) -> Tensor:
    routing = Routing.named(name)
    uniforms = torch.tensor(u or [0.5] * routing.uniforms, dtype=torch.float64)
    return route(routing, p.log(), uniforms.expand(p.shape[0], -1), labels)


def test_names_and_spellings() -> None:
    for name in CANONICAL:
        assert str(Routing.named(name)) == name
    assert Routing.named("threshold-0.1") == Routing.named(" Threshold( .1 ) ")
    assert str(Routing.named("nucleus(0.9,2)")) == "nucleus(0.9, 2.0)"
    assert Routing.named("sample-2(1)") == Routing.named("sample-2")
    assert Routing() == Routing.named("once")
    assert Routing.named("Top-1  NULL  Sample-1") == Routing.named("top-1 null sample-1")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("onec", "did you mean 'once'"),
        ("top 1", "did you mean 'top-1'"),
        ("", "valid: "),
        ("top-0", "k = 0"),
        ("sample-4097", "give k from 1 to 4096"),  # each draw costs memory, of a server too
        ("top-x", "'k'"),
        ("top(2)", "is no form of top-k: write top-1, top-1 every 5"),
        ("threshold(0)", "p = 0.0"),
        ("nucleus(nan)", "p = nan"),
        ("nucleus(0.9, 0)", "temperature 0.0"),
        ("nucleus(0.9, 1, 2)", r"write nucleus\(0.9\), nucleus\(0.9,2\), nucleus\(0.9\) every 5"),
        ("sample-2(inf)", "temperature inf"),
        ("once(1e-320)", "temperature 1e-320: give 1e-6 to 1e6"),  # logits over it are infinite
        ("top-1 every 0", "every 0"),
        ("once every 2", "has no every"),
        ("top-1 without", "there is no routing 'top-1 without'"),
        ("oracle without 2", "give a strategy that asks the router"),
        ("top-1 null full without 2", "the null branch takes full, top-K"),
        ("top-1 null", "there is no routing 'top-1 null'"),
        ("null pretrain", "did you mean 'once null pretrain'"),
        ("top-1 null pretrian", "did you mean 'once null pretrain'"),
        ("once" + " null once" * 3_000, "there is no routing 'once null once null"),
        ("top-1 without " + "9" * 5_000, "there is no routing 'top-1 without 9999"),
    ],
)
def test_wrong_names_say_why(name: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=hint):
        Routing.named(name)


def test_settings_a_strategy_does_not_use_are_refused() -> None:
    for fields, message in (
        ({"strategy": "full", "temperature": 0.5}, "'full' has no temperature"),
        ({"strategy": "nucleus"}, "p = None"),
    ):
        with pytest.raises(ConfigError, match=message):
            Routing(**fields)


def test_how_many_experts_suffice() -> None:
    enough = {"top-3": 3, "once null top-2": 2, "top-3 null top-2": 3, "top-2 null top-3": 3}
    for name, least in enough.items():
        assert Routing.named(name).possible(least) and not Routing.named(name).possible(least - 1)
    assert Routing.named("sample-9 null sample-9").possible(1)
    assert weights("sample-9").sum() == pytest.approx(1)  # draws are with replacement
    few = "'top-5' with 4 experts: give k of at most 4"
    for name, words in (("top-5", few), ("top-4 without 0", "at most 3"), ("full without 0,1,2,3", "fewer")):
        with pytest.raises(ConfigError, match=words):
            weights(name)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("full", [0.5, 0.3, 0.15, 0.05]),
        ("top-1", [1, 0, 0, 0]),
        ("top-2", [0.625, 0.375, 0, 0]),
        ("top-4", [0.5, 0.3, 0.15, 0.05]),
        ("threshold(0.1)", [0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95, 0]),
        ("threshold(0.9)", [1, 0, 0, 0]),
    ],
)
def test_weights_without_draws(name: str, expected: list[float]) -> None:
    assert weights(name)[0].tolist() == pytest.approx(expected, rel=0, abs=1e-15)


@pytest.mark.parametrize(
    ("name", "u", "expected"),
    [
        ("once", [0.49], [1, 0, 0, 0]),
        ("once", [0.51], [0, 1, 0, 0]),
        ("once", [0.0], [1, 0, 0, 0]),
        ("once", [1 - 2**-53], [0, 0, 0, 1]),
        ("sample-4", [0.1, 0.2, 0.6, 0.96], [0.5, 0.25, 0, 0.25]),
        ("nucleus(0.7)", [0.624], [1, 0, 0, 0]),
        ("nucleus(0.7)", [0.626], [0, 1, 0, 0]),
        ("nucleus(0.7)", [0.999], [0, 1, 0, 0]),  # the third expert is not needed for 0.7 of the mass
        ("nucleus(0.5)", [0.999], [1, 0, 0, 0]),
        ("nucleus(1)", [0.96], [0, 0, 0, 1]),
    ],
)
def test_weights_with_given_draws(name: str, u: list[float], expected: list[float]) -> None:
    assert weights(name, u=u)[0].tolist() == expected


def test_temperature_divides_the_logits() -> None:
    sharp = P**2 / (P**2).sum()  # temperature 0.5
    edge = float(sharp[0, 0])
    for name in ("once(0.5)", "sample-1(0.5)", "nucleus(1, 0.5)"):
        assert weights(name, u=[edge - 1e-9])[0, 0] == 1
        assert weights(name, u=[edge + 1e-9])[0, 1] == 1


def test_oracle_follows_the_label() -> None:
    assert weights("oracle", P.expand(3, -1), labels=torch.tensor([2, 0, 3])).argmax(1).tolist() == [2, 0, 3]
    with pytest.raises(ConfigError, match="without cluster labels"):
        weights("oracle")
    for absent in (-1, 4):
        with pytest.raises(ConfigError, match=f"cluster {absent} has no expert"):
            weights("oracle", labels=torch.tensor([absent]))
    missing = torch.tensor([[0.5, 0.0, 0.5, 0.0]])
    with pytest.raises(ConfigError, match="cluster 3 has no expert"):
        weights("oracle", missing, labels=torch.tensor([3]))


@pytest.mark.parametrize("name", [n for n in CANONICAL if n != "oracle"])
@settings(max_examples=25, deadline=None, database=None, derandomize=True)
@given(data=st.data())
def test_rows_sum_to_one_and_missing_experts_get_nothing(name: str, data: st.DataObject) -> None:
    routing = Routing.named(name)
    logit = st.one_of(st.just(-math.inf), st.floats(-80, 80))
    row = st.lists(logit, min_size=4, max_size=4).filter(lambda r: max(r) > -math.inf)
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64]))
    logits = torch.tensor(data.draw(st.lists(row, min_size=1, max_size=4)), dtype=dtype)
    last = 1 - torch.finfo(dtype).eps / 2
    u = data.draw(st.lists(st.floats(0, last), min_size=routing.uniforms, max_size=4))
    u += [last] * (routing.uniforms - len(u))
    kept = logits.clone()
    w = route(routing, logits, torch.tensor(u, dtype=dtype).expand(len(logits), -1))
    assert w.dtype == dtype and w.shape == logits.shape
    assert (w >= 0).all()
    torch.testing.assert_close(
        w.sum(1), torch.ones(len(w), dtype=dtype), rtol=0, atol=4 * torch.finfo(dtype).eps
    )
    assert (w[logits == -math.inf] == 0).all()
    assert torch.equal(logits, kept)


def test_a_sample_does_not_see_its_batch() -> None:
    source = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 6, generator=source)  # B == K
    uniforms = torch.rand(6, 2, generator=source)
    for name in CANONICAL:
        routing, labels = Routing.named(name), torch.arange(6).flip(0)
        together = route(routing, logits, uniforms, labels)
        rows = [slice(i, i + 1) for i in range(6)]
        alone = torch.cat([route(routing, logits[r], uniforms[r], labels[r]) for r in rows])
        torch.testing.assert_close(together, alone, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", ["once", "sample-1", "sample-3", "nucleus(1)"])
def test_draws_follow_the_router(name: str) -> None:
    """Chi-square at significance 1e-3, 20,000 draws, fixed seed."""
    routing, n = Routing.named(name), 20_000
    uniforms = torch.rand(n, routing.uniforms, generator=torch.Generator().manual_seed(7))
    counts = route(routing, P.log().expand(n, -1), uniforms).sum(0) * routing.uniforms
    assert chisquare(counts.numpy(), (P[0] * n * routing.uniforms).numpy()).pvalue > 1e-3


def test_a_broken_router_is_not_hidden() -> None:
    logits = torch.tensor([[0.0, math.nan, 1.0], [0.0, 1.0, 2.0]])
    for name in CANONICAL:
        if name != "oracle":
            w = route(Routing.named(name), logits, torch.full((2, 3), 0.5))
            assert w[0].isnan().all() and w[1].sum() == 1, name
    half = route(Routing.named("full"), torch.zeros(1, 3, dtype=torch.bfloat16), torch.empty(1, 0))
    assert half.dtype == torch.float32 and float(half.sum()) == pytest.approx(1, abs=1e-7)
