"""What processes tell each other, with two real ones."""

import socket
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from atoll.base.errors import DataError
from atoll.base.processes import ProcessGroup

LIMIT = 2.0
TENSORS = {
    "weights": torch.arange(6.0).view(2, 3),
    "step": torch.tensor(7),
    "half": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "turned": torch.arange(6.0).view(2, 3).T,
}


def talk(rank: int, port: int, folder: str) -> None:
    dist.init_process_group(
        "gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2, timeout=timedelta(seconds=LIMIT)
    )
    group = ProcessGroup(rank, 2, limit=LIMIT)
    for source in (0, 1):
        received = dict(group.spread(TENSORS if rank == source else {}, source))
        torch.save(received, Path(folder) / f"{source}-{rank}.pt")
    assert group.each(lambda: {"rank": rank}) == [{"rank": 0}, {"rank": 1}]
    assert group.once(lambda: f"of {rank}") == "of 0"

    def slow() -> int:
        time.sleep(LIMIT * 1.5 * rank)  # longer than a collective lasts
        return rank

    assert group.each(slow) == [0, 1]

    def fails() -> int:
        if rank:
            raise DataError("no rows")
        return rank

    with pytest.raises(DataError if rank else SystemExit, match="no rows" if rank else "2"):
        group.each(fails)
    dist.destroy_process_group()


def test_two_processes_tell_each_other(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    spawn(talk, (port, str(tmp_path)), nprocs=2)
    for file in ("0-0", "0-1", "1-0", "1-1"):
        received = torch.load(tmp_path / f"{file}.pt")
        assert list(received) == list(TENSORS)
        for name, value in TENSORS.items():
            assert received[name].dtype == value.dtype and torch.equal(received[name], value)


@pytest.mark.parametrize("tensors", [TENSORS, {}], ids=["some", "none"])
def test_one_process_keeps_its_own(tensors: dict[str, torch.Tensor]) -> None:
    assert dict(ProcessGroup().spread(tensors)) == tensors
