"""`atoll concepts fit` on tables: joins, choices, and what cannot be joined."""

import json
from pathlib import Path

import pytest

from helpers import command, refused


def write(folder: Path, name: str, text: str) -> Path:
    (folder / name).write_text(text)
    return folder / name


COUNTS = "concept,set,count\nHot_Dog,a,10\ncat,a,100\nbird,a,1000\nbird,b,5\nfish,a,10000\n"
RESULTS = "concept,set,score\nhot dog,a,1\ncats,a,9\ncat,a,2\nBIRD,a,3\nbird,b,0\nfish,a,4\n"


def test_tables_are_joined_by_concept_and_common_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    counts, results = write(tmp_path, "c.csv", COUNTS), write(tmp_path, "r.csv", RESULTS)
    argv = ["concepts", "fit", "--counts", counts, "--results", results, "--out", tmp_path]
    answer = command(capsys, *argv, "--where", "set=a")
    assert answer.code == 0 and "4 concepts; 1 results have no count" in answer.out
    fit = json.loads((tmp_path / "reports/concepts/fit.json").read_text())
    assert fit["slope"][0] == pytest.approx(1) and fit["pearson"][0] == pytest.approx(1)
    assert command(capsys, *argv).code == 0
    assert json.loads((tmp_path / "reports/concepts/fit.json").read_text())["concepts"] == 5
    refused(command(capsys, *argv, "--where", "set=b"), "1 concepts", "three or more")
    refused(command(capsys, *argv, "--where", "sett=b"), "neither table has 'sett'", "set")
    refused(command(capsys, *argv, "--where", "set"), "COLUMN=VALUE")
    refused(command(capsys, *argv, "--count", "size"), "no numbers 'size'", "count")


def test_a_concept_twice_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    counts = write(tmp_path, "c.csv", COUNTS + "BIRD,a,7\n")
    results = write(tmp_path, "r.csv", RESULTS)
    argv = ["concepts", "fit", "--counts", counts, "--results", results, "--out", tmp_path]
    refused(command(capsys, *argv), "bird / a stands twice", "1000 and 7")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("name,count\ncat,1\n", ["no column 'concept'"]),
        ("concept,count,size\ncat,1,2\n", ["2 columns of numbers", "count, size"]),
        ("concept,kind\ncat,x\n", ["0 columns of numbers"]),
        ("", ["no parquet"]),
    ],
)
def test_tables_that_are_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, words: list[str]
):
    counts, results = write(tmp_path, "c.csv", text), write(tmp_path, "r.csv", RESULTS)
    argv = ["concepts", "fit", "--counts", counts, "--results", results, "--out", tmp_path]
    refused(command(capsys, *argv), *words)
