"""A run leaves whatever the thread that makes its data is doing."""

from concurrent.futures import ThreadPoolExecutor

from atoll.base import preemption
from helpers import python

NEVER_READY = """
import torch
from atoll.base import preemption
from atoll.train import rows

def make(begin):
    while True:
        torch.ones(64, 64) @ torch.ones(64, 64)

rows.PATIENCE = 0.5
with rows.Prefetcher(make, 0, 4, limit=60) as data:
    assert data.next([1]) is None
print("left")
preemption.exit_process(75)
"""


def test_data_that_is_never_ready_does_not_change_the_exit_code() -> None:
    said = (process := python("-c", NEVER_READY)).communicate(timeout=60)
    assert (process.returncode, *said) == (75, "left\n", "")


def test_a_thread_that_trains_hears_no_signal_and_does_not_fail_for_it() -> None:
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(preemption.catch_signals().__enter__).result() == []
