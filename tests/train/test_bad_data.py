"""Data that cannot be trained on end a run in one line, and what was mended can be trained on."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from atoll.data.columns import write_column
from atoll.data.dataset import DataSet
from atoll.store.store import Store
from helpers import Answer, command, partitioned, refused

Run = Callable[..., Answer]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    return lambda *argv: command(capsys, *argv)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    partitioned(tmp_path / "campaign", {"budget": {"samples": 320}})
    return tmp_path / "campaign"


def test_numbers_that_are_none_end_the_run_in_one_line(run: Run, copy: Path) -> None:
    dataset = DataSet.open(Store.open(copy / "islands/0"), "data")
    values = dataset.column("latents").read(range(len(dataset)))
    rows = [dataset.bounds[i : i + 2].tolist() for i in range(len(dataset.shards))]
    values[dataset.split("train")[3]] = torch.nan
    write_column(
        dataset, "latents", {"name": "none", "hash": "nan"}, lambda s: {"values": values[slice(*rows[s])]}
    )
    line = refused(run("train", "expert", copy, "--island", "0"), "loss nan", "island 0", "at step")
    assert "atoll data audit" in line
    assert not (copy / "islands/0/expert").exists()


def test_a_torn_column_ends_the_run_in_one_line(run: Run, copy: Path) -> None:
    path = next((copy / "islands/0/data/columns/latents").glob("*.safetensors"))
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])
    refused(run("train", "expert", copy, "--island", "0"), path.name, "it is torn")
    path.write_bytes(whole)
    assert run("train", "expert", copy, "--island", "0").code == 0
