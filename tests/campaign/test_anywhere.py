"""Campaigns at a URL, by the same commands; copied elsewhere they go on; damage on the way is seen."""

from pathlib import Path

import pytest
import yaml

from atoll.store import cache
from atoll.store.store import Store
from helpers import SMALL, WEIGHTS, Run, assembled, atoll, merged, partitioned, refused

TINY = {"budget": {"samples": 320}, "monolith": False, "train": {"previews": 0, "threads": 1}}


@pytest.fixture
def url(bucket_url: str) -> str:
    """Where a campaign may be."""
    return f"{bucket_url}/c"


def copy(source: Store, target: Store) -> None:
    for key in source.list():
        target.put(key, source.get(key))


@pytest.fixture
def remote(url: str, tmp_path: Path) -> Store:
    """A campaign with shared pretraining that was partitioned on local disk, then copied to S3."""
    store = Store.open(url, create=True)
    copy(partitioned(tmp_path / "c", merged(TINY, {"budget": {"pretrain": 0.3}})).store, store)
    return store


def test_a_new_campaign_at_a_url(url: str, run: Run) -> None:
    answer = run("new", url, "--recipe", "cpu")
    assert answer.code == 0 and f"wrote {url}/campaign.yaml" in answer.out
    refused(run("new", url, "--set", "seed=1"), f"{url}/campaign.yaml exists already, with other settings")
    refused(run("report", url), f"{url} has no partition", f"atoll partition {url}")
    refused(run("data", "show", url), f"there is no data set at {url}/data")
    refused(run("train", "expert", url, "--expert", "0"), f"{url}/islands/0 has no island.json")
    refused(run("partition", url + "x"), f"there is nothing at {url}x")
    where = url.rpartition("/")[0]
    assert run("new", f"{where}/d", "--set", f"data.path={where}/data").code == 0
    refused(run("data", "show", f"{where}/d"), f"there is no data set at {where}/data")


def test_copied_there_and_back_it_goes_on(remote: Store, tmp_path: Path, run: Run) -> None:
    """Shared pretraining is handed over there as here, to the same weights."""

    def train(where: str | Path, *argv: str) -> str:
        answer = run("train", argv[0], where, *argv[1:])
        assert answer.code == 0, answer
        return answer.out

    here, first, second = tmp_path / "c", ("expert", "--expert", "0"), ("expert", "--expert", "1")
    for argv in (("pretrain",), first, second):
        train(here, *argv)
    for argv in (("pretrain",), first):
        train(remote.location, *argv)
    back = Store.open(tmp_path / "back", create=True)
    copy(remote, back)
    assert "finished already" in train(back.location, *first)
    train(back.location, *second)
    assert remote.get(f"islands/0/{WEIGHTS}") == (here / "islands/0" / WEIGHTS).read_bytes()
    assert back.get(f"islands/1/{WEIGHTS}") == (here / "islands/1" / WEIGHTS).read_bytes()


def test_damaged_data_stop_the_training(remote: Store, run: Run) -> None:
    (key,) = [k for k in remote.list("islands/0/data/columns/latents") if k.endswith("00000.safetensors")]
    whole = remote.get(key)
    for harmed, word in ((whole[:-3], "it is torn"), (whole[:-3] + b"abc", "it is damaged")):
        remote.put(key, harmed)
        line = refused(run("train", "pretrain", remote.location), remote.name(key), word)
        assert str(cache.folder()) not in line
    remote.delete(key)
    refused(run("train", "pretrain", remote.location), f"{remote.name(key)} is missing")
    assert not [key for key in remote.list("pretrain") if "/checkpoints/" in key or "/expert/" in key]
    remote.put(key, whole)
    copied = remote.path(key)
    copied.write_bytes(whole[:-3] + b"abc")  # a damaged copy of a whole object is fetched again
    assert run("train", "pretrain", remote.location).code == 0
    assert copied.read_bytes() == whole


@pytest.mark.slow
def test_the_whole_way_on_s3(url: str, tmp_path: Path, run: Run) -> None:
    Store.open(url, create=True).put("campaign.yaml", yaml.safe_dump(merged(SMALL, TINY)).encode())
    result = atoll("launch", url)  # prepares, trains by processes of its own, and assembles
    assert result.returncode == 0, result.stdout + result.stderr
    sheet = tmp_path / "samples.png"
    for argv in (["launch", url], ["sample", url, "0", "1", "--out", sheet], ["report", url]):
        answer = run(*argv)
        assert answer.code == 0, answer
    assert f"wrote {url}/reports/index.html" in answer.out
    assert sheet.read_bytes().startswith(b"\x89PNG")
    store = Store.open(url)
    assert store.exists("reports/index.html") and store.exists("ensemble/ensemble.json")
    here = assembled(tmp_path / "c", TINY)
    for part in ("islands/0", "islands/1", "router"):
        assert store.get(f"{part}/{WEIGHTS}") == (here / part / WEIGHTS).read_bytes(), part
