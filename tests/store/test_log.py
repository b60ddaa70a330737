"""The log of an island: one holder at a time, whatever the clocks say."""

from typing import Any

import pytest

from atoll.base.errors import StoreError
from atoll.store.log import Fenced, Log
from atoll.store.store import Conflict, Store
from helpers import python


def take(log: Log) -> None:
    log.refresh()
    log.acquire()


def kinds(store: Store) -> list[tuple[str, str]]:
    return [(e.holder, e.kind) for e in Log(store, "reader").entries()]


def test_entries_are_numbered_and_kept(store: Store) -> None:
    log = Log(store, "a")
    log.acquire(host="here")
    log.append("commit", step=1)
    assert log.publication() is None
    log.append("publish")
    published = log.publication()
    assert published is not None and published.kind == "publish"
    assert store.list("log") == [f"log/{n:06d}.json" for n in range(3)]
    assert kinds(store) == [("a", "acquire"), ("a", "commit"), ("a", "publish")]
    assert log.entries()[0].host == "here" and log.entries()[1].step == 1


def test_commits_are_those_that_were_not_set_aside(store: Store) -> None:
    log = Log(store, "a")
    log.acquire()
    for name in ("one", "two", "one"):  # the same step may be reached and committed again
        log.append("commit", checkpoint=name)
    log.append("set_aside", checkpoint="two", reason="torn")
    log.append("commit", checkpoint="three")
    assert [entry.checkpoint for entry in log.commits()] == ["one", "one", "three"]
    log.append("set_aside", checkpoint="one", reason="torn")
    assert [entry.checkpoint for entry in Log(store, "reader").commits()] == ["three"]


def test_a_second_holder_fences_the_first(store: Store) -> None:
    first, second = Log(store, "a"), Log(store, "b")
    first.acquire()
    first.append("commit", step=1)
    first.check()
    with pytest.raises(Conflict):
        second.acquire()  # it was made before the first wrote anything: it must look first
    take(second)
    with pytest.raises(Fenced, match="taken over by b"):
        first.append("commit", step=2)
    with pytest.raises(Fenced, match="taken over by b"):
        first.check()
    with pytest.raises(Fenced):
        first.append("publish")
    second.append("commit", step=2)
    second.check()
    assert kinds(store) == [("a", "acquire"), ("a", "commit"), ("b", "acquire"), ("b", "commit")]


def test_an_entry_whose_answer_was_lost_is_no_takeover(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was written, and its writer believes that it was not."""
    log, put = Log(store, "a"), Store._put
    log.acquire()

    def lost(self: Store, *args: Any) -> None:
        put(self, *args)
        raise StoreError("the connection was lost")

    with monkeypatch.context() as patch:
        patch.setattr(Store, "_put", lost)
        with pytest.raises(StoreError, match="was lost"):
            log.append("commit", step=1)
    log.check()
    log.append("commit", step=2)
    assert kinds(store) == [("a", "acquire"), ("a", "commit"), ("a", "commit")]
    take(Log(store, "b"))
    with pytest.raises(Fenced, match="taken over by b"):
        log.check()


def test_an_entry_that_is_gone_is_told(store: Store) -> None:
    log = Log(store, "a")
    log.acquire()
    log.append("commit", step=1)
    store.delete("log/000000.json")
    with pytest.raises(StoreError, match=r"log/000000.json is missing, but later .*: put it back"):
        Log(store, "b")


def test_processes_that_race_leave_one_holder_and_no_gap(store: Store) -> None:
    """Two processes acquire in turn and append in between; entries stay whole and each is its holder's."""
    script = """
import sys
from atoll.store.log import Fenced, Log
from atoll.store.store import Conflict, Store
sys.stdin.readline()
fenced = done = 0
for turn in range(40):
    log = Log(Store.open(sys.argv[1]), f"{sys.argv[2]}-{turn}")
    while True:
        try:
            log.refresh()
            log.acquire()
            break
        except Conflict:
            pass
    try:
        for _ in range(3):
            log.append("commit")
            done += 1
    except Fenced:
        fenced += 1
print(fenced, done)
"""
    racers = [python("-c", script, store.location, name, listens=True) for name in "ab"]
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("\n")
        racer.stdin.flush()
    said = [racer.communicate(timeout=120)[0].split() for racer in racers]
    assert all(racer.returncode == 0 for racer in racers)
    entries = kinds(store)
    assert store.list("log") == [f"log/{n:06d}.json" for n in range(len(entries))]
    assert sum(kind == "acquire" for _, kind in entries) == 80
    assert sum(kind == "commit" for _, kind in entries) == sum(int(done) for _, done in said)
    holder = ""
    for name, kind in entries:  # nobody appends after somebody else acquired
        holder = name if kind == "acquire" else holder
        assert name == holder


def test_a_damaged_entry_says_nothing_and_is_told(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    log = Log(store, "a")
    log.acquire()
    log.append("commit", step=1)
    path = store.path("log/000001.json")
    path.write_bytes(path.read_bytes().replace(b'"step": 1', b'"step": 7'))
    assert [entry.kind for entry in Log(store, "b").entries()] == ["acquire", "damaged"]
    assert "log/000001.json is damaged" in capsys.readouterr().out
