"""A store that delays, fails and hangs up, over real S3, while processes are killed."""

import random
import shutil
import time
from pathlib import Path

import pytest

from atoll.store.store import Store
from chaos.campaigns import SLOWLY, check_as_if_undisturbed, island
from chaos.proxy import FAULTS, Weather, stormy
from nursery import Nursery
from s3 import S3

pytestmark = pytest.mark.slow


def test_an_island_on_a_store_that_fails(
    nursery: Nursery, untouched: Path, reference: Path, s3: S3, bucket_url: str, tmp_path: Path
) -> None:
    """Processes are killed, or give up with one line; the next one goes on."""
    there, here = Store.open(bucket_url, create=True), Store.open(untouched)
    for key in ["campaign.json", *here.list("islands/0")]:
        there.put(key, here.get(key))

    settings = here.get_json("campaign.json")
    settings["config"]["train"]["checkpoint_every_s"] = 0.0
    settings["config"]["train"]["lease"] = {"heartbeat_seconds": 0.5, "expiry_seconds": 5.0}
    there.put_json("campaign.json", settings)

    chance, weather, kills, gave_up = random.Random(5), Weather(5, 0.06), 0, []
    with stormy(s3, weather) as endpoint:
        env = {**endpoint.environment(), "ATOLL_CACHE": str(tmp_path / "cache")}
        for _ in range(20):
            child = nursery.train(bucket_url, 0, env=env, faults=SLOWLY if kills < 4 else None)
            deadline = time.monotonic() + (chance.uniform(0.5, 3.0) if kills < 4 else 60)
            while child.running() and time.monotonic() < deadline:
                time.sleep(0.01)
            kills += child.running() and child.kill()
            if child.code == 0:
                break
            if child.code == 2:
                gave_up += child.errors()
    assert child.code == 0, child.said()
    print(f"{dict(weather.seen)}, {kills} kills, gave up: {gave_up}")
    assert kills == 4 and all(weather.seen[fault] > 0 for fault in FAULTS)
    shutil.copytree(untouched, tmp_path / "back")
    back = Store.open(tmp_path / "back")
    for key in there.list("islands/0"):
        back.put(key, there.get(key))
    check_as_if_undisturbed(island(tmp_path / "back", 0), island(reference, 0))
