"""Tar files as sources: what lies in any order is found, what is cut or forged is refused or named."""

import io
import json
import os
import tarfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from atoll.base.errors import AtollError, DataError
from atoll.data.formats import Reject
from atoll.data.settings import IngestConfig
from atoll.data.sources.files import find_files
from atoll.data.sources.record import Record
from atoll.data.sources.several import open_source
from atoll.data.sources.tar import LARGEST_TEXT, TarSource
from atoll.store.store import Store
from helpers import Run, refused, write_campaign
from helpers_data import encoded, ingest, packed, read
from s3 import S3, Proxy, proxied

Member = tuple[str, bytes]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATOLL_CACHE", str(tmp_path / "cache"))


def sample(name: str, seed: int = 0, **fields: Any) -> list[Member]:
    members = [(f"{name}.png", encoded(seed=seed)), (f"{name}.txt", f"picture {seed}".encode())]
    return members + ([(f"{name}.json", json.dumps(fields).encode())] if fields else [])


def many(count: int, first: int = 0) -> list[Member]:
    numbers = range(first, first + count)
    return [one for n in numbers for one in sample(f"{n:05d}", n, kind=n % 3, who=f"g{n}")]


def test_samples_are_found_in_any_order(tmp_path: Path) -> None:
    """All pictures first, then all texts backwards: webdataset would make twice as many halves of samples."""
    members = sorted(many(20), key=lambda member: member[0].rpartition(".")[2])
    texts = [member for member in members if not member[0].endswith("png")]
    shuffled = [member for member in members if member[0].endswith("png")] + texts[::-1]
    (tmp_path / "a.tar").write_bytes(packed(shuffled))
    (tmp_path / "b.tar").write_bytes(packed(many(30, 20), format=tarfile.PAX_FORMAT))
    good, bad = read(open_source(tmp_path, {"label": "kind", "group": "who"}))
    assert not bad
    assert [row.caption for row in good] == [f"picture {n}" for n in range(50)]
    assert [row.label for row in good] == [n % 3 for n in range(50)]
    assert [row.group for row in good] == [f"g{n}" for n in range(50)]
    assert [row.image for row in good] == [encoded(seed=n) for n in range(50)]
    assert good[20].key == "b.tar, 00020" and len({row.id for row in good}) == 50


def test_columns_of_json_and_class(tmp_path: Path) -> None:
    members = [
        ("7.jpg", encoded(kind="JPEG")),
        ("7.cls", b"3"),
        ("7.json", b'{"caption": "seven", "url": "x"}'),
    ]
    (tmp_path / "a.tar").write_bytes(packed(members))
    good, _ = read(open_source(tmp_path / "a.tar", {"label": "cls"}))
    assert [(row.caption, row.label, row.id) for row in good] == [("seven", 3, "a/7")]
    with pytest.raises(DataError, match=r"a\.tar has no column 'titel'.*it has cls, caption, url"):
        open_source(tmp_path / "a.tar", {"caption": "titel"})


def test_every_cut_is_found(tmp_path: Path) -> None:
    """A reader that stops where a tar stops would give the first samples and no word about the rest."""
    data = packed(many(3))
    end = len(data.rstrip(b"\0"))
    end += -end % 512
    path = tmp_path / "a.tar"
    for length in [*range(512, end + 1024, 512), *range(700, end, 997)]:
        path.write_bytes(data[:length])
        os.utime(path, ns=(length, length))
        with pytest.raises(DataError, match=r"a\.tar is cut off or damaged.*: fetch it again"):
            open_source(path)
    path.write_bytes(data[: end + 1024])
    assert len(open_source(path)) == 3


def flipped(data: bytes) -> bytes:
    """A bit of a later header is another one."""
    place = data.index(b"00001.png")
    return data[:place] + b"!" + data[place + 1 :]


def backwards(data: bytes) -> bytes:
    """A header whose size is negative leads back to itself."""
    head = bytearray(tarfile.TarInfo("x.png").tobuf())
    head[124:136] = b"\xff" * 10 + b"\xfc\x00"
    head[148:156] = b" " * 8
    head[148:156] = f"{sum(head):06o}\0 ".encode()
    return data[:512] + data[512 : data.index(b"00001.png")] + bytes(head) + bytes(1024)


def claims_terabytes(data: bytes) -> bytes:
    """A PAX header that would be read whole."""
    info = tarfile.TarInfo("x")
    info.type, info.size = tarfile.XHDTYPE, 2**40
    return info.tobuf(tarfile.GNU_FORMAT) + data


def chained(data: bytes) -> bytes:
    info = tarfile.TarInfo("x")
    info.type = tarfile.XHDTYPE
    return info.tobuf() * 3000 + data


@pytest.mark.parametrize("forge", [flipped, backwards, claims_terabytes, chained], ids=lambda f: f.__name__)
def test_damaged_headers_are_no_end(tmp_path: Path, forge: Callable[[bytes], bytes]) -> None:
    (tmp_path / "a.tar").write_bytes(forge(packed(many(3))))
    words = "a header of 1,099,511,627,776 bytes" if forge is claims_terabytes else "is cut off or damaged"
    with pytest.raises(DataError, match=words):
        open_source(tmp_path / "a.tar")


def test_tars_that_are_none_or_hold_more(tmp_path: Path) -> None:
    data = packed(many(2))
    for forged, words in [
        (data + data, "goes on after its end"),
        (b"", "is cut off or damaged"),
        (b"text, not a tar" * 100, "is cut off or damaged"),
        (b"\x1f\x8b" + data, "is compressed"),
        (packed([]), "hold no samples"),
        (packed([("README", b"x"), (".hidden.png", b"x")]), "hold no samples"),
    ]:
        (tmp_path / "a.tar").write_bytes(forged)
        with pytest.raises(DataError, match=words):
            open_source(tmp_path / "a.tar")


def test_hostile_members_are_named_and_never_followed(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    tricks = ["../../up", "/etc/root", "a/../b", "back\\slash", "new\nline", "x" * 300, "\udcff", "C:/x"]
    with tarfile.open(fileobj=buffer, mode="w", errors="surrogateescape") as tar:

        def add(*members: Member) -> None:
            for name, data in members:
                info = tarfile.TarInfo(name)
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))

        def special(name: str, kind: bytes, target: str = "") -> None:
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, target
            tar.addfile(info)

        add(*sample("good", 1))
        special("link.png", tarfile.SYMTYPE, "/etc/hostname")
        add(("link.txt", b"a link"))
        special("hard.png", tarfile.LNKTYPE, "good.png")
        special("pipe.png", tarfile.FIFOTYPE)
        special("device.png", tarfile.CHRTYPE)
        special("folder.png", tarfile.DIRTYPE)
        add(*sample("twice", 2), *sample("twice", 3))
        add(("only.txt", b"no picture"), ("alone.png", encoded()))
        add(("two.png", encoded()), ("two.jpg", encoded(kind="JPEG")), ("two.txt", b"x"))
        add(("latin.png", encoded()), ("latin.txt", "fünf".encode("latin-1")))
        add(("long.png", encoded()), ("long.txt", b"x" * (LARGEST_TEXT + 1)))
        add(("pickle.png", encoded()), ("pickle.txt", b"p"), ("pickle.pkl", b"\x80\x04cos\nsystem\n."))
        for name in tricks:
            add(*sample(name, 5))
    (tmp_path / "a.tar").write_bytes(buffer.getvalue())
    good, bad = read(open_source(tmp_path / "a.tar"))
    assert [row.key for row in good[:2]] == ["a.tar, good", "a.tar, pickle"]
    assert len(good) == 2 + len(tricks) and {row.caption for row in good[2:]} == {"picture 5"}
    assert {reject.key.removeprefix("a.tar, "): reject.reason for reject in bad} == {
        **dict.fromkeys(("link", "hard", "pipe", "device"), "no regular file"),
        "twice": "duplicate name",
        "only": "no picture",
        "alone": "empty caption",
        "two": "several pictures",
        "latin": "caption is not UTF-8",
        "long": "unreadable row",
    }
    assert [path.name for path in tmp_path.iterdir() if path.name != "cache"] == ["a.tar"]


def test_json_that_is_none(tmp_path: Path) -> None:
    bad = [b"{", b"[" * 10**5, b'{"caption": "\xff"}', b"7", b'{"caption": %s}' % (b"1" * 5000)]
    members = sample("ok", caption="fine", id="i")
    for n, data in enumerate(bad):
        members += [(f"{n}.png", encoded()), (f"{n}.json", data)]
    (tmp_path / "a.tar").write_bytes(packed(members))
    good, rejects = read(open_source(tmp_path / "a.tar", {"caption": "caption", "id": "id"}))
    assert [row.id for row in good] == ["i"]
    assert {reject.reason for reject in rejects} == {"unreadable row"} and len(rejects) == len(bad)


def test_a_huge_member_is_named_and_not_read(tmp_path: Path) -> None:
    """A sparse file of 600 MB on disk takes none of it in memory."""
    path, size = tmp_path / "a.tar", 600 * 2**20
    info = tarfile.TarInfo("huge.png")
    info.size = size
    with path.open("wb") as file:
        file.write(info.tobuf())
        file.seek(512 + size)
        file.write(packed([("huge.txt", b"x"), *sample("ok", 1)]))
    good, bad = read(open_source(path))
    assert [row.caption for row in good] == ["picture 1"]
    assert [(reject.reason, reject.detail) for reject in bad] == [("too large", f"{size:,} bytes")]


def test_patterns(tmp_path: Path, run: Run) -> None:
    for n in range(12):
        (tmp_path / f"{n:02d}.tar").write_bytes(packed(many(2, 2 * n)))
    for pattern, count in [("{00..11}.tar", 24), ("{03,05}.tar", 4), ("0[01].tar", 4), ("*.tar", 24)]:
        assert len(open_source(tmp_path / pattern)) == count
    with pytest.raises(DataError, match=r"holds no 12\.tar"):
        open_source(tmp_path / "{00..12}.tar")
    for wrong in ["{0..99999999}.tar", "pipe:cat 00.tar", "missing.tar", "*/00.tar"]:
        with pytest.raises(DataError):
            open_source(tmp_path / wrong)
    # As that of a folder is, a data set of other settings is not taken for this one.
    folder = write_campaign(tmp_path / "c", {"condition": "none", "data": {"source": "../{00..11}.tar"}})
    assert run("data", "ingest", folder).code == 0
    refused(run("data", "prepare", folder, "--set", "data.ingest.heldout=0.2"), "other settings")


def test_headers_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the tar changes; and one that changes between the look and the read is refused."""
    path = tmp_path / "a.tar"
    path.write_bytes(packed(many(4)))
    source = open_source(path)
    first = source.describe()["fingerprint"]
    with monkeypatch.context() as patched:
        patched.setattr("atoll.data.sources.tar.scan", lambda *_: pytest.fail("scanned again"))
        assert len(open_source(path)) == 4 and open_source(path).describe()["fingerprint"] == first
    path.write_bytes(packed(many(5)))
    with pytest.raises(DataError, match="changed while it was read"):
        list(source.records(0, 4))
    assert len(open_source(path)) == 5 and open_source(path).describe()["fingerprint"] != first


@pytest.fixture(params=["memory", "s3"])
def bucket(request: pytest.FixtureRequest) -> Store:
    if request.param == "memory":
        return Store.open(f"memory://{uuid.uuid4().hex}/some/where", create=True)
    return Store.open(f"{request.getfixturevalue('bucket_url')}/some where", create=True)


def test_tars_in_an_object_store(bucket: Store, tmp_path: Path) -> None:
    for n in range(3):
        bucket.put(f"{n}.tar", packed(many(10, 10 * n)))
    source = open_source(bucket.location, {"label": "kind"})
    good, bad = read(source)
    assert not bad and [row.caption for row in good] == [f"picture {n}" for n in range(30)]
    assert len(open_source(f"{bucket.location}/{{0..1}}.tar")) == 20
    assert len(open_source(f"{bucket.location}/2.tar")) == 10
    kept = [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert {path.suffix for path in kept} == {".jsonl"}  # what lies where, and no pictures
    bucket.put("1.tar", packed(many(10, 11)))
    with pytest.raises(AtollError, match=r"1\.tar changed while it was read"):
        list(source.records(10, 12))
    bucket.put("1.tar", packed(many(10, 11))[:2000])
    with pytest.raises(DataError, match=r"1\.tar is cut off"):
        open_source(bucket.location)
    with pytest.raises(AtollError):
        open_source(f"{bucket.location}/nowhere")


class Torn(Proxy):
    """Passes every other answer on by half, as a connection does that breaks."""

    count = 0

    def forward(self) -> None:
        type(self).count += 1
        status, headers, content = self.ask(self.rfile.read(int(self.headers.get("Content-Length", 0))))
        torn = self.command == "GET" and status == 206 and type(self).count % 2 == 0
        self.close_connection = torn
        self.answer(status, headers, content, half=torn)


@pytest.mark.parametrize("kind", ["tar", "parquet"])
def test_an_interrupted_read_is_taken_up_again(
    kind: str, s3: S3, bucket_url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    store = Store.open(bucket_url, create=True)
    if kind == "tar":
        store.put("a.tar", packed(many(12)))
    else:
        images = [{"bytes": encoded(seed=n)} for n in range(12)]
        texts = [f"picture {n}" for n in range(12)]
        pq.write_table(pa.table({"image": images, "text": texts}), tmp_path / "a.parquet", row_group_size=4)
        store.put("a.parquet", (tmp_path / "a.parquet").read_bytes())
    handler = type("Handler", (Torn,), {"endpoint": s3.url})
    with proxied(handler) as behind:
        monkeypatch.setenv("AWS_ENDPOINT_URL", behind.url)
        good, bad = read(open_source(store.location))
    assert not bad and [row.caption for row in good] == [f"picture {n}" for n in range(12)]
    assert [row.image for row in good] == [encoded(seed=n) for n in range(12)]
    assert handler.count > 6  # type: ignore[attr-defined]


def test_killed_in_the_middle_of_tars(tmp_path: Path, store: Store) -> None:
    """An ingest goes on at the first shard that is missing, and gives the bytes of one that never stopped."""
    tars = tmp_path / "tars"
    tars.mkdir()
    for n in range(3):
        (tars / f"{n}.tar").write_bytes(packed(many(10, 10 * n)))
    config = IngestConfig(size=8, shard_rows=8, heldout=0.2)
    whole = ingest(open_source(tars), store, "whole", config)

    class Killed(TarSource):
        def records(self, start: int, stop: int) -> Iterator[Record | Reject]:
            for number, item in enumerate(super().records(start, stop), start=start):
                if number == 19:
                    raise KeyboardInterrupt
                yield item

    with pytest.raises(KeyboardInterrupt):
        ingest(Killed(find_files(tars, ".tar")), store, "torn", config)
    assert store.exists("torn/rows/00001.json") and not store.exists("torn/rows/00002.json")
    torn = ingest(open_source(tars), store, "torn", config)
    keys = [key.removeprefix("whole/") for key in store.list("whole")]
    assert [store.get(f"torn/{key}") for key in keys] == [store.get(f"whole/{key}") for key in keys]
    assert len(torn) == len(whole) == 30
