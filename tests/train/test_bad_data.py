"""Data that cannot be trained on end a run in one line, and what was mended can be trained on."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from atoll.data.dataset import DataSet
from atoll.store.store import Store
from helpers import Run, refused

CHANGES = {"budget": {"samples": 320}, "train": {"log_every": 1, "guard": {"patience": 4}}}


def spoil(folder: Path, count: int) -> None:
    """Put numbers that are none into some training rows of expert 0."""
    dataset = DataSet.open(Store.open(folder / "islands/0"), "data")
    values = dataset.column("latents").read(range(len(dataset)))
    rows = [dataset.bounds[i : i + 2].tolist() for i in range(len(dataset.shards))]
    values[dataset.split("train")[:count]] = torch.nan
    dataset.write_column(
        "latents", {"name": "none", "hash": "nan"}, lambda s: {"values": values[slice(*rows[s])]}
    )


def test_steps_with_a_bad_row_are_left_out_and_counted(run: Run, copy: Path) -> None:
    spoil(copy, 1)
    said = run("train", "expert", copy, "--expert", "0")
    assert said.code == 0
    left_out = said.out.count("skipped (bound")
    assert 1 < left_out < 8
    lines = [json.loads(line) for line in (copy / "islands/0/run/metrics.jsonl").read_text().splitlines()]
    assert [line["skipped"] for line in lines if "skipped" in line][-1] == left_out
    weights = load_file(copy / "islands/0/expert/diffusion_pytorch_model.safetensors")
    assert all(bool(weight.isfinite().all()) for weight in weights.values())


def test_bad_rows_everywhere_end_the_run_in_one_line(run: Run, copy: Path) -> None:
    spoil(copy, 30)
    said = run("train", "expert", copy, "--expert", "0")
    refused(said, "loss nan", "expert 0", "the last 4 steps were skipped", "atoll data audit")
    assert not (copy / "islands/0/expert").exists()


def test_a_torn_column_ends_the_run_in_one_line(run: Run, copy: Path) -> None:
    path = next((copy / "islands/0/data/columns/latents").glob("*.safetensors"))
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])
    refused(run("train", "expert", copy, "--expert", "0"), path.name, "it is torn")
    path.write_bytes(whole)
    assert run("train", "expert", copy, "--expert", "0").code == 0


def test_a_column_that_no_card_could_name_is_refused_before_the_first_step(run: Run, copy: Path) -> None:
    path = copy / "islands/0/data/columns/latents/column.json"
    column = json.loads(path.read_bytes())
    whole = dict(column["producer"])
    for producer in ({"name": whole["name"]}, {**whole, "hash": 7}, {**whole, "shift": "far"}):
        path.write_text(json.dumps({**column, "producer": producer}))
        refused(run("train", "expert", copy, "--expert", "0"), "the column latents", "write the column again")
        assert not (copy / "islands/0/run/metrics.jsonl").exists()
        assert not (copy / "islands/0/expert").exists()
