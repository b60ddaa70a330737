"""Object stores that refuse, are not there, or cannot do what a log needs: one line, soon, exit code 2."""

import random
import socket
import time
from collections.abc import Iterator

import pytest

from atoll.base.errors import StoreError
from atoll.store import ranges
from atoll.store import store as module
from atoll.store.location import IMPATIENT, PATIENT
from atoll.store.store import Conflict, Store, check_conditional_create
from helpers import command, refused
from s3 import BUCKET, S3, Proxy, forgetful, proxied, serve


@pytest.fixture(scope="module")
def guarded() -> Iterator[S3]:
    """An endpoint that checks who asks."""
    with serve(auth=True) as endpoint:
        yield endpoint


def use(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)


def test_wrong_credentials(guarded: S3, monkeypatch, capsys) -> None:
    use(monkeypatch, guarded.environment("writer"))
    Store.open(f"s3://{BUCKET}/c", create=True).put("campaign.yaml", b"seed: 1")
    for user in ("nobody", "secret"):
        use(monkeypatch, guarded.environment("nobody"))
        if user == "secret":
            monkeypatch.setenv("AWS_ACCESS_KEY_ID", guarded.keys["writer"][0])
        answer = command(capsys, "partition", f"s3://{BUCKET}/c")
        refused(answer, f"cannot use s3://{BUCKET}/c: permission denied", "check the credentials")


def test_a_store_that_may_only_be_read(guarded: S3, monkeypatch, capsys) -> None:
    use(monkeypatch, guarded.environment("writer"))
    Store.open(f"s3://{BUCKET}/r", create=True).put("a", b"1")
    use(monkeypatch, guarded.environment("reader"))
    store = Store.open(f"s3://{BUCKET}/r")
    assert store.get("a") == b"1" and store.list() == ["a"]
    for act in (
        lambda: store.put("a", b"2"),
        lambda: store.create("b", b"2"),
        lambda: store.delete("a"),
        lambda: store.copy("a", "b"),
        lambda: check_conditional_create(store),
    ):
        with pytest.raises(StoreError, match=r"cannot (write|remove|copy) .*: permission denied"):
            act()
    assert store.get("a") == b"1" and store.list() == ["a"]
    refused(command(capsys, "new", f"s3://{BUCKET}/r"), "cannot write", "campaign.yaml: permission denied")


def test_a_missing_bucket(s3: S3, monkeypatch, capsys) -> None:
    use(monkeypatch, s3.environment())
    for argv in (("report", "s3://nowhere/c"), ("new", "s3://nowhere/c")):
        refused(command(capsys, *argv), "cannot use s3://nowhere/c: there is no such bucket")


def test_an_endpoint_that_does_not_answer(s3: S3, monkeypatch, capsys) -> None:
    use(monkeypatch, {**s3.environment(), "AWS_ENDPOINT_URL": "http://127.0.0.1:9"})
    start = time.monotonic()
    refused(command(capsys, "report", f"s3://{BUCKET}/c"), "http://127.0.0.1:9 does not answer")
    assert time.monotonic() - start < 30
    monkeypatch.delenv("AWS_ALLOW_HTTP")
    refused(command(capsys, "report", f"s3://{BUCKET}/c"), "plain http", "AWS_ALLOW_HTTP=true")


def test_an_endpoint_that_takes_the_call_and_never_speaks(s3: S3, monkeypatch, capsys) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        hurry = {"AWS_READ_TIMEOUT": "500ms", "AWS_TIMEOUT": "1s"}
        use(monkeypatch, {**s3.environment(), "AWS_ENDPOINT_URL": url, **hurry})
        monkeypatch.setitem(IMPATIENT, "max_retries", 1)
        start = time.monotonic()
        refused(command(capsys, "report", f"s3://{BUCKET}/c"), f"{url} does not answer")
        assert time.monotonic() - start < 15


def test_an_endpoint_that_goes_away(monkeypatch) -> None:
    with serve() as endpoint:
        use(monkeypatch, endpoint.environment())
        monkeypatch.setitem(PATIENT, "max_retries", 1)
        (store := Store.open(f"s3://{BUCKET}/c", create=True)).put("a", b"1")
    acts = [lambda: store.get("a"), lambda: store.put("a", b""), lambda: store.exists("a"), store.list]
    for act in [*acts, lambda: store.path("a"), lambda: store.delete("a"), lambda: store.copy("a", "b")]:
        with pytest.raises(StoreError, match=r"cannot \w+ s3://.*: http://127.* does not answer: check"):
            act()


def test_a_store_without_conditional_create(s3: S3, monkeypatch) -> None:
    with forgetful(s3) as proxy:
        use(monkeypatch, proxy.environment())
        store = Store.open(f"s3://{BUCKET}/forgetful", create=True)
        with pytest.raises(StoreError, match=r"ignores conditional writes .*: use a store with"):
            check_conditional_create(store, "run")
        assert store.list() == []
    use(monkeypatch, s3.environment())
    monkeypatch.setenv("AWS_CONDITIONAL_PUT", "disabled")
    store = Store.open(f"s3://{BUCKET}/refusing", create=True)
    with pytest.raises(StoreError, match=r"refuses conditional writes"):
        check_conditional_create(store, "run")
    monkeypatch.delenv("AWS_CONDITIONAL_PUT")
    store = Store.open(f"s3://{BUCKET}/fine", create=True)
    store.create("a", b"1")
    with pytest.raises(Conflict):
        store.create("a", b"2")
    store.create("a", b"1")  # an answer that was lost: nothing stands in the way but our own object
    assert store.get("a") == b"1"


def test_of_two_writes_under_way_the_refused_one_is_tried_again(s3: S3, monkeypatch) -> None:
    class Conflicting(Proxy):
        endpoint, refusals = s3.url, ["once"]

        def ask(self, body: bytes) -> tuple[int, object, bytes]:
            again = self.command != "PUT" or not self.refusals
            return super().ask(body) if again else (409, {}, self.refusals.pop().encode())

    with proxied(Conflicting) as proxy:
        use(monkeypatch, proxy.environment())
        (store := Store.open(f"s3://{BUCKET}/conflicting", create=True)).create("a", b"1")
        assert store.get("a") == b"1" and not Conflicting.refusals


def test_a_large_object_is_copied_in_parts(s3: S3, monkeypatch) -> None:
    use(monkeypatch, s3.environment())
    monkeypatch.setattr(module, "COPIED_AT_ONCE", 2**20)
    monkeypatch.setattr(ranges, "PART", 5 * 2**20)  # S3 takes no smaller ones
    store = Store.open(f"s3://{BUCKET}/large #1?", create=True)
    data = random.Random(0).randbytes(12 * 2**20)
    store.put("a", data)
    store.copy("a", "b")
    assert Store.open(f"s3://{BUCKET}").get("large #1?/b") == data


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("ftp://host/c", "of an unknown kind"),
        ("s3://", "names no bucket"),
        ("file://elsewhere/c", "names the host"),
    ],
)
def test_urls_that_are_none(url: str, words: str, capsys) -> None:
    refused(command(capsys, "report", url), words)


def test_a_file_url_is_a_folder(tmp_path) -> None:
    store = Store.open(f"file://{tmp_path}/a%20b#1?", create=True)
    store.put("x", b"1")
    assert (tmp_path / "a b#1?/x").read_bytes() == b"1" and store.location == str(tmp_path / "a b#1?")
    assert Store.open(tmp_path / "a b#1?/..").location == str(tmp_path.resolve())
