"""`atoll status`: what the store tells of every run, and that it is told without writing to one."""

import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest

from atoll.base.text import sharing_sentence
from atoll.campaign import status as module
from atoll.campaign.folder import Campaign
from atoll.campaign.status import WIDTH, CampaignStatus, Observer, RunStatus, lines
from atoll.store import local
from atoll.store.lease import Heartbeat, LeaseConfig, acquire
from atoll.store.log import History, Log
from atoll.store.store import Store
from atoll.train.run import train_run
from helpers import Run, start, until

CHANGES = {"train": {"lease": {"heartbeat_seconds": 0.2, "expiry_seconds": 30.0}}}


def look(folder: Path | str) -> dict[str, RunStatus]:
    return {run.name: run for run in Observer(Campaign.open(folder)).read().runs}


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def held(folder: Path, island: int = 0) -> Log:
    """An island that a process of another machine holds."""
    log = Log(Store.open(folder).sub(f"islands/{island}/run"), "far-1-abcdef")
    log.acquire(host="far", process={"pid": 1, "machine": "another", "started": 1}, ranks=4)
    return log


def commit(log: Log, step: int, name: str = "") -> None:
    log.append("commit", checkpoint=f"checkpoints/{name}{step}", sha256="", step=step)


def beat(log: Log, **signs: object) -> None:
    log.store.put_json("heartbeat.json", {**Heartbeat.header(), "holder": log.holder, "host": "far", **signs})


def test_before_anything_has_started(copy: Path, run: Run, tmp_path: Path) -> None:
    run("new", tmp_path / "c")
    said = run("status", tmp_path / "c")
    assert said.code == 0 and "Not partitioned yet. Start: atoll launch" in said.out
    assert files(tmp_path / "c") == {"campaign.yaml"}
    before, said = files(copy), run("status", copy)
    waiting = [line.split()[0] for line in said.out.splitlines() if "waiting" in line]
    assert said.code == 0 and waiting == ["expert", "expert", "router", "monolith"]
    assert "4 runs to do: atoll launch" in said.out
    assert files(copy) == before  # no folder of a run was made, nothing is left of asking for the time
    shutil.rmtree(copy / "partition")  # as on another machine, where it is not copied
    assert "A copy of expert 0, expert 1, router, monolith alone" in run("status", copy).out


def test_a_finished_run(copy: Path, tmp_path: Path, run: Run) -> None:
    train_run(Campaign.open(copy), "expert", 0)
    status = Observer(Campaign.open(copy)).read()
    one, other, *_ = status.runs
    assert (one.state, one.step, one.restarts, one.lost) == ("published", one.steps, 0, 0)
    assert other.state == "waiting" and not status.finished and not status.bad
    assert one.published_bytes == sum(path.stat().st_size for path in (copy / "islands/0/expert").iterdir())
    data = sum(
        path.stat().st_size
        for island in range(2)
        for path in (copy / f"islands/{island}/data").rglob("*")
        if path.is_file() and path.name not in ("manifest.json", "column.json", "ingest.json")
    )
    sent = status.transfer
    assert (sent.data_out, sent.islands) == (data, 2)
    assert (sent.networks_in, sent.networks, sent.between_islands) == (one.published_bytes, 1, 0)
    total = sum(json.loads(p.read_text())["train_flops"] for p in copy.rglob("island.json"))
    counted = status.to_json()["train_flops"]
    assert counted == {"done": pytest.approx(one.train_flops), "all": pytest.approx(total)}
    (copy / "islands/0/run").rename(copy / "moved")  # an island that came back without its run
    alone = look(copy)["expert 0"]
    assert (alone.state, alone.published_bytes) == ("published", one.published_bytes)
    others = shutil.ignore_patterns("partition", "1", "router", "monolith")
    shutil.copytree(copy, tmp_path / "away", ignore=others)
    assert "A copy of expert 0 alone: copy it back" in run("status", tmp_path / "away").out

    # An expert whose data set named another island's file would be seen.
    path = copy / "islands/0/data/manifest.json"
    manifest = json.loads(path.read_text())
    (entry,) = manifest["shards"][0]["files"].values()
    entry["path"] = "../../1/data/" + entry["path"]
    path.write_text(json.dumps(manifest))
    assert Observer(Campaign.open(copy)).read().transfer.between_islands == entry["bytes"] > 0


def test_endless_numbers_of_an_island_hide_no_run(copy: Path, run: Run) -> None:
    beat(held(copy), step=10**400)
    (copy / "islands/1/init").mkdir()
    (copy / "islands/1/init/init.json").write_text('{"files": [{"bytes": Infinity}]}')
    said = run("status", copy)
    assert said.code == 0 and said.out.count("waiting") == 3 and "training" in said.out


def test_a_living_run(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = held(copy)
    assert look(copy)["expert 0"].phase == "starting"
    commit(log, 4)
    beat(log, phase="training", step=6, steps=20, loss=0.5, speed=32.0, skipped=2, ranks=4)
    status = look(copy)["expert 0"]
    assert status.state == "training" and status.phase == "training"
    assert (status.step, status.committed, status.loss, status.speed) == (6, 4, 0.5, 32.0)
    assert (status.skipped, status.ranks, status.host, status.holder) == (2, 4, "far", log.holder)
    assert status.steps is not None and status.batch is not None
    assert status.seconds_left == pytest.approx((status.steps - 6) * status.batch / 32.0)
    for age in (status.heartbeat_age, status.commit_age):
        assert age is not None and 0 <= age < 20
    mine = Log(Store.open(copy).sub("islands/1/run"), "me")
    assert acquire(mine, LeaseConfig()) and mine.entries()[0].process.pid == os.getpid()
    (observer := Observer(Campaign.open(copy))).read()
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 3600)  # this machine's clock is set
    assert [run.state for run in observer.read().runs[:2]] == ["training", "training"]


def test_a_silent_run_is_stale(copy: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    beat(held(copy), step=6)
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
    until(lambda: look(copy)["expert 0"].state == "training", running.poll)
    running.send_signal(signal.SIGKILL)
    running.communicate()
    status = look(copy)["expert 0"]
    assert status.state == "stale" and status.ended
    assert status.heartbeat_age is not None and status.heartbeat_age < 30
    assert "its process has ended" in run("status", copy).out
    train_run(Campaign.open(copy), "expert", 0)
    status = look(copy)["expert 0"]
    assert (status.state, status.restarts) == ("published", 1)


def test_a_run_that_failed_and_one_that_left(copy: Path, run: Run) -> None:
    held(copy).append("release", reason="failed", step=3, error="no\x1b[2J space\n left")
    held(copy, 1).append("release", reason="left", step=5)
    said = run("status", copy)
    assert said.code == 1
    assert "\x1b" not in said.out and "! expert 0 failed: no?[2J space" in said.out
    assert not any(line.startswith("! expert 1") for line in said.out.splitlines())
    tree = json.loads(run("status", copy, "--json").out)
    assert tree["attention"] == ["expert 0"]
    assert [run["state"] for run in tree["runs"]] == ["failed", "left", "waiting", "waiting"]
    assert [run["step"] for run in tree["runs"][:2]] == [3, 5]


def test_restarts_and_what_they_cost(copy: Path) -> None:
    store = Store.open(copy).sub("islands/0/run")
    for number, lost in enumerate((0, 7, 5)):
        log = Log(store, f"holder-{number}")
        log.acquire(host="far", ranks=2)
        if number == 2:
            log.append("set_aside", checkpoint="checkpoints/1-19", reason="torn")
        log.append("resume", step=10 * number, lost=lost)
        for step in range(10):
            commit(log, 10 * number + step, f"{number}-")
    log.append("set_aside", checkpoint="checkpoints/2-29", reason="torn")  # such a commit does not count
    status = look(copy)["expert 0"]
    assert (status.restarts, status.lost, status.set_aside, status.committed) == (2, 12, 2, 28)
    text = "\n".join(lines(Observer(Campaign.open(copy)).read()))
    assert "2 (-12)" in text and "2x far" in text
    assert "expert 0: 12 steps done again after 2 restarts" in text
    assert "expert 0: 2 damaged checkpoints set aside" in text


def test_damage_is_told_and_hides_nothing(copy: Path, run: Run) -> None:
    held(copy)
    (copy / "islands/0/run/log/000001.json").write_text("{torn")
    odd = '{"holder": "far-1-abcdef", "step": "\\u001b", "loss": NaN}'
    (copy / "islands/0/run/heartbeat.json").write_text(odd)
    (copy / "islands/1/island.json").write_text("{torn")
    said = run("status", copy)
    assert said.code == 1 and "\x1b" not in said.out
    assert "! expert 1 cannot be read: " in said.out
    assert "is not valid JSON" in " ".join(said.out.split())
    status = look(copy)["expert 0"]
    assert (status.state, status.damaged, status.step, status.loss) == ("training", 1, None, None)
    json.loads(run("status", copy, "--json").out, parse_constant=lambda name: pytest.fail(name))


class Counting(Store):
    """A store that counts what is read of it."""

    reads = 0

    def get(self, key: str) -> bytes:
        Counting.reads += 1
        return super().get(key)


@pytest.mark.parametrize("starts", [1, 5])
def test_a_long_log_is_not_read_whole(starts: int, tmp_path: Path) -> None:
    whole = []
    for number in range(starts):
        log = Log(Store.open(tmp_path).sub("run"), f"holder-{number}")
        log.acquire(host="far")
        log.append("resume", step=0, lost=number)
        for step in range(300 // starts):
            commit(log, step, f"{number}-")
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
    shutil.rmtree(tmp_path / "run")  # the run begins anew
    Log(Store.open(tmp_path).sub("run"), "later").acquire()
    history.refresh()
    assert [entry.holder for entry in history.entries()] == ["later"] and history.last_commit() is None


def test_large_numbers_fit_on_the_screen() -> None:
    run = RunStatus("expert 63", "expert", 63, "training", "training", batch=256)
    run.step, run.steps = 399_000, 1_200_000
    run.loss, run.speed, run.seconds_left = 0.012345, 12345.6, 86400 * 12.3
    run.committed, run.commit_age, run.heartbeat_age = 398_000, 60 * 99.8, 71.0
    run.host, run.ranks = "a-very-long-name-of-a-node.cluster.example.org", 64
    run.restarts, run.lost, run.train_flops = 12, 999_700, 1e21
    transfer = module.TransferBytes(123_456_789_012, 64, 99_456_789_012, 65, 0)
    text = lines(CampaignStatus("/a", True, "local", [run], sharing_sentence(0.5, False), transfer))
    assert max(map(len, text)) <= WIDTH
    assert {"64x", "100m", "(-1M)"} < {*text[1].split()} and text[1].endswith("…")
    assert any("this machine's clock" in line for line in text)
    assert "Done: 33% of 1e+21 training FLOPs; 0 of 1 runs published; about 4.6h left at this speed." in text


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
    status = Observer(campaign).read()
    assert status.clock == "local" and status.runs[0].step == 2
    assert status.runs[0].heartbeat_age is not None and status.runs[0].heartbeat_age < 20
    assert files(copy) == before


def test_watching_ends_when_all_is_published_or_with_ctrl_c(
    copy: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [copy / "islands/0", copy / "islands/1", copy / "router", copy / "monolith"]

    def publish(seconds: float) -> None:
        assert seconds == 2
        for folder in folders:
            (folder / "expert").mkdir()
            (folder / "expert/card.json").write_text("{}")

    monkeypatch.setattr(time, "sleep", publish)
    said = run("status", copy, "--watch", "--every", "2", "--json")
    first, last = (json.loads(line) for line in said.out.splitlines())
    assert {run["state"] for run in first["runs"]} == {"waiting"} and said.code == 0
    assert {run["state"] for run in last["runs"]} == {"published"}
    shutil.rmtree(folders[0] / "expert")

    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", interrupted)
    said = run("status", copy, "--watch")
    assert (said.code, said.err) == (0, "") and "waiting" in said.out
