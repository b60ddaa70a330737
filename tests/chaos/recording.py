"""`python -m atoll`, and a record of what every sample of every step brought.

Each process appends lines to `$ATOLL_RECORD/NAME-RANK.jsonl`: the positions of a micro-batch that went
through the network, and a hash for each of its samples of row, condition, noise and time. With the name
`stalls-RANK`, the data of that rank stop coming after some steps.
"""

import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

import torch

from atoll.cli import main as cli
from atoll.train.rows import Batch
from atoll.train.tasks import DenoiserTask

batch, step = DenoiserTask.batch, DenoiserTask.step


def _batch(self: DenoiserTask, positions: range) -> Batch:
    if os.environ["ATOLL_NAME"] == f"stalls-{os.environ.get('RANK')}" and positions[0] > 100:
        time.sleep(60)
    made = batch(self, positions)
    object.__setattr__(made, "positions", positions)
    return made


def _step(self: DenoiserTask, made: Batch) -> Any:
    time.sleep(0.03)  # a run must not be over before whoever kills it comes
    result = step(self, made)
    positions = made.positions  # type: ignore[attr-defined]
    labels = made.cond.labels
    assert labels is not None
    columns = [made.x0, made.eps, made.t, labels]
    hashes = [
        hashlib.sha256(b"".join(c[i].contiguous().numpy().tobytes() for c in columns)).hexdigest()[:16]
        for i in range(len(positions))
    ]
    line = {"first": positions[0], "hashes": hashes, "grad": torch.is_grad_enabled()}
    path = (
        Path(os.environ["ATOLL_RECORD"]) / f"{os.environ['ATOLL_NAME']}-{os.environ.get('RANK', '0')}.jsonl"
    )
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")
    return result


DenoiserTask.batch, DenoiserTask.step = _batch, _step  # type: ignore[method-assign]

if __name__ == "__main__":
    cli.main()
