"""Parts of every data stage killed at any moment: the data set is that of one process left in peace."""

import os
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from atoll.store.store import Store
from chaos.proxy import Weather, stormy
from chaos.sweep import content, differences
from data.test_ingest import repeated
from helpers import write_campaign
from nursery import Child, Nursery
from s3 import S3

pytestmark = pytest.mark.slow
STAGES = ("ingest", "embed", "dedupe", "encode")
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

    def start(self, stage: str, part: str | None = None, **options: Any) -> Child:
        words = [] if part is None else ["--part", part]
        return self.nursery.start("data", stage, str(self.work), *words, **options)

    def reset(self, stage: str) -> None:
        shutil.rmtree(self.work)
        shutil.copytree(self.before[stage], self.work)

    def check(self, stage: str, process: Child) -> None:
        """It ends in order, and leaves what one in peace does."""
        assert process.wait() == 0, process.said()
        assert differences(content(self.work), self.after[stage]) == []


@pytest.fixture(scope="module")
def making(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Making:
    return Making(tmp_path_factory.mktemp("making"), nursery)


@pytest.mark.parametrize(
    ("stage", "parts"), [*((stage, 0) for stage in STAGES), *((n, 3) for n in STAGES if n != "dedupe")]
)
def test_kills_leave_no_trace(making: Making, stage: str, parts: int) -> None:
    chance, kills = random.Random(f"{stage} {parts}"), 0
    making.reset(stage)
    while kills < KILLS:
        running = [making.start(stage, f"{number}/{parts}") for number in range(1, parts + 1)]
        if running:  # one is lost, and nobody starts it again
            time.sleep(chance.uniform(0, making.seconds[stage]))
            kills += running.pop(chance.randrange(parts)).kill()
            assert all(one.wait() == 0 for one in running), [one.said() for one in running]
        last = making.start(stage)
        time.sleep(chance.uniform(0, making.seconds[stage]))
        if last.kill():
            kills += 1
        else:  # faster than its killer: it begins anew, and the next one comes sooner
            making.seconds[stage] *= 0.8
            making.check(stage, last)
            making.reset(stage)
    making.check(stage, making.start(stage))


POINTS = [
    (r"ingest\.json", "before"),
    (r"ingest\.json", "after"),
    (r"images/00001\.tar", "after"),
    (r"rows/00002\.parquet", "before"),
    (r"rows/00003\.json", "before"),
    (r"rows/00003\.json", "after"),
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
    making.check("ingest", making.start("ingest"))


def test_parts_on_a_store_that_fails(making: Making, s3: S3, bucket_url: str, tmp_path: Path) -> None:
    """Three at a time over S3 that delays, refuses and hangs up; some are killed, some give up."""
    chance, kills, there = random.Random(2), 0, Store.open(bucket_url, create=True)
    there.put("campaign.yaml", (making.before["ingest"] / "campaign.yaml").read_bytes())
    with stormy(s3, Weather(5, 0.03)) as endpoint:
        env = {**endpoint.environment(), "ATOLL_CACHE": str(tmp_path / "cache")}

        def start(stage: str, words: tuple[str, ...]) -> Child:
            return making.nursery.start("data", stage, bucket_url, *words, env=env)

        for stage in ("ingest", "prepare"):
            for parts in ([("--part", f"{number}/3") for number in range(3)], [()]):
                running = [(start(stage, words), words) for words in parts]
                for _ in range(20):
                    if kills < 4:
                        time.sleep(chance.uniform(0.2, 1.5))
                        kills += running[chance.randrange(len(running))][0].kill()
                    codes = [one.wait() for one, _ in running]
                    assert {*codes} <= {0, 2, -signal.SIGKILL}, [one.said() for one, _ in running]
                    left = [words for code, (_, words) in zip(codes, running, strict=True) if code]
                    if not left:
                        break
                    running = [(start(stage, words), words) for words in left]
                assert not left
    assert kills == 4
    for key in there.list("data"):
        Store.open(tmp_path / "back", create=True).put(key, there.get(key))
    wanted = {key: value for key, value in making.after["encode"].items() if key.startswith("data/")}
    assert differences(content(tmp_path / "back"), wanted) == []
