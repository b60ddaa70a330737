"""How many threads torch gets."""

import os
import subprocess
import sys

import pytest
import torch

from atoll.base.cores import cores
from atoll.base.device import using_threads


@pytest.mark.parametrize("told", ["", "3,2", "none", "²", "0"])
@pytest.mark.parametrize("processes", [1, 10_000])
@pytest.mark.parametrize("count", [0, 5])
def test_what_is_asked_for_comes_before_what_the_environment_says(
    told: str, processes: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", told)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    before = torch.get_num_threads()
    with using_threads(count):
        by_default = 3 if told == "3,2" else cores() if processes == 1 else 1
        assert torch.get_num_threads() == (count or by_default)
    assert torch.get_num_threads() == before


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="cores are not bound on this system")
def test_a_process_bound_to_a_core_counts_one() -> None:
    bound = f"import os; os.sched_setaffinity(0, {{{min(os.sched_getaffinity(0))}}})"
    code = f"{bound}; from atoll.base.cores import cores; print(cores())"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "1"
