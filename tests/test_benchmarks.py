"""The benchmarks measure what they say; how fast anything is depends on the machine and is no test."""

import sys
from pathlib import Path
from typing import Any

import pytest
from scipy.stats import t as student

from atoll.train import loop

ROOT = Path(__file__).resolve().parents[1]
TINY = {"depth": 1, "heads": 1, "head_width": 8, "latents": 4, "batch": 2, "pairs": 2, "threads": 1}


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> Any:
    """benchmarks/training.py."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.setattr(loop, "Ema", loop.Ema)  # one variant replaces it
    import training

    yield training
    for name in ("training", "harness"):
        sys.modules.pop(name, None)


@pytest.fixture
def sampling(monkeypatch: pytest.MonkeyPatch) -> Any:
    """benchmarks/sampling.py."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import sampling

    yield sampling
    for name in ("sampling", "harness"):
        sys.modules.pop(name, None)


@pytest.fixture
def campaigns(monkeypatch: pytest.MonkeyPatch) -> Any:
    """benchmarks/campaigns.py."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import campaigns

    yield campaigns
    for name in ("campaigns", "harness"):
        sys.modules.pop(name, None)


def test_campaigns_are_held_against_their_own_monolith(campaigns: Any) -> None:
    found = [
        {
            "rows": [
                {"name": "monolith", "distance": m, "router_share": 0.0},
                {"name": "commit", "distance": d},
            ]
        }
        for m, d in ((10.0, 8.0), (20.0, 19.0), (40.0, 40.0))
    ]
    lines = {(line["case"], line["metric"]): line for line in campaigns.table(found, "monolith")}
    ratio = lines["commit", "distance / monolith"]
    assert (ratio["value"], ratio["spread"]) == (0.95, [0.8, 1.0])
    apart = lines["commit", "distance - monolith, 95 %"]
    half = 4.302653 / 3**0.5  # Student's t of two degrees of freedom; the differences' deviation is 1
    assert apart["value"] == -1.0 and apart["spread"] == pytest.approx([-1 - half, -1 + half], abs=1e-5)


@pytest.fixture
def distill(monkeypatch: pytest.MonkeyPatch) -> Any:
    """benchmarks/distill.py."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import distill

    yield distill
    for name in ("distill", "harness"):
        sys.modules.pop(name, None)


def test_the_distillation_benchmark_pairs_by_campaign(distill: Any, tmp_path: Path) -> None:
    """Three campaigns whose levels differ far more than student and monolith do within each."""
    import json

    folders = []
    for number, (base, more) in enumerate([(5.0, 0.1), (9.0, 0.2), (2.0, 0.3)]):
        rows = [("monolith", base), ("student", base + more), ("commit", base - 1)]
        content = {
            "metric": {"name": "x"},
            "default": "commit",
            "rows": [{"name": name, "distance": value} for name, value in rows],
            "train_flops": {"monolith": 3.0, "student": 1.0},
        }
        (tmp_path / str(number) / "reports").mkdir(parents=True)
        (tmp_path / str(number) / "reports/compare.json").write_text(json.dumps(content))
        folders.append(tmp_path / str(number))
    found = [distill.read(folder) for folder in folders]
    lines = {(line["case"], line["metric"]): line for line in distill.table(found, found)}
    made = lines["student", "distance - monolith's"]
    half = 4.302653 * 0.1 / 3**0.5
    assert made["value"] == pytest.approx(0.2) and made["spread"] == pytest.approx([0.2 - half, 0.2 + half])
    assert lines["student", "lower end of the difference"]["met"] is True
    assert lines["student", "FLOPs / monolith's"]["value"] == pytest.approx(1 / 3)
    assert lines["ensemble", "distance - monolith's"]["spread"] == pytest.approx([-1.0, -1.0])
    assert lines["student", "distance - monolith at a third's"]["value"] == pytest.approx(0.2)
    with pytest.raises(SystemExit, match="has not been compared"):
        distill.read(tmp_path)


@pytest.fixture
def mixed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """benchmarks/mixed.py."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import mixed

    yield mixed
    for name in ("mixed", "quickstart", "harness"):
        sys.modules.pop(name, None)


def summed_up(distance: float, experts: float = 100.0) -> dict[str, Any]:
    return {"distance": {"commit": distance}, "train_flops": {"experts": experts, "router": 4.0}}


def test_mixed_pairs_are_compared_seed_by_seed(mixed: Any) -> None:
    pairs = [
        (summed_up(2.0), summed_up(1.0)),
        (summed_up(8.0), summed_up(8.0)),
        (summed_up(1.0), summed_up(2.0)),
    ]
    rows = mixed.table(pairs)
    cost, ratio, interval = rows[:3]
    assert cost["value"] == 0 and cost["met"]
    assert ratio["value"] == 1.0 and ratio["spread"] == [0.5, 2.0]
    assert interval["value"] == pytest.approx(1.0)
    assert interval["spread"][1] == pytest.approx(2 ** (student.ppf(0.975, 2) / 3**0.5), rel=1e-3)
    assert not mixed.table([(summed_up(1.0), summed_up(1.0, experts=110.0))])[0]["met"]


@pytest.mark.slow
@pytest.mark.parametrize("variant", [{}, {"average": False}, {"recompute": True}])
def test_every_turn_of_the_training_loop_writes_one_checkpoint(
    training: Any, variant: dict[str, Any]
) -> None:
    found = training.measure(**TINY, **variant)
    assert found["checkpoints"] == 1.0
    assert len(found["whole"]) == len(found["bare"]) == 2
    assert min(found["whole"] + found["bare"]) > 0
    ratio = training.ratio_rows("tiny", found)[0]
    assert ratio["target"] == {"op": "<=", "value": 1.05}
    assert ratio["met"] is (ratio["value"] <= 1.05)


def test_the_bare_loop_takes_the_very_step_of_the_whole_loop(training: Any, tmp_path: Path) -> None:
    """Without clipping, both lose the same on the same batch: nothing that costs time was left out."""
    import torch

    from atoll.networks.families import NetworkConfig
    from atoll.store.store import Store
    from atoll.train.settings import TrainConfig

    settings = NetworkConfig(family="dit", patch=2, depth=1, heads=1, head_width=8)
    dataset = training.synthetic(Store.open(tmp_path), 4)
    make = training.maker(settings, TrainConfig(batch=8, threads=1), dataset, 100)
    (one, _), (other, _) = make(), make()
    batch = one.batch(range(8))
    optimizers = [torch.optim.AdamW(t.network.parameters(), lr=1e-3, fused=True) for t in (one, other)]
    training.bare_step(one.network, optimizers[0], batch)
    other.step(batch)[0].backward()
    optimizers[1].step()
    pairs = zip(one.network.parameters(), other.network.parameters(), strict=True)
    for bare, whole in pairs:
        torch.testing.assert_close(bare.grad, whole.grad, rtol=1e-4, atol=1e-7)
        torch.testing.assert_close(bare, whole, rtol=1e-4, atol=1e-6)


def test_the_sampling_benchmark_counts_what_each_strategy_does(sampling: Any) -> None:
    setting = sampling.Setting("nano", 4, 4, 2, depth=1, router_depth=1, router_heads=1, router_width=8, k=4)
    rows = {line["metric"]: line for line in sampling.against_monolith("tiny", setting, 1)}
    router = rows["router / expert, operations"]["value"]
    cost = {name: rows[f"{name} / monolith, operations"]["value"] for name in sampling.TARGETS}
    # Two steps of two branches; the router sees one branch at every step (commit: one; full: both).
    expected = {
        "top-1": 1 + router / 2,
        "commit": 1 + router / 4,
        "top-2": 2 + router / 2,
        "full": 4 + router,
    }
    assert cost == pytest.approx(expected)
    for name, bound in sampling.TARGETS.items():
        line = rows[f"{name} / monolith, time"]
        assert line["target"] == {"op": "<=", "value": bound} and line["met"] is (line["value"] <= bound)
    shares = [rows[f"router's share, {name}, 50 steps"]["value"] for name in sampling.SHARES]
    assert shares[0] == pytest.approx(router / (router + 2)) and shares == sorted(shares, reverse=True)


@pytest.mark.slow
def test_the_sampling_benchmark_measures_memory_and_loads(sampling: Any) -> None:
    setting = sampling.Setting("S", 4, 4, 2, depth=2, router_depth=1, router_heads=1, router_width=8, k=4)
    rows = {line["metric"]: line for line in sampling.one_resident("tiny", setting, 1, 1)}
    for routing in ("top-1", "commit"):
        line = rows[f"{routing}: (peak - monolith's) / expert"]
        assert line["target"] == {"op": "<=", "value": 1.0}
        assert -1 < line["value"] < 4
    assert 1 <= rows["commit: experts brought, a turn"]["value"] <= setting.k
