"""Processes that are killed or told to leave: the bits are as if nothing had happened (see `chaos` too)."""

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from atoll.campaign.folder import Campaign
from atoll.train.expert import DenoiserTask
from atoll.train.preemption import Interrupted
from atoll.train.rows import Batch
from atoll.train.run import train_run
from helpers import atoll, bits, environment, metrics, newest_checkpoint, partitioned, same_bits, start

# A run of two seconds that saves its state five times a second.
OFTEN = {
    "checkpoint_every_s": 0.18,
    "validations": 5,
    "log_every": 7,
    "lease": {"heartbeat_seconds": 0.2, "expiry_seconds": 2.0},
}
CHANGES = {
    "budget": {"samples": 8000},
    "train": OFTEN,
    "router": {"share": 0.15, "depth": 2, "train": {**OFTEN, "batch": 8}},
    "partition": {"k": 2},
}


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A campaign that is partitioned and not trained."""
    folder = tmp_path_factory.mktemp("restart") / "campaign"
    partitioned(folder, CHANGES)
    return folder


@pytest.fixture(scope="module")
def reference(untouched: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same campaign with expert 0 and the router trained without interruption."""
    folder = tmp_path_factory.mktemp("reference") / "campaign"
    shutil.copytree(untouched, folder)
    campaign = Campaign.open(folder)
    train_run(campaign, "expert", 0)
    train_run(campaign, "router")
    return folder


@pytest.fixture
def copy(untouched: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(untouched, tmp_path / "campaign"))


def argv(run: str) -> list[str]:
    return ["expert", "--expert", "0"] if run == "islands/0" else ["router"]


def train_here(folder: Path, run: str) -> None:
    train_run(Campaign.open(folder), *(("expert", 0) if run == "islands/0" else ("router",)))


def begun(folder: Path, run: str) -> subprocess.Popen[str]:
    """A process that trains and has committed a checkpoint, but not finished."""
    what, *options = argv(run)
    process = start("train", what, folder, *options)
    try:
        deadline = time.monotonic() + 120
        while commits(folder / run) == 0:
            if process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"no checkpoint: {process.communicate(timeout=10)}")
            time.sleep(0.005)
    except BaseException:
        process.kill()
        process.communicate()
        raise
    return process


def commits(run: Path) -> int:
    entries = [json.loads(path.read_text() or "{}") for path in (run / "run" / "log").glob("*.json")]
    return sum(entry.get("kind") == "commit" for entry in entries)


@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_same_bits(copy: Path, reference: Path) -> None:
    process, run = begun(copy, "islands/0"), copy / "islands/0"
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL and not (run / "expert/card.json").exists()
    again = atoll("train", "expert", copy, "--expert", "0")
    assert again.returncode == 0, again.stderr
    assert "resumed at step" in again.stdout
    assert same_bits(run, reference / "islands/0")
    assert metrics(run) == metrics(reference / "islands/0")
    cards = [json.loads((one / "expert/card.json").read_text()) for one in (run, reference / "islands/0")]
    for card in cards:
        del card["provenance"]["seconds"]
    assert cards[0] == cards[1]


@pytest.mark.slow
def test_a_router_that_is_told_to_leave_saves_its_state(copy: Path, reference: Path) -> None:
    process, run = begun(copy, "router"), copy / "router"
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 75
    assert err.startswith("error: ") and "left at step" in err and len(err.splitlines()) == 1
    assert not (run / "expert/card.json").exists()
    left = json.loads((newest_checkpoint(run) / "COMMIT.json").read_text())
    assert f"left at step {left['step']:,} of" in err
    train_here(copy, "router")
    assert same_bits(run, reference / "router")
    assert metrics(run) == metrics(reference / "router")


def test_a_finished_run_says_so_and_changes_nothing(
    reference: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = reference / "islands/0"
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    train_here(reference, "islands/0")
    assert capsys.readouterr().out == "expert 0: finished already\n"
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


# Isolation.


def alone(untouched: Path, folder: Path) -> Path:
    """All that an island is given: `campaign.json` and its own folder."""
    folder.mkdir(parents=True)
    shutil.copy(untouched / "campaign.json", folder)
    shutil.copytree(untouched / "islands/0", folder / "islands/0")
    return folder


def test_an_island_needs_its_own_folder_and_campaign_json_only(
    untouched: Path, reference: Path, tmp_path: Path
) -> None:
    folder = alone(untouched, tmp_path / "elsewhere")
    train_here(folder, "islands/0")
    assert same_bits(folder / "islands/0", reference / "islands/0")
    assert sorted(path.name for path in folder.iterdir()) == ["campaign.json", "islands"]
    assert sorted(path.name for path in (folder / "islands").iterdir()) == ["0"]


@pytest.mark.slow
def test_an_island_needs_no_network_and_no_other_folder(
    untouched: Path, reference: Path, tmp_path: Path
) -> None:
    """A process without network interfaces, that sees its own folder and none of those beside it."""
    if subprocess.run(["unshare", "-mn", "true"], check=False, capture_output=True).returncode:
        pytest.skip("this user may not make namespaces")
    folder = alone(untouched, tmp_path / "island")
    mounts = "mount --bind $0 /mnt && mount -t tmpfs none $2 && ls $2 | wc -l"
    script = f"{mounts} && cd /mnt && exec $1 -m atoll train expert /mnt --expert 0"
    result = subprocess.run(
        ["unshare", "-mn", "bash", "-c", script, str(folder), sys.executable, str(tmp_path.parents[1])],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[0] == "0"
    assert same_bits(folder / "islands/0", reference / "islands/0")


# What a run does with what it cannot use.


def test_damaged_metrics_do_not_stop_a_resume(
    copy: Path, reference: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    step, calls = DenoiserTask.step, list[object]()

    def telling(self: DenoiserTask, batch: Batch) -> object:
        calls.append(batch)
        if len(calls) == 12:
            signal.raise_signal(signal.SIGTERM)
        return step(self, batch)

    monkeypatch.setattr(DenoiserTask, "step", telling)
    with pytest.raises(Interrupted, match="left at step 12"):
        train_here(copy, "islands/0")
    path = copy / "islands/0/run/metrics.jsonl"
    path.write_bytes(b"\xff\xfe{\n[1]\n{}\n" + path.read_bytes())
    train_here(copy, "islands/0")
    assert capsys.readouterr().out.count("a damaged line of metrics.jsonl is left out") == 3
    assert same_bits(copy / "islands/0", reference / "islands/0")
    assert metrics(copy / "islands/0") == metrics(reference / "islands/0")


def test_the_same_bits_are_not_seen_where_they_differ(reference: Path, copy: Path) -> None:
    """The comparison that the tests above rest on does tell runs apart."""
    changed = json.loads((copy / "islands/0/island.json").read_text())
    (copy / "islands/0/island.json").write_text(json.dumps({**changed, "seed": changed["seed"] + 1}))
    train_here(copy, "islands/0")
    assert not same_bits(copy / "islands/0", reference / "islands/0")
    assert bits(copy / "islands/0").keys() == bits(reference / "islands/0").keys()
