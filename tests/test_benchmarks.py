"""The benchmarks measure what they say; how fast anything is depends on the machine and is no test."""

import sys
from pathlib import Path
from typing import Any

import pytest

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
def evaluate(monkeypatch: pytest.MonkeyPatch) -> Any:
    """benchmarks/evaluate.py, with the environment as it was after it."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.setenv(name, "1")
    import evaluate

    yield evaluate
    for name in ("evaluate", "harness"):
        sys.modules.pop(name, None)


@pytest.mark.filterwarnings("ignore:Metric `Kernel Inception Distance` will save")
def test_both_sides_of_the_evaluation_benchmark_find_the_same(evaluate: Any) -> None:
    """KID's subsets are drawn, so that it is the same where a subset is everything."""
    setting = evaluate.Setting(count=120, width=6, batch=20, subsets=2, subset=120, neighbours=60)
    features = evaluate.Features(setting)
    found = {name: turn(features) for name, turn in evaluate.TURNS.items()}
    assert found["Fréchet"] == pytest.approx(found["Fréchet, torchmetrics"], rel=1e-9)
    assert found["KID"] == pytest.approx(evaluate.their_kid(features), rel=1e-9)
    assert found["Fréchet"] > 0 and 0 < found["neighbours"] < 2
    rows = list(evaluate.times(setting, 1))
    assert [line["target"] for line in rows if line["target"]] == [
        {"op": "<=", "value": 1.0},
        {"op": "<=", "value": 1e-4},
        {"op": "<=", "value": 1.0},
    ]


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
