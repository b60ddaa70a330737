"""Checkpoints of many files, written by several ranks and killed at ten moments: the newest whole one wins.

Each attempt has another number of ranks, and other ways to spread a step. One rank dies, and the others are
killed as soon as that is seen, as `torchrun` does.
"""

import re
import shutil
import signal
import socket
import uuid
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from atoll.base.hashing import sha256
from atoll.store.log import COMMIT, Commit
from atoll.store.manifest import FileEntry, check_file
from atoll.store.store import Store
from chaos.proxy import throttled
from helpers import partitioned
from nursery import Child, Nursery
from s3 import BUCKET, S3

pytestmark = pytest.mark.slow
TRAIN: dict[str, Any] = {"batch": 16, "checkpoint_every_s": 0.0, "previews": 0, "validations": 0}
TRAIN |= {"lease": {"heartbeat_seconds": 0.5, "expiry_seconds": 5.0}}
TRAIN |= {"parallel": {"collective_timeout_s": 60.0}}
CHANGES: dict[str, Any] = {"budget": {"samples": 1600}, "monolith": False, "train": TRAIN}
FILES, WHOLE, MB = r"run/checkpoints/.*\.safetensors", r"run/checkpoints/.*/COMMIT\.json", 2**20
KILLS = [
    (2, "fsdp", 0, FILES, "before"),
    (2, "ddp", 1, FILES, "before"),
    (4, "fsdp", 3, FILES, "after"),
    (1, "ddp", 0, FILES, "torn"),
    (4, "ddp", 2, FILES, "torn"),
    (4, "fsdp", 0, WHOLE, "before"),
    (2, "ddp", 0, WHOLE, "torn"),
    (1, "ddp", 0, WHOLE, "after"),
    (2, "fsdp", 0, r"run/checkpoints/.*", "removing"),
    (4, "ddp", 0, r"run/checkpoints/.*", "removed"),
]
"""Ranks, how they spread the weights, and which of them dies at which change of the store."""


def start(
    nursery: Nursery, where: str, count: int, way: str, faults: dict[str, Any], env: dict[str, str], dies: Any
) -> list[Child]:
    """Train expert 0 with so many ranks."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(count)}
    ranks = []
    for rank in range(count):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(count)}
        die = {"die": dies[1:]} if dies and dies[0] == rank else {}
        argv = ("train", "expert", where, "--expert", "0", "--wait", "--set")
        child = nursery.start(
            *argv,
            f'train.parallel.strategy="{way}"',
            env={**env, **meeting, **place},
            faults={**faults, **die},
        )
        ranks.append(child)
    return ranks


def newest(run: Store) -> tuple[int, list[FileEntry]]:
    """Step and files of what the log names last; fails unless all of it is there and undamaged."""
    entries = [run.get_json(key) for key in run.list("log") if key[-6:-5].isdecimal()]
    assert not [entry for entry in entries if entry["kind"] == "set_aside"]
    commits = [entry for entry in entries if entry["kind"] == "commit"]
    if not commits:
        return -1, []
    name = commits[-1]["checkpoint"]
    assert sha256(run.get(f"{name}/{COMMIT}")) == commits[-1]["sha256"]
    files = Commit.read(run, f"{name}/{COMMIT}").files
    for entry in files:
        check_file(run, name, entry)
    return int(commits[-1]["step"]), files


@pytest.mark.parametrize(("width", "least"), [(512, 100 * MB), (256, 25 * MB)], ids=["disk", "s3"])
def test_killed_at_ten_moments(
    width: int, least: int, nursery: Nursery, tmp_path: Path, s3: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = {"depth": 2, "heads": width // 64, "head_width": 64}
    made = partitioned(tmp_path / "campaign", {**CHANGES, "network": network})
    where, env, faults = str(tmp_path / "campaign"), dict[str, str](), {"small_files": [8 * MB, 5 * MB]}
    with throttled(s3, 40 * MB) as (endpoint, seen):
        if width == 256:
            where, env = f"s3://{BUCKET}/{uuid.uuid4().hex}", {**endpoint.environment()}
            for name, value in {**env, "ATOLL_CACHE": str(tmp_path / "own")}.items():
                monkeypatch.setenv(name, value)
            env["ATOLL_CACHE"] = str(tmp_path / "cache")
            there = Store.open(where, create=True)
            for key in ["campaign.json", *made.store.list("islands/0")]:
                there.put(key, made.store.get(key))
        run = Store.open(where).sub("islands/0/run")
        for count, way, *dies in KILLS:
            if width == 256 and dies[2] == "torn":  # a store of objects knows no half of one
                dies[2] = "after"
            begun, _ = newest(run)
            children = start(nursery, where, count, way, faults, env, dies)
            assert children[dies[0]].wait(300) == -signal.SIGKILL, [child.said() for child in children]
            for child in children:
                if child.running():
                    child.kill()
            assert "Traceback" not in "".join(child.said() for child in children)
            step, files = newest(run)
            assert step >= begun
            assert (f"resumed at step {begun:,} of" in children[0].said()) == (begun >= 0)
            if step > 0:  # before the first the optimizer knows nothing
                assert sum(entry.bytes for entry in files) > least
                assert all(entry.bytes < 9 * MB for entry in files) and len(files) > 6
        # Each part of a file is fetched once, by one rank, and nothing that was sent is fetched again.
        _, files = newest(run)
        before = [*seen]
        seen.clear()
        child, _ = start(nursery, where, 2, "ddp", faults, env, None)
        assert child.wait(600) == 0, child.said()
        card, plan = (
            Store.open(where).get_json(f"islands/0/{key}") for key in ("expert/card.json", "island.json")
        )
        assert card["samples"] == plan["steps"] * plan["batch"]
        if width == 256:
            gets = [line.rpartition("/")[2] for line in seen if line.startswith("GET ")]
            fetched = Counter(name for name in gets if re.match("(weights|ema|optimizer)-", name))
            assert fetched == {entry.path: -(-entry.bytes // (5 * MB)) for entry in files}
            # Of the data each shard came here once: for the first process of the first attempt.
            latents = [line for line in before + seen if line.startswith("GET ") and "/latents/" in line]
            shards = Counter(line for line in latents if line.endswith(".safetensors"))
            assert (
                set(shards.values()) == {1}
                and len(shards) == len(there.list("islands/0/data/columns/latents")) - 1
            )
    shutil.rmtree(tmp_path)
