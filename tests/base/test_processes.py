"""What processes tell each other, with two real ones."""

import socket
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from atoll.base.processes import ProcessGroup

TENSORS = {
    "weights": torch.arange(6.0).view(2, 3),
    "step": torch.tensor(7),
    "half": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "turned": torch.arange(6.0).view(2, 3).T,
}


def receive(rank: int, port: int, folder: str) -> None:
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    group = ProcessGroup(rank, 2)
    torch.save(dict(group.spread(TENSORS if rank == 0 else {})), Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


def test_tensors_of_rank_0_reach_every_process(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    spawn(receive, (port, str(tmp_path)), nprocs=2)
    for rank in (0, 1):
        received = torch.load(tmp_path / f"{rank}.pt")
        assert list(received) == list(TENSORS)
        for name, value in TENSORS.items():
            assert received[name].dtype == value.dtype and torch.equal(received[name], value)


@pytest.mark.parametrize("tensors", [TENSORS, {}], ids=["some", "none"])
def test_one_process_keeps_its_own(tensors: dict[str, torch.Tensor]) -> None:
    assert dict(ProcessGroup().spread(tensors)) == tensors
