"""Campaigns at a URL, by the same commands; copied elsewhere they go on; damage on the way is seen."""

import uuid
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from atoll.store import cache
from atoll.store.store import Store
from helpers import SMALL, WEIGHTS, Answer, atoll, command, merged, partitioned, refused, write_campaign
from s3 import BUCKET, S3

Run = Callable[..., Answer]
TINY = {"budget": {"samples": 320}, "monolith": False, "train": {"previews": 0, "threads": 1}}


@pytest.fixture
def url(s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where a campaign may be."""
    for name, value in {**s3.environment(), "ATOLL_CACHE": str(tmp_path / "cache")}.items():
        monkeypatch.setenv(name, value)
    return f"s3://{BUCKET}/{uuid.uuid4().hex}/c"


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    return lambda *argv: command(capsys, *argv)


def copy(source: Store, target: Store) -> None:
    for key in source.list():
        target.put(key, source.get(key))


@pytest.fixture
def there(url: str, tmp_path: Path) -> Store:
    """A campaign that was partitioned on local disk, then copied to S3."""
    local = partitioned(tmp_path / "c", TINY).store
    store = Store.open(url, create=True)
    copy(local, store)
    return store


def test_a_new_campaign_at_a_url(url: str, run: Run) -> None:
    answer = run("new", url, "--recipe", "cpu")
    assert answer.code == 0 and f"wrote {url}/campaign.yaml" in answer.out
    refused(run("new", url), f"{url}/campaign.yaml exists already")
    refused(run("report", url), f"{url} has no partition", f"atoll partition {url}")
    refused(run("data", "show", url), f"there is no data set at {url}/data")
    refused(run("train", "expert", url, "--expert", "0"), f"{url}/islands/0 has no island.json")
    refused(run("partition", url + "x"), f"there is nothing at {url}x")
    where = url.rpartition("/")[0]
    assert run("new", f"{where}/d", "--set", f"data.path={where}/data").code == 0
    refused(run("data", "show", f"{where}/d"), f"there is no data set at {where}/data")


def test_copied_there_and_back_it_goes_on(there: Store, tmp_path: Path, run: Run) -> None:
    for island in "01":
        assert run("train", "expert", tmp_path / "c", "--expert", island).code == 0
    assert run("train", "expert", there.location, "--expert", "0").code == 0
    back = Store.open(tmp_path / "back", create=True)
    copy(there, back)
    answer = run("train", "expert", back.location, "--expert", "0")
    assert "finished already" in answer.out
    assert run("train", "expert", back.location, "--expert", "1").code == 0
    here = Store.open(tmp_path / "c")
    assert there.get(f"islands/0/{WEIGHTS}") == here.get(f"islands/0/{WEIGHTS}")
    assert back.get(f"islands/1/{WEIGHTS}") == here.get(f"islands/1/{WEIGHTS}")


def test_damaged_data_stop_the_training(there: Store, run: Run) -> None:
    data = "islands/0/data/columns/latents"
    key = next(key for key in there.list(data) if key.endswith("00000.safetensors"))
    whole = there.get(key)
    for harmed, word in ((whole[:-3], "it is torn"), (whole[:-3] + b"abc", "it is damaged")):
        there.put(key, harmed)
        line = refused(run("train", "expert", there.location, "--expert", "0"), there.name(key), word)
        assert str(cache.folder()) not in line
    there.delete(key)
    refused(run("train", "expert", there.location, "--expert", "0"), f"{there.name(key)} is missing")
    assert not [key for key in there.list("islands/0") if "/checkpoints/" in key or "/expert/" in key]
    there.put(key, whole)
    copied = there.path(key)
    copied.write_bytes(whole[:-3] + b"abc")  # a damaged copy of a whole object is fetched again
    assert run("train", "expert", there.location, "--expert", "0").code == 0
    assert copied.read_bytes() == whole


@pytest.mark.slow
def test_a_seed_is_handed_over_on_s3(url: str, tmp_path: Path, run: Run) -> None:
    local = partitioned(tmp_path / "c", merged(TINY, {"budget": {"pretrain": 0.3}})).store
    there = Store.open(url, create=True)
    copy(local, there)
    for store in (local, there):
        for argv in (["train", "pretrain"], ["train", "expert", "--expert", "0"]):
            answer = run(*argv[:2], store.location, *argv[2:])
            assert answer.code == 0, answer
    assert there.get(f"islands/0/{WEIGHTS}") == local.get(f"islands/0/{WEIGHTS}")


@pytest.mark.slow
def test_the_whole_way_on_s3(url: str, tmp_path: Path, run: Run) -> None:
    settings = merged(SMALL, TINY)
    Store.open(url, create=True).put("campaign.yaml", yaml.safe_dump(settings).encode())
    for argv in (["data", "ingest"], ["data", "encode"], ["partition"], ["launch"], ["assemble"]):
        result = atoll(*argv, url)
        assert result.returncode == 0, result.stdout + result.stderr
    sheet = tmp_path / "samples.png"
    assert atoll("sample", url, "0", "1", "--out", sheet).returncode == 0
    assert sheet.read_bytes().startswith(b"\x89PNG")
    for argv in (["launch", url], ["report", url]):
        answer = run(*argv)
        assert answer.code == 0, answer
    assert f"wrote {url}/reports/index.html" in answer.out
    store = Store.open(url)
    assert store.exists("reports/index.html") and store.exists("ensemble/ensemble.json")

    here = Store.open(write_campaign(tmp_path / "c", TINY))
    assert run("launch", here.location).code == 0
    for part in ("islands/0", "islands/1", "router"):
        assert store.get(f"{part}/{WEIGHTS}") == here.get(f"{part}/{WEIGHTS}"), part
