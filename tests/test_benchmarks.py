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
