"""`atoll status`: what the store tells of every run, and that it is told without writing to one."""

import json
import shutil
import signal
import time
from pathlib import Path

import pytest

from atoll.base.text import in_common
from atoll.campaign import status as module
from atoll.campaign.folder import Campaign
from atoll.campaign.status import CampaignStatus, Observer, RunStatus
from atoll.campaign.status_text import WIDTH, lines
from atoll.store import local
from atoll.store.lease import Heartbeat, LeaseConfig, acquire, process
from atoll.store.log import History, Log
from atoll.store.store import Store
from atoll.train.run import train_run
from helpers import Run, partitioned, start

CHANGES = {"train": {"lease": {"heartbeat_seconds": 0.2, "expiry_seconds": 30.0}}}


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("status") / "campaign"
    partitioned(folder, CHANGES)
    return folder


@pytest.fixture
def copy(untouched: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(untouched, tmp_path / "campaign"))


def look(folder: Path | str) -> dict[str, RunStatus]:
    return {run.name: run for run in Observer(Campaign.open(folder)).read().runs}


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def held(folder: Path, island: int = 0, **fields: object) -> Log:
    """An island that a process of another machine holds."""
    log = Log(Store.open(folder).sub(f"islands/{island}/run"), "far-1-abcdef")
    log.acquire(host="far", process={"pid": 1, "machine": "another", "started": 1}, ranks=4, **fields)
    return log


def beat(log: Log, **signs: object) -> None:
    log.store.put_json("heartbeat.json", {**Heartbeat.header(), "holder": log.holder, "host": "far", **signs})


def test_before_the_partition(run: Run, tmp_path: Path) -> None:
    run("new", tmp_path / "c")
    said = run("status", tmp_path / "c")
    assert said.code == 0 and "Not partitioned yet. Start: atoll launch" in said.out
    assert files(tmp_path / "c") == {"campaign.yaml"}


def test_nothing_has_started(copy: Path, run: Run) -> None:
    before = files(copy)
    said = run("status", copy)
    assert said.code == 0
    assert [line.split()[0] for line in said.out.splitlines()[1:5]] == [
        "expert",
        "expert",
        "router",
        "monolith",
    ]
    assert all("waiting" in line for line in said.out.splitlines()[1:5])
    assert "4 runs to do: atoll launch" in said.out
    assert files(copy) == before  # no folder of a run was made, nothing is left of asking for the time


def test_a_finished_run(copy: Path) -> None:
    train_run(Campaign.open(copy), "expert", 0)
    found = Observer(Campaign.open(copy)).read()
    one, other, *_ = found.runs
    assert (one.state, one.step, one.restarts, one.lost) == ("published", one.steps, 0, 0)
    assert other.state == "waiting" and not found.finished and not found.bad
    expert = copy / "islands/0/expert"
    assert one.published_bytes == sum(path.stat().st_size for path in expert.iterdir())
    data = sum(
        path.stat().st_size
        for island in range(2)
        for path in (copy / f"islands/{island}/data").rglob("*")
        if path.is_file() and path.name not in ("manifest.json", "column.json", "ingest.json")
    )
    sent = found.transfer
    assert (sent.data_out, sent.islands) == (data, 2)
    assert (sent.networks_in, sent.networks, sent.between_islands) == (one.published_bytes, 1, 0)
    total = sum(json.loads(p.read_text())["train_flops"] for p in copy.rglob("island.json"))
    tree = found.to_json()
    assert tree["train_flops"] == {"done": pytest.approx(one.train_flops), "all": pytest.approx(total)}
    (copy / "islands/0/run").rename(copy / "moved")  # an island that came back without its run
    alone = look(copy)["expert 0"]
    assert (alone.state, alone.published_bytes) == ("published", one.published_bytes)


def test_bytes_of_another_island_are_counted(copy: Path) -> None:
    """An expert whose data set named another island's file would be seen."""
    path = copy / "islands/0/data/manifest.json"
    manifest = json.loads(path.read_text())
    (entry,) = manifest["shards"][0]["files"].values()
    entry["path"] = "../../1/data/" + entry["path"]
    path.write_text(json.dumps(manifest))
    assert Observer(Campaign.open(copy)).read().transfer.between_islands == entry["bytes"] > 0


def test_a_living_run(copy: Path) -> None:
    log = held(copy)
    assert look(copy)["expert 0"].phase == "starting"
    log.append(
        "commit", checkpoint="checkpoints/a", sha256="", milestone=False, step=4, samples=64, seconds=1.0
    )
    beat(log, phase="training", step=6, steps=20, loss=0.5, speed=32.0, skipped=2, ranks=4)
    found = look(copy)["expert 0"]
    assert found.state == "training" and found.phase == "training"
    assert (found.step, found.committed, found.loss, found.speed) == (6, 4, 0.5, 32.0)
    assert (found.skipped, found.ranks, found.host, found.holder) == (2, 4, "far", log.holder)
    assert found.steps is not None and found.batch is not None
    assert found.seconds_left == pytest.approx((found.steps - 6) * found.batch / 32.0)
    for age in (found.heartbeat_age, found.commit_age):
        assert age is not None and 0 <= age < 20


def test_a_silent_run_is_stale(copy: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    log = held(copy)
    beat(log, step=6)
    ahead = module.store_time(Store.open(copy)) + 31
    monkeypatch.setattr(module, "store_time", lambda store: ahead)
    said = run("status", copy)
    assert said.code == 1
    line = next(line for line in said.out.splitlines() if "expert 0" in line)
    assert line.startswith("!") and "stale" in line
    assert "! expert 0 is stale: no sign of life for 3" in said.out and "nothing is saved" in said.out
    assert said.out.rstrip().endswith(f"Go on from what is saved: atoll launch {copy}")


@pytest.mark.slow
def test_a_process_that_was_killed_is_stale_at_once(copy: Path, run: Run) -> None:
    running = start("train", "expert", copy, "--expert", "0")
    deadline = time.monotonic() + 120
    while look(copy)["expert 0"].state != "training":
        assert running.poll() is None and time.monotonic() < deadline
    running.send_signal(signal.SIGKILL)
    running.communicate()
    found = look(copy)["expert 0"]
    assert found.state == "stale" and found.ended
    assert found.heartbeat_age is not None and found.heartbeat_age < 30
    assert "its process has ended" in run("status", copy).out
    train_run(Campaign.open(copy), "expert", 0)
    found = look(copy)["expert 0"]
    assert (found.state, found.restarts) == ("published", 1)


def test_a_run_that_failed_and_one_that_left(copy: Path, run: Run) -> None:
    log = held(copy)
    log.append("release", reason="failed", step=3, error="no\x1b[2J space\n left")
    other = held(copy, 1)
    other.append("release", reason="left", step=5)
    said = run("status", copy)
    assert said.code == 1
    assert "\x1b" not in said.out and "! expert 0 failed: no?[2J space" in said.out
    assert not any(line.startswith("! expert 1") for line in said.out.splitlines())
    tree = json.loads(run("status", copy, "--json").out)
    assert tree["attention"] == ["expert 0"]
    assert [run["state"] for run in tree["runs"]] == ["failed", "left", "waiting", "waiting"]
    assert [run["step"] for run in tree["runs"][:2]] == [3, 5]


def test_restarts_and_what_they_cost(copy: Path, run: Run) -> None:
    store = Store.open(copy).sub("islands/0/run")
    for number, lost in enumerate((0, 7, 5)):
        log = Log(store, f"holder-{number}")
        log.acquire(host="far", ranks=2)
        if number == 2:
            log.append("set_aside", checkpoint="checkpoints/1-9", reason="torn")
        log.append("resume", step=10 * number, lost=lost)
        for step in range(10):
            log.append(
                "commit", checkpoint=f"checkpoints/{number}-{step}", sha256="", step=10 * number + step
            )
    found = look(copy)["expert 0"]
    assert (found.restarts, found.lost, found.set_aside, found.committed) == (2, 12, 1, 29)
    text = "\n".join(lines(Observer(Campaign.open(copy)).read()))
    assert "2 (-12)" in text
    assert "expert 0: 12 steps done again after 2 restarts" in text
    assert "expert 0: 1 damaged checkpoint set aside" in text and "2x far" in text


def test_a_commit_that_was_set_aside_does_not_count(copy: Path) -> None:
    log = held(copy)
    for step in (3, 6):
        log.append("commit", checkpoint=f"checkpoints/{step}", sha256="", step=step)
    log.append("set_aside", checkpoint="checkpoints/6", reason="torn")
    found = look(copy)["expert 0"]
    assert (found.committed, found.set_aside) == (3, 1)


def test_damage_is_told_and_hides_nothing(copy: Path, run: Run) -> None:
    held(copy)
    (copy / "islands/0/run/log/000001.json").write_text("{torn")
    (copy / "islands/0/run/heartbeat.json").write_text(
        '{"holder": "far-1-abcdef", "step": "\\u001b", "loss": NaN}'
    )
    (copy / "islands/1/island.json").write_text("{torn")
    said = run("status", copy)
    assert said.code == 1 and "\x1b" not in said.out
    assert "! expert 1 cannot be read: " in said.out
    assert "is not valid JSON" in " ".join(said.out.split())
    found = look(copy)["expert 0"]
    assert (found.state, found.damaged, found.step, found.loss) == ("training", 1, None, None)
    json.loads(run("status", copy, "--json").out, parse_constant=lambda name: pytest.fail(name))


class Counting(Store):
    """A store that counts what is read of it."""

    reads = 0

    def get(self, key: str) -> bytes:
        Counting.reads += 1
        return super().get(key)


@pytest.mark.parametrize("starts", [1, 2, 5])
def test_a_long_log_is_not_read_whole(starts: int, tmp_path: Path) -> None:
    whole = []
    for number in range(starts):
        log = Log(Store.open(tmp_path).sub("run"), f"holder-{number}")
        log.acquire(host="far")
        log.append("resume", step=0, lost=number)
        for step in range(300 // starts):
            log.append("commit", checkpoint=f"checkpoints/{number}-{step}", sha256="", step=step)
        whole = log.entries()
    history = History(Counting.open(tmp_path), "run")
    Counting.reads = 0
    history.refresh()
    assert Counting.reads < 25 * starts
    events = [entry for entry in whole if entry.kind != "commit"]
    assert [entry for entry in history.entries() if entry.kind != "commit"] == events
    assert history.last_commit() == (whole[-1], f"run/log/{len(whole) - 1:06d}.json")
    Counting.reads = 0
    log.append("release", reason="left", step=1)
    history.refresh()
    assert history.last("release", "acquire") == (log.entries()[-1], f"run/log/{len(whole):06d}.json")
    assert Counting.reads == 1


def test_many_islands_are_quick_and_fit_on_the_screen() -> None:
    run = RunStatus(
        "expert 63",
        "expert",
        63,
        "training",
        "training",
        step=399_000,
        steps=1_200_000,
        batch=256,
        loss=0.012345,
        speed=12345.6,
        seconds_left=86400 * 12.3,
        committed=398_000,
        commit_age=3600 * 7.7,
        heartbeat_age=71.0,
        holder="h",
        host="a-very-long-name-of-a-node.cluster.example.org",
        ranks=64,
        restarts=12,
        lost=123_456,
        train_flops=1e21,
    )
    transfer = module.TransferBytes(123_456_789_012, 64, 99_456_789_012, 65, 0)
    told = lines(CampaignStatus("/a", True, "local", [run], in_common(0.5, False), transfer))
    assert max(map(len, told)) <= WIDTH
    assert "64x a-v" in told[1] and told[1].endswith("…")
    assert any("this machine's clock" in line for line in told)


def test_a_store_that_can_only_be_read(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same as over S3 with a key that may only read (tests/store/test_remote.py has one)."""
    beat(held(copy), step=2)
    before = files(copy)
    campaign = Campaign.open(copy)

    def refuse(store: Store, key: str, data: object, mode: object) -> None:
        raise module.StoreError("permission denied")

    def unable(folder: Path) -> float:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Store, "_put", refuse)
    monkeypatch.setattr(local, "now", unable)
    found = Observer(campaign).read()
    assert found.clock == "local" and found.runs[0].step == 2
    assert found.runs[0].heartbeat_age is not None and found.runs[0].heartbeat_age < 20
    assert files(copy) == before


@pytest.mark.slow
def test_watching_ends_when_all_is_published(copy: Path) -> None:
    campaign = Campaign.open(copy)
    for what in (("expert", 0), ("expert", 1), ("router", None)):
        train_run(campaign, *what)
    watching = start("status", copy, "--watch", "--every", "1", "--json")
    assert watching.stdout is not None
    first = json.loads(watching.stdout.readline())
    assert [run["state"] for run in first["runs"]] == [*["published"] * 3, "waiting"]
    train_run(campaign, "monolith")
    out, err = watching.communicate(timeout=60)
    assert (watching.returncode, err) == (0, "")
    last = json.loads(out.splitlines()[-1])
    assert last["runs"][3]["state"] == "published" and last["runs"][3]["restarts"] == 0


def test_watching_ends_with_ctrl_c(copy: Path) -> None:
    watching = start("status", copy, "--watch", "--every", "1")
    assert watching.stdout is not None
    watching.stdout.readline()
    watching.send_signal(signal.SIGINT)
    _, err = watching.communicate(timeout=60)
    assert (watching.returncode, err) == (0, "")


def test_the_own_process_is_alive(copy: Path) -> None:
    log = Log(Store.open(copy).sub("islands/0/run"), "me")
    assert acquire(log, LeaseConfig())
    assert log.entries()[0].process == process()
    assert look(copy)["expert 0"].state == "training"
