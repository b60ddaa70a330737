"""A run leaves whatever the thread that makes its data is doing."""

import subprocess
import sys

from helpers import environment

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
    done = subprocess.run(
        [sys.executable, "-c", NEVER_READY], env=environment(), capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (75, "left\n", "")
