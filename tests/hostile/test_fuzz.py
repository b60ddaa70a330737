"""Mutations of everything that is read, a bounded number of them; `fuzz.py` runs any number."""

import json
from pathlib import Path
from random import Random

import pytest

from hostile.arena import Outcome
from hostile.fuzz import READERS, Fuzzer, cause, fuzz, mutable
from hostile.mutate import agree, bytes_of, mutated, places, structure
from nursery import Nursery


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_mutated_files_end_in_one_line(templates: dict[str, Path], nursery: Nursery, tmp_path: Path) -> None:
    fuzzer = Fuzzer(1, mutable(templates, tmp_path), nursery, tmp_path / "scratch")
    found = fuzz(range(100), fuzzer, seconds=240)
    assert len(found) > 40
    assert [f"{one.number}: {one.cause}: {one.mutation}" for one in found if one.cause is not None] == []


def test_a_reader_that_raises_is_found_by_the_same_mutations_of_a_seed(
    nursery: Nursery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    campaign = tmp_path / "campaign"
    campaign.mkdir()
    (campaign / "campaign.yaml").write_text("data: {source: glyphs}\n")
    monkeypatch.setitem(READERS, "campaign/campaign.*", ["planted"])
    fuzzer = Fuzzer(0, {"campaign": campaign}, nursery, tmp_path / "scratch")
    found, again = ([fuzzer.run(number) for number in range(3)] for _ in range(2))
    assert all("LookupError" in str(one.cause) and "believed" in str(one.cause) for one in found), found
    assert all(one.mutation.startswith("campaign/campaign.yaml: ") for one in found)
    assert [one.mutation for one in found] == [one.mutation for one in again], "not repeatable"


def test_what_is_wrong_with_an_end_is_named(tmp_path: Path) -> None:
    trace = tmp_path / "x.traceback"
    trace.write_text('File "/x/src/atoll/data/a.py", line 7, in f\nKeyError: 123')
    line = f"error: KeyError (traceback: {trace})"
    assert cause(Outcome(1, line, [], [])) == "KeyError: N at atoll/data/a.py:7"
    assert cause(Outcome(None, "", [], [])) == "hang"
    assert cause(Outcome(2, "error: wrong: mend it", [], [])) is None
    assert "pickle" in str(cause(Outcome(0, "", ["torch.load pickle"], [])))
    assert "beside" in str(cause(Outcome(0, "", [], ["beside.txt"])))
    assert cause(Outcome(-6, "", [], [])) is not None


def test_mutations_change_what_they_say() -> None:
    tree = {"a": [1, 2, {"b": "text"}], "c": 0.5}
    assert ("a", 2, "b") in places(tree)
    assert sum(structure(json.loads(json.dumps(tree)), Random(n))[0] != tree for n in range(200)) > 150
    assert sum(bytes_of(b"0123456789" * 9, Random(n))[0] != b"0123456789" * 9 for n in range(100)) > 90


def test_a_forger_makes_digests_agree(tmp_path: Path) -> None:
    part = tmp_path / "experts/0"
    part.mkdir(parents=True)
    (part / "config.json").write_text('{"a": 2}')
    (part / "card.json").write_text('{"config_sha256": "old"}')
    entries = [
        {"path": f"experts/0/{name}", "bytes": 0, "sha256": ""} for name in ("config.json", "card.json")
    ]
    (tmp_path / "ensemble.json").write_text(json.dumps({"files": entries}))
    agree(tmp_path, part / "config.json")
    files = json.loads((tmp_path / "ensemble.json").read_text())["files"]
    assert all(entry["bytes"] == (tmp_path / entry["path"]).stat().st_size for entry in files)
    assert json.loads((part / "card.json").read_text())["config_sha256"] != "old"
    assert mutated(part / "card.json", Random(3))[0] != (part / "card.json").read_bytes()


@pytest.mark.parametrize("value", [[[1]], {"a": {"b": 1}}, "x", None])
def test_a_forger_lists_a_file_whose_digest_is_of_another_type(tmp_path: Path, value: object) -> None:
    (tmp_path / "a.bin").write_bytes(b"abc")
    entry = {"path": "a.bin", "sha256": value, "bytes": value}
    (tmp_path / "manifest.json").write_text(json.dumps({"files": [entry, entry]}))
    agree(tmp_path, tmp_path / "a.bin")
    files = json.loads((tmp_path / "manifest.json").read_text())["files"]
    assert [entry["bytes"] for entry in files] == [3, 3]
