"""Runs that leave and go on, and runs elsewhere: the bits are as if nothing had happened (kills: `chaos`)."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import atoll
from atoll.base.errors import StoreError
from atoll.campaign.folder import Campaign
from atoll.train.run import train_run
from helpers import environment, metrics, newest_checkpoint, same_bits

OFTEN = {"validations": 5, "log_every": 7}
CHANGES = {
    "budget": {"samples": 3200},
    "train": OFTEN,
    "router": {"share": 0.15, "depth": 2, "train": {**OFTEN, "batch": 8}},
    "partition": {"k": 2},
}
RUNS: dict[str, tuple] = {"islands/0": ("expert", 0), "router": ("router",)}  # type: ignore[type-arg]


@pytest.fixture(scope="module")
def reference(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same campaign with expert 0 and the router trained without interruption."""
    folder = Path(shutil.copytree(made, tmp_path_factory.mktemp("reference") / "campaign"))
    for run in RUNS:
        train(folder, run)
    return folder


def train(folder: Path, run: str = "islands/0") -> None:
    train_run(Campaign.open(folder), *RUNS[run])


@pytest.mark.parametrize("run", RUNS)
def test_a_run_that_is_told_to_leave_saves_its_state_and_goes_on(
    run: str, copy: Path, reference: Path, told_to_leave: Callable[[int], None], capsys
) -> None:
    told_to_leave(12)
    with pytest.raises(KeyboardInterrupt, match="left at step 12 of"):  # as scripts and notebooks see it
        atoll.fit(copy, *RUNS[run])
    assert json.loads((newest_checkpoint(copy / run) / "COMMIT.json").read_text())["step"] == 12
    assert not (copy / run / "expert/card.json").exists()
    path = copy / run / "run/metrics.jsonl"
    lines = path.read_bytes()
    path.unlink()
    path.mkdir()
    with pytest.raises(StoreError, match=r"metrics\.jsonl"):  # the next save would write over what it holds
        train(copy, run)
    path.rmdir()
    path.write_bytes(b"\xff\xfe{\n[1]\n{}\n" + lines)
    train(copy, run)
    out = capsys.readouterr().out
    assert "resumed at step 12 of" in out
    assert out.count("a damaged line of metrics.jsonl is left out") == 3
    assert same_bits(copy / run, reference / run) and metrics(copy / run) == metrics(reference / run)
    cards = [json.loads((folder / run / "expert/card.json").read_text()) for folder in (copy, reference)]
    for card in cards:
        del card["provenance"]["seconds"]
    assert cards[0] == cards[1]


def test_a_finished_run_says_so_and_changes_nothing(reference: Path, capsys) -> None:
    run = reference / "islands/0"
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    train(reference)
    assert capsys.readouterr().out == "expert 0: finished already\n"
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


def test_the_same_bits_are_not_seen_where_they_differ(reference: Path, copy: Path) -> None:
    """The comparison that the other tests rest on does tell runs apart."""
    path = copy / "islands/0/island.json"
    changed = json.loads(path.read_text())
    path.write_text(json.dumps({**changed, "seed": changed["seed"] + 1}))
    train(copy)
    assert not same_bits(copy / "islands/0", reference / "islands/0")


# Isolation.


def alone(made: Path, folder: Path) -> Path:
    """All that an island is given: `campaign.json` and its own folder."""
    shutil.copytree(made / "islands/0", folder / "islands/0")
    shutil.copy(made / "campaign.json", folder)
    return folder


def test_an_island_needs_its_own_folder_and_campaign_json_only(
    made: Path, reference: Path, tmp_path: Path
) -> None:
    folder = alone(made, tmp_path / "elsewhere")
    train(folder)
    assert same_bits(folder / "islands/0", reference / "islands/0")
    assert sorted(path.name for path in folder.iterdir()) == ["campaign.json", "islands"]
    assert sorted(path.name for path in (folder / "islands").iterdir()) == ["0"]


@pytest.mark.slow
def test_an_island_needs_no_network_and_no_other_folder(made: Path, reference: Path, tmp_path: Path) -> None:
    """A process without network interfaces, that sees its own folder and none of those beside it."""
    if subprocess.run(["unshare", "-mn", "true"], check=False, capture_output=True).returncode:
        pytest.skip("this user may not make namespaces")
    folder = alone(made, tmp_path / "island")
    mounts = "mount --bind $0 /mnt && mount -t tmpfs none $2 && ls $2 | wc -l"
    script = f"{mounts} && cd /mnt && exec $1 -m atoll train expert /mnt --expert 0"
    argv = ["unshare", "-mn", "bash", "-c", script, str(folder), sys.executable, str(tmp_path.parents[1])]
    result = subprocess.run(argv, env=environment(), capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[0] == "0"
    assert same_bits(folder / "islands/0", reference / "islands/0")
