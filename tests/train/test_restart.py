"""Processes that are killed, told to leave, or overtaken: the bits come out as if nothing had happened."""

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from atoll.base.errors import AtollError
from atoll.campaign.folder import Campaign
from atoll.store.lease import Held
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


def unfinished(run: Path) -> bool:
    return not (run / "expert" / "card.json").exists()


def published_alike(one: Path, other: Path) -> bool:
    cards = [json.loads((run / "expert" / "card.json").read_text()) for run in (one, other)]
    for card in cards:
        del card["provenance"]["seconds"]
    return cards[0] == cards[1]


@pytest.mark.parametrize("run", ["islands/0", pytest.param("router", marks=pytest.mark.slow)])
def test_a_killed_run_goes_on_to_the_same_bits(run: str, copy: Path, reference: Path) -> None:
    process = begun(copy, run)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    assert unfinished(copy / run)
    first, *options = argv(run)
    again = atoll("train", first, copy, *options)
    assert again.returncode == 0, again.stderr
    assert "resumed at step" in again.stdout
    assert same_bits(copy / run, reference / run)
    assert metrics(copy / run) == metrics(reference / run)
    assert published_alike(copy / run, reference / run)


@pytest.mark.parametrize(
    ("run", "number"),
    [
        ("router", signal.SIGTERM),
        pytest.param("islands/0", signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param("islands/0", signal.SIGINT, marks=pytest.mark.slow),
    ],
)
def test_a_run_that_is_told_to_leave_saves_its_state(
    run: str, number: signal.Signals, copy: Path, reference: Path
) -> None:
    process = begun(copy, run)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 75
    assert err.startswith("error: ") and "left at step" in err and len(err.splitlines()) == 1
    assert unfinished(copy / run)
    left = json.loads((newest_checkpoint(copy / run) / "COMMIT.json").read_text())
    assert f"left at step {left['step']:,} of" in err
    train_here(copy, run)
    assert same_bits(copy / run, reference / run)
    assert metrics(copy / run) == metrics(reference / run)


@pytest.mark.slow
def test_a_run_that_is_killed_again_and_again(copy: Path, reference: Path) -> None:
    for wanted in range(1, 5):
        process = start("train", "expert", copy, "--expert", "0")
        before = commits(copy / "islands/0")
        while commits(copy / "islands/0") == before and process.poll() is None:
            time.sleep(0.003 * wanted)
        process.kill()
        process.communicate(timeout=60)
        assert process.returncode == -signal.SIGKILL
    train_here(copy, "islands/0")
    assert same_bits(copy / "islands/0", reference / "islands/0")
    assert metrics(copy / "islands/0") == metrics(reference / "islands/0")


def test_of_two_runs_of_one_island_the_first_is_fenced(copy: Path, reference: Path) -> None:
    process = begun(copy, "islands/0")
    process.send_signal(signal.SIGSTOP)  # as a machine that hangs, or that lost its network
    try:
        with pytest.raises(Held, match=f"-{process.pid}-.* holds this run"):
            train_here(copy, "islands/0")
        train_run(Campaign.open(copy), "expert", 0, wait=True)
    finally:
        process.send_signal(signal.SIGCONT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert err.startswith("error: this run was taken over by ") and len(err.splitlines()) == 1
    assert same_bits(copy / "islands/0", reference / "islands/0")
    assert published_alike(copy / "islands/0", reference / "islands/0")
    assert metrics(copy / "islands/0") == metrics(reference / "islands/0")


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


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def interrupted(folder: Path, monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    """Train expert 0 in this process, which gets SIGTERM from itself after some steps."""
    from atoll.train.expert import DenoiserTask

    step, count = DenoiserTask.step, 0

    def telling(self: DenoiserTask, batch: object) -> object:
        nonlocal count
        count += 1
        if count == steps:
            signal.raise_signal(signal.SIGTERM)
        return step(self, batch)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(DenoiserTask, "step", telling)
        with pytest.raises(AtollError, match="left at step") as caught:
            train_here(folder, "islands/0")
    assert caught.value.exit_code == 75  # type: ignore[attr-defined]


def resumed_at(out: str) -> int:
    """The step that a run says it goes on from."""
    (line,) = [line for line in out.splitlines() if "resumed at step" in line]
    return int(line.split("step ")[1].split(" of")[0].replace(",", ""))


@pytest.mark.parametrize("part", ["weights.safetensors", "optimizer.safetensors", "COMMIT.json"])
def test_a_damaged_checkpoint_is_set_aside_for_the_one_before(
    part: str,
    copy: Path,
    reference: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    interrupted(copy, monkeypatch, 20)
    interrupted(copy, monkeypatch, 15)
    run = copy / "islands/0"
    newest = newest_checkpoint(run)
    assert newest.name.startswith("00000035-")
    if part == "COMMIT.json":
        (newest / part).write_bytes(b"{")
    else:
        damage(newest / part)
    capsys.readouterr()
    train_here(copy, "islands/0")
    out = capsys.readouterr().out
    assert f"checkpoints/{newest.name}/{part}" in out and "warning: checkpoint set aside" in out
    assert 20 <= resumed_at(out) < 35
    assert same_bits(run, reference / "islands/0")
    assert metrics(run) == metrics(reference / "islands/0")


def test_only_the_newest_checkpoints_stay(reference: Path) -> None:
    kept = [path for path in (reference / "islands/0/run/checkpoints").iterdir() if any(path.iterdir())]
    assert commits(reference / "islands/0") > 2
    assert len(kept) == 2
    assert newest_checkpoint(reference / "islands/0") in kept


def test_a_checkpoint_of_other_settings_is_refused(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted(copy, monkeypatch, 5)
    before = bits_of_checkpoint(copy / "islands/0")
    island = copy / "islands/0/island.json"
    island.write_text(json.dumps({**json.loads(island.read_text()), "seed": 1}))
    with pytest.raises(AtollError, match="was made with other settings: restore them"):
        train_here(copy, "islands/0")
    assert bits_of_checkpoint(copy / "islands/0") == before


def bits_of_checkpoint(run: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in newest_checkpoint(run).iterdir()}


def test_damaged_metrics_do_not_stop_a_resume(
    copy: Path, reference: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    interrupted(copy, monkeypatch, 12)
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
