"""Data sets of the hub, read by its own client from a server that lists, answers by half, and moves on."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import hub
from atoll.base.errors import DataError
from atoll.data.settings import RowOptions
from atoll.data.sources.hub import open_hub, parse_name
from helpers import ROOT
from helpers_data import encoded

FIRST, SECOND = "1" * 40, "2" * 40
READ = """
import json, logging, sys
from atoll.base.errors import AtollError
from atoll.data.sources.hub import open_hub
from atoll.data.settings import RowOptions
logging.getLogger("atoll").setLevel("INFO")
logging.basicConfig()
for name in sys.argv[1:]:
    try:
        source = open_hub(name, RowOptions())
        rows = [(row.caption, len(row.image)) for row in source.records(0, len(source))]
        print(json.dumps([source.describe(), rows]))
    except AtollError as error:
        print(json.dumps(str(error)))
"""


def parquet(folder: Path, first: int, count: int) -> bytes:
    numbers = range(first, first + count)
    images = [{"bytes": encoded(size=(64, 64), seed=n)} for n in numbers]
    table = pa.table({"image": images, "text": [f"picture {n}" for n in numbers]})
    pq.write_table(table, folder / "x.parquet", row_group_size=10)
    return (folder / "x.parquet").read_bytes()


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("hf://datasets/a/b@main", ("a/b", "main", None, "train")),
        ("hf://datasets/a/b.c@refs/pr/1?split=test", ("a/b.c", "refs/pr/1", None, "test")),
        ("hf://datasets/a/b@v1?config=full", ("a/b", "v1", "full", "train")),
        ("hf:///some/folder", ("/some/folder", None, None, "train")),
    ],
)
def test_names(text: str, parsed: tuple) -> None:
    assert parse_name(text) == parsed


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("hf://datasets/a/b", r"names no revision: write hf://datasets/a/b@COMMIT"),
        ("hf://a/b@main", "names no data set of the hub"),
        ("hf://datasets/../b@main?", "cannot look up"),
        ("hf://datasets/a/b/c@main", "names no data set of the hub"),
        ("hf://datasets/a/b@main?splt=x", "has the option 'splt'"),
        ("hf:///nowhere/at/all", "there is no folder"),
    ],
)
def test_names_that_are_none(text: str, words: str) -> None:
    with pytest.raises(DataError, match=words):
        open_hub(text, RowOptions())


def test_pickle_and_unknown_kinds_are_refused_before_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    marker = tmp_path / "ran"
    (tmp_path / "d").mkdir()
    (tmp_path / "d/train.pkl").write_bytes(f"cpathlib\nPath\n(S'{marker}'\ntR.".encode())
    refused = {"train.pkl": "cannot open", "d.py": "cannot open", "a.csv": "of the kind 'csv'"}
    for name, words in refused.items():
        next((tmp_path / "d").iterdir()).rename(tmp_path / "d" / name)
        with pytest.raises(DataError, match=words):
            open_hub(f"hf://{tmp_path}/d", RowOptions())
    assert not marker.exists()


def test_an_arrow_file_cannot_name_files_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "secret.png").write_bytes(encoded())
    (tmp_path / "d").mkdir()
    (tmp_path / "d/own.png").write_bytes(encoded(seed=1))
    paths = ["/etc/hostname", str(tmp_path / "secret.png"), str(tmp_path / "d/../secret.png")]
    paths += [str(tmp_path / "d/own.png"), str(tmp_path / "d/gone.png")]
    table = pa.table({"image": [{"bytes": None, "path": path} for path in paths], "text": ["x"] * 5})
    with (
        pa.OSFile(str(tmp_path / "d/a.arrow"), "wb") as file,
        pa.ipc.new_stream(file, table.schema) as writer,
    ):
        writer.write_table(table)
    found = list(open_hub(f"hf://{tmp_path}/d", RowOptions()).records(0, 5))
    assert [getattr(item, "reason", "") for item in found] == ["unsafe path"] * 3 + ["", "too large"]


@pytest.mark.slow
def test_the_hub(tmp_path: Path) -> None:
    """A branch is told by its commit; that commit stays what it is; half answers are asked for again."""
    tree = {"train-0.parquet": parquet(tmp_path, 0, 30), "train-1.parquet": parquet(tmp_path, 30, 9)}
    moved = {"train-0.parquet": parquet(tmp_path, 50, 3)}
    names = ["main", FIRST, SECOND, "3" * 40, "main?split=test"]
    with hub.serve({FIRST: tree, SECOND: moved}, FIRST) as served:
        served.torn = 3
        places = {"HF_ENDPOINT": served.url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
        done = subprocess.run(
            [sys.executable, "-c", READ, *(f"hf://datasets/{hub.NAME}@{name}" for name in names)],
            env={**os.environ, **places, "PYTHONPATH": str(ROOT / "src")},
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith(("[", '"'))]
    (main, rows), (pinned, same), (later, few), missing, split = lines
    assert rows == same and [caption for caption, _ in rows] == [f"picture {n}" for n in range(39)]
    assert main == pinned and main["commit"] == FIRST and main["name"] == f"hub {hub.NAME}@{FIRST}"
    assert later["fingerprint"] != main["fingerprint"] and len(few) == 3
    assert f"{hub.NAME}@main is now the commit {FIRST}" in done.stdout + done.stderr
    assert (
        "datasets cannot open" in missing
        and "has no split 'test': write ?split=NAME with one of: train" in split
    )
    assert len(served.asked) > 6
