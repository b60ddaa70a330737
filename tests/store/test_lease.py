"""Who holds a run: liveness decides when another may start, and nothing else."""

import time

import pytest

from atoll.store import lease
from atoll.store.lease import HELD, Heart, Heartbeat, Held, LeaseConfig, acquire, read_heartbeat
from atoll.store.log import Fenced, Log
from atoll.store.store import Store
from helpers import python, until

SHORT = LeaseConfig(heartbeat_seconds=0.05, expiry_seconds=1.0)
LONG = LeaseConfig(heartbeat_seconds=0.05, expiry_seconds=1000.0)


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of this machine look like those of another one: only heartbeats tell."""
    names = iter(f"machine-{n}" for n in range(1000))
    monkeypatch.setattr(lease, "_machine", lambda: next(names))


def test_a_living_holder_keeps_the_run(store: Store) -> None:
    assert acquire(Log(store, "a"), LONG)
    with pytest.raises(
        Held, match=r"a holds this run; its last sign of life was \d+ s ago: .*1000 s"
    ) as held:
        acquire(Log(store, "b"), LONG)
    assert held.value.exit_code == HELD
    assert [e.kind for e in Log(store, "c").entries()] == ["acquire"]


def test_a_silent_holder_is_taken_over(store: Store, elsewhere: None) -> None:
    first = Log(store, "a")
    assert acquire(first, SHORT)
    with pytest.raises(Held):
        acquire(Log(store, "b"), SHORT)
    start = time.monotonic()
    assert acquire(Log(store, "b"), SHORT, wait=True)
    assert 0.5 < time.monotonic() - start < 10
    with pytest.raises(Fenced, match="taken over by b"):
        first.append("commit")


@pytest.mark.parametrize("seconds", [0.05, 60.0])  # the second is more than the lease
def test_heartbeats_keep_it(store: Store, elsewhere: None, seconds: float) -> None:
    log = Log(store, "a")
    assert acquire(log, SHORT)
    with Heart(log, SHORT.model_copy(update={"heartbeat_seconds": seconds}), lambda: {"step": 7}):
        time.sleep(1.3)
        with pytest.raises(Held):
            acquire(Log(store, "b"), SHORT)
        beat = read_heartbeat(store)
    assert beat is not None and (beat.holder, beat.step) == ("a", 7) and beat.beat > 2


def test_a_heart_goes_on_after_what_cannot_be_written(store: Store) -> None:
    log, beats = Log(store, "a"), []
    assert acquire(log, SHORT)

    def signs() -> dict[str, float]:
        beats.append(1)
        return {"loss": float("inf") if len(beats) < 3 else 1.0}

    with Heart(log, SHORT, signs):
        time.sleep(0.4)
    beat = read_heartbeat(store)
    assert beat is not None and beat.loss == 1.0 and len(beats) > 3


def test_heartbeats_of_somebody_else_do_not(store: Store, elsewhere: None) -> None:
    assert acquire(Log(store, "a"), SHORT)
    store.put_json("heartbeat.json", {**Heartbeat.header(), "holder": "z"})
    time.sleep(1.1)
    store.put_json("heartbeat.json", {**Heartbeat.header(), "holder": "z"})
    assert acquire(Log(store, "b"), SHORT)


def test_a_heart_notices_a_takeover_and_stops(store: Store, elsewhere: None) -> None:
    log = Log(store, "a")
    assert acquire(log, SHORT)
    with Heart(log, SHORT, dict) as heart:
        Log(store, "b").acquire()
        until(lambda: heart.fenced)
        with pytest.raises(Fenced, match="taken over by b"):
            heart.check()


@pytest.mark.parametrize("kind", ["release", "publish"])
def test_what_was_left_in_order_is_free_at_once(store: Store, kind: str) -> None:
    log = Log(store, "a")
    assert acquire(log, LONG)
    log.append(kind)
    assert acquire(Log(store, "b"), LONG) == (kind == "release")


def test_a_process_of_this_machine_that_ended_needs_no_patience(store: Store) -> None:
    script = """
import sys
from atoll.store.lease import LeaseConfig, acquire
from atoll.store.log import Log
from atoll.store.store import Store
assert acquire(Log(Store.open(sys.argv[1]), "child"), LeaseConfig(expiry_seconds=1000.0))
print("held", flush=True)
sys.stdin.readline()
"""
    child = python("-c", script, store.location, listens=True)
    assert child.stdout is not None and child.stdout.readline() == "held\n"
    with pytest.raises(Held, match="child holds this run"):
        acquire(Log(store, "b"), LONG)
    child.kill()
    child.communicate(timeout=30)
    assert acquire(Log(store, "b"), LONG)


def test_clocks_do_not_count(store: Store, elsewhere: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose clock is a day ahead or behind neither steals a run nor waits for ever."""
    for hours in (-24, 24):
        folder = store.sub(f"run{hours}")
        assert acquire(Log(folder, "a"), SHORT)
        real = time.time
        with monkeypatch.context() as patch:
            patch.setattr(time, "time", lambda real=real, hours=hours: real() + 3600 * hours)
            with pytest.raises(Held):
                acquire(Log(folder, "b"), SHORT)
            assert acquire(Log(folder, "b"), SHORT, wait=True)


def test_a_damaged_log_gives_its_writer_the_doubt(store: Store, elsewhere: None) -> None:
    assert acquire(Log(store, "a"), SHORT)
    store.path("log/000000.json").write_bytes(b"{")
    with pytest.raises(Held):
        acquire(Log(store, "b"), SHORT)
    time.sleep(1.1)
    assert acquire(Log(store, "b"), SHORT)
