"""Workers of every data stage killed at any moment: the data set is that of one worker left in peace."""

import os
import random
import shutil
import signal
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from atoll.store.store import Store
from chaos.nursery import Child, Nursery
from chaos.nursery import nursery as start_nursery
from chaos.proxy import Weather, stormy
from chaos.sweep import content, differences, environment_of_tests
from data.test_workers import repeated
from helpers import write_campaign
from s3 import BUCKET, S3

pytestmark = pytest.mark.slow
STAGES = ("ingest", "embed", "dedupe", "encode")
MODULES = ["atoll.campaign.prepare", "atoll.data.duplicates", "efficientnet_lite_pytorch", "scipy.fft"]
DAY = 86_400.0
KILLS = int(os.environ.get("ATOLL_KILLS", "5"))
"""Of each stage and number of workers; by hand, more."""


class Making:
    """A data set that one worker made in peace, state by state, and the folder in which others make it."""

    def __init__(self, folder: Path, nursery: Nursery) -> None:
        self.folder, self.nursery, self.work = folder, nursery, folder / "campaign"
        rows = [
            {"name": one.id, "text": one.caption, "image": one.image, "who": one.group}
            for one in repeated(128)
        ]
        pq.write_table(pa.Table.from_pylist(rows), folder / "rows.parquet")
        self.settings: dict[str, Any] = {
            "data": {
                "source": str(folder / "rows.parquet"),
                "ingest": {"shard_rows": 8, "id": "name", "group": "who", "mode": "rgb"},
                "dedupe": {},
            },
            "partition": {"method": "kmeans", "encoder": "efficientnet-lite0", "encoder_size": 32},
            "train": {"lease": {"heartbeat_seconds": 0.1, "expiry_seconds": 0.8}},
        }
        write_campaign(self.work, self.settings)
        self.before: dict[str, Path] = {}
        self.after: dict[str, dict[str, str]] = {}
        self.seconds: dict[str, float] = {}
        for stage in STAGES:
            self.before[stage] = Path(shutil.copytree(self.work, folder / "before" / stage))
            start = time.monotonic()
            child = self.start(stage)
            assert child.wait() == 0, child.said()
            self.seconds[stage] = time.monotonic() - start
            self.after[stage] = content(self.work)

    def start(self, stage: str, **options: Any) -> Child:
        return self.nursery.start("data", stage, str(self.work), **options)

    def reset(self, stage: str) -> None:
        shutil.rmtree(self.work)
        shutil.copytree(self.before[stage], self.work)

    def check(self, stage: str, workers: list[Child]) -> None:
        """All workers end in order, and leave what one alone does."""
        for one in workers:
            assert one.wait() == 0, one.said()
        assert differences(content(self.work), self.after[stage]) == []


@pytest.fixture(scope="module")
def making(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Making]:
    with start_nursery(tmp_path_factory.mktemp("said"), environment_of_tests(), *MODULES) as processes:
        yield Making(tmp_path_factory.mktemp("making"), processes)


def faults(chance: random.Random) -> Mapping[str, list[Any]]:
    """A clock that is wrong and, for some, another machine: that its process has ended cannot be known."""
    wrong = {"clock": [chance.uniform(-400, 400) * DAY]}
    return {**wrong, "machine": [f"machine {chance.random()}"]} if chance.random() < 0.2 else wrong


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("stage", STAGES)
def test_kills_leave_no_trace(making: Making, stage: str, workers: int) -> None:
    chance, kills, running = random.Random(f"{stage} {workers}"), 0, list[Child]()
    making.reset(stage)
    while kills < KILLS:
        running += [making.start(stage, faults=faults(chance)) for _ in range(workers - len(running))]
        time.sleep(chance.uniform(0, making.seconds[stage]))
        victim = running.pop(chance.randrange(workers))
        if victim.kill():
            kills += 1
        else:  # faster than its killer: all have to end now, and it begins anew
            making.check(stage, [victim, *running])
            making.reset(stage)
            running = []
    making.check(stage, [making.start(stage), *running])


POINTS = [
    (r"ingest\.json", "before"),
    (r"ingest\.json", "after"),
    (r"claims/00000\.\d+\.json", "after"),
    (r"images/00001\.tar", "after"),
    (r"rows/00002\.parquet", "before"),
    (r"rows/00003\.json", "before"),
    (r"rows/00003\.json", "after"),
    (r"claims/finish\.\d+\.json", "after"),
    (r"rejects\.jsonl", "after"),
    (r"columns/split/00004\.safetensors", "after"),
    (r"columns/split/column\.json", "before"),
    (r"columns/split/column\.json", "after"),
    (r"manifest\.json", "before"),
    (r"manifest\.json", "after"),
    (r"ingest\.json", "removed"),
    (r"rows/00005\.json", "removing"),
]
"""Changes of the store at which a worker dies, in the order in which an ingest comes to them."""


def test_killed_at_every_kind_of_write(making: Making) -> None:
    making.reset("ingest")
    for pattern, how in POINTS:
        child = making.start("ingest", faults={"die": [pattern, how]})
        assert child.wait() == -signal.SIGKILL, (pattern, how, child.said())
    making.check("ingest", [making.start("ingest")])


def test_workers_on_a_store_that_fails(
    making: Making, s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three at a time over S3 that delays, refuses and hangs up; some are killed, some give up."""
    for name, value in s3.environment().items():
        monkeypatch.setenv(name, value)
    url, chance, kills = f"s3://{BUCKET}/{uuid.uuid4().hex}", random.Random(2), 0
    there = Store.open(url, create=True)
    there.put("campaign.yaml", (making.before["ingest"] / "campaign.yaml").read_bytes())
    with stormy(s3, Weather(5, 0.03)) as endpoint:
        env = {**endpoint.environment(), "ATOLL_CACHE": str(tmp_path / "cache")}
        running = list[Child]()
        for _ in range(40):
            running = [one for one in running if one.running()]
            running += [
                making.nursery.start("data", "prepare", url, env=env) for _ in range(3 - len(running))
            ]
            if kills < 4:
                time.sleep(chance.uniform(0.2, 1.5))
                kills += running.pop().kill()
            elif any(one.wait() == 0 for one in running):
                break
    assert kills == 4 and all(one.wait() in (0, 2) for one in running)
    for key in there.list("data"):
        Store.open(tmp_path / "back", create=True).put(key, there.get(key))
    wanted = {key: value for key, value in making.after["encode"].items() if key.startswith("data/")}
    assert differences(content(tmp_path / "back"), wanted) == []
