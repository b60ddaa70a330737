"""A forked process is to the tests what a fresh one is."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from helpers import atoll, environment, write_campaign
from nursery import Fresh, Nursery, Popen


def ended(kind: type[subprocess.Popen[str]], cwd: Path, *argv: str) -> tuple[int, str, str]:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = kind([sys.executable, "-m", "atoll", *argv], cwd=cwd, env=environment(), text=True, **pipes)
    assert kind is Fresh or process._connection, "not forked: the environment is another than the nursery's"
    out, err = process.communicate(timeout=100)
    return process.returncode, out, err


@pytest.mark.parametrize("argv", [("new", "c"), ("status", "nowhere"), ("sample",), ("--help",)])
def test_it_says_and_returns_the_same(argv: tuple[str, ...], tmp_path: Path) -> None:
    forked, left = ended(Popen, tmp_path, *argv), sorted(os.listdir(tmp_path))
    for name in left:
        (tmp_path / name).rename(tmp_path.parent / f"{tmp_path.name}-{name}")
    assert (ended(Fresh, tmp_path, *argv), sorted(os.listdir(tmp_path))) == (forked, left)


def test_signals_reach_it_and_what_it_starts_is_forked_too(nursery: Nursery, tmp_path: Path) -> None:
    write_campaign(tmp_path / "c", {"budget": {"samples": 64}})
    done = atoll("launch", tmp_path / "c")
    assert done.returncode == 0 and "runs finished" in done.stdout, done.stderr
    child = nursery.start("status", tmp_path / "c", "--watch")
    assert child.running() and child.code is None
    assert child.kill() and child.code == -signal.SIGKILL
