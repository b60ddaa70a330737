"""Pushed to a hub and fetched from it: only what is asked for goes over the wire."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from helpers import ROOT, environment
from helpers_export import pipeline


@pytest.mark.slow
def test_only_the_experts_that_are_asked_for_are_fetched(tmp_path: Path) -> None:
    """A process of its own: the hub's client reads its address once."""
    pipeline().save_pretrained(tmp_path / "model")
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/export/hub.py"), str(tmp_path / "model"), str(tmp_path / "cache")],
        env={**environment(), "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    there = {
        p.relative_to(tmp_path / "model").as_posix() for p in (tmp_path / "model").rglob("*") if p.is_file()
    }
    assert set(said["pushed"]) == there
    experts = {name.split("/")[1] for name in said["first"] if name.startswith("experts/")}
    assert experts == {"experts.json", "1"} and said["some"] == [1]
    assert {name.split("/")[1] for name in said["second"] if name.startswith("experts/")} == {"0", "2"}
    assert said["same"]
