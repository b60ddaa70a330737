"""Files of a local store: whole or not at all, and nothing of killed writers stays."""

import os
import signal
import time
from pathlib import Path

import pytest

from atoll.store import local
from atoll.store.store import Store
from helpers import python

WRITER = """
import os, sys, time
from pathlib import Path
from atoll.store import local

folder = Path(sys.argv[1])

def blocks():
    yield b"who" * 10_000  # more than a file keeps back
    print(*(path.name for path in folder.iterdir() if "#" in path.name), flush=True)
    time.sleep(60)

local.write(folder / "file", blocks(), replace=True)
"""


def test_the_part_of_a_writer_stays_until_it_is_killed(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    store.put("file", b"old")
    with python("-c", WRITER, tmp_path) as writer:
        assert writer.stdout is not None
        part = tmp_path / writer.stdout.readline().strip()
        store.sweep()
        assert part.read_bytes() == b"who" * 10_000
        assert store.list() == ["file"]  # nobody takes the part for one
        writer.send_signal(signal.SIGKILL)
    store.sweep()
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"old"]


@pytest.mark.parametrize("name", ["weights.safetensors#1", f"#{7:010d}{1:010d}{1:014d}{0:06d}"])
def test_parts_of_writers_that_nobody_here_knows_go_when_they_are_old(tmp_path: Path, name: str) -> None:
    part, mine = tmp_path / "a" / name, tmp_path / "a" / "notes #1.txt"
    part.parent.mkdir()
    part.touch()
    mine.touch()
    local.sweep(tmp_path)
    assert part.exists()
    old = time.time() - local.EXPIRY - 10
    os.utime(part, (old, old))
    os.utime(mine, (old, old))
    local.sweep(tmp_path)
    assert not part.exists() and mine.exists()


def test_of_two_who_create_a_file_the_second_is_told(tmp_path: Path) -> None:
    assert local.write(tmp_path / "a/file", b"one", replace=False)
    assert not local.write(tmp_path / "a/file", b"two", replace=False)
    assert (tmp_path / "a/file").read_bytes() == b"one"
    assert local.write(tmp_path / "a/file", tmp_path / "a/file", replace=True)
    assert len(list((tmp_path / "a").iterdir())) == 1
