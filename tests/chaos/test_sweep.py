"""Some kills of `sweep.py`, which is run by hand for a thousand."""

from pathlib import Path

import pytest

from chaos.sweep import STAGES, sweep

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_every_stage_killed_at_random_moments_ends_in_the_same_bytes(tmp_path: Path) -> None:
    kills, differences, _ = sweep(tmp_path, kills=30, seed=1, seconds=180)
    assert kills.total() >= 15 and len(kills) > len(STAGES) / 2
    assert differences == []
