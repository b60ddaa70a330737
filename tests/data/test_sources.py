"""The same rows from every kind of source, several sources at once, several captions, and first rows."""

import json
import os
import uuid
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from atoll.base.errors import AtollError, ConfigError, DataError
from atoll.campaign.settings.campaign import CampaignConfig
from atoll.data.dataset import OPTIONAL, ROWS, WEIGHTS, DataSet
from atoll.data.settings import IngestConfig, SourceConfig
from atoll.data.sources.folder import FolderSource
from atoll.data.sources.record import Record
from atoll.data.sources.several import open_source, open_sources
from atoll.data.sources.tar import TarSource
from atoll.data.subsets import union, write_subset
from atoll.data.weights import weigh_sources
from atoll.store.store import Store
from helpers import Answer, command, refused
from helpers_data import encoded, ingest, packed, read
from whole import run, sets

COLUMNS = {"caption": "caption", "group": "concept", "label": "n", "id": "id"}
COUNTS = {"fluent": 7, "google": 12, "openmoji": 5, "twitter": 9}
"""Files of a small collection in four styles, and their rows."""
TOTAL = sum(COUNTS.values())
CONFIG = IngestConfig(size=8, shard_rows=8, heldout=0.2, **COLUMNS)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ATOLL_CACHE", "HF_HOME"):
        monkeypatch.setenv(name, str(tmp_path / "cache" / name))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def rows(style: str) -> list[dict[str, Any]]:
    return [
        {
            "id": f"{style}-{n}",
            "bytes": encoded(kind="JPEG" if n % 2 else "PNG", seed=100 * len(style) + n),
            "caption": f"thing {n}, {style} ✨",
            "concept": f"thing {n}",
            "n": n,
            "licence": "MIT" if n % 2 else None,
        }
        for n in range(COUNTS[style])
    ]


def table(style: str) -> pa.Table:
    made = [{**row, "image": {"bytes": row.pop("bytes"), "path": None}} for row in rows(style)]
    return pa.Table.from_pylist(made)


def as_parquet(folder: Path) -> str:
    for style in COUNTS:
        pq.write_table(table(style), folder / f"{style}.parquet", row_group_size=4)
    return str(folder)


def as_folder(folder: Path) -> str:
    """One table for all images, some of which lie in a folder below it."""
    lines = []
    (folder / "below").mkdir()
    for style in COUNTS:
        for row in rows(style):
            name = f"{style}-{row['n']:03d}.{'jpg' if row['n'] % 2 else 'png'}"
            name = f"below/{name}" if style == "google" else name
            (folder / name).write_bytes(row.pop("bytes"))
            lines.append(json.dumps({**row, "file_name": name}))
    (folder / "metadata.jsonl").write_text("\n".join(lines))
    return str(folder)


def as_tar(folder: Path) -> str:
    for style in COUNTS:
        members = []
        for row in rows(style):
            picture, name = row.pop("bytes"), f"{row['n']:03d}"
            members += [(f"{name}.json", json.dumps(row).encode()), (f"{name}.jpg", picture)]
        (folder / f"{style}.tar").write_bytes(packed(members))
    return str(folder)


def as_hub_arrow(folder: Path) -> str:
    for style in COUNTS:
        with pa.OSFile(str(folder / f"{style}.arrow"), "wb") as file:
            made = table(style)
            with pa.ipc.new_stream(file, made.schema) as writer:
                writer.write_table(made)
    return f"hf://{folder}"


def as_s3(folder: Path) -> str:
    store = Store.open(f"memory://{uuid.uuid4().hex}/x", create=True)
    for path in Path(as_parquet(folder)).iterdir():
        store.put(path.name, path.read_bytes())
    return store.location


WAYS: dict[str, Callable[[Path], str]] = {one.__name__: one for one in (as_parquet, as_folder, as_tar)}
WAYS |= {f"{name} of a hub": lambda folder, way=way: f"hf://{way(folder)}" for name, way in WAYS.items()}
WAYS |= {"as_hub_arrow": as_hub_arrow, "as_s3": as_s3}


def content(dataset: DataSet) -> list[dict[str, Any]]:
    """Rows but for where the source has them, with their pictures."""
    return [
        {**row, "key": None, "picture": np.asarray(dataset.image(n)).tolist()}
        for n, row in enumerate(dataset.table().to_pylist())
    ]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> DataSet:
    root = tmp_path_factory.mktemp("plain")
    (root / "source").mkdir()
    store = Store.open(root / "data", create=True)
    return ingest(open_sources(as_parquet(root / "source"), CONFIG), store, "", CONFIG)


@pytest.fixture(params=WAYS)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The same rows as every kind of source."""
    (tmp_path / "source").mkdir()
    return WAYS[request.param](tmp_path / "source")


class TestSourceContract:
    """What every source holds to: a new one is a function of `WAYS`."""

    def test_rows_are_those_of_any_other(self, place: str, plain: DataSet, store: Store) -> None:
        dataset = ingest(open_sources(place, CONFIG), store, "b", CONFIG)
        assert content(dataset) == content(plain)
        every = [row for style in COUNTS for row in rows(style)]
        for name, named in COLUMNS.items():
            assert dataset.table()[name].to_pylist() == [row[named] for row in every]
        assert dataset.split("heldout").tolist() == plain.split("heldout").tolist()
        assert dataset.table().column_names == ROWS.names

    def test_positions_fingerprints_and_columns(self, place: str) -> None:
        source = open_source(place, COLUMNS)
        whole = list(source.records(0, len(source)))
        assert len(whole) == len(source) == TOTAL
        for start, stop in [(0, 1), (5, 8), (6, 20), (18, 25), (TOTAL - 1, TOTAL + 9), (4, 4)]:
            assert list(source.records(start, stop)) == whole[start:stop]
        bare = open_source(place, {"caption": "caption"})
        assert len({record.id for record in read(bare)[0]}) == TOTAL  # by their places
        fingerprint = source.describe()["fingerprint"]
        assert open_source(place, COLUMNS).describe()["fingerprint"] == fingerprint
        assert bare.describe()["fingerprint"] != fingerprint
        with pytest.raises(DataError, match="has no column 'captoin'"):
            open_source(place, {"caption": "captoin"})


def test_a_folder_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a" / "locked").mkdir(parents=True)
    pq.write_table(table("fluent"), tmp_path / "a" / "0.parquet")
    scandir = os.scandir

    def denied(path: str) -> Any:
        if str(path).endswith("locked"):
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", denied)
    with pytest.raises(DataError, match="a/locked: Permission denied: check path and access"):
        open_source(tmp_path / "a")


def test_nothing_is_guessed(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    for text in ["", "glyph", str(tmp_path / "missing"), str(tmp_path / "notes.txt")]:
        with pytest.raises(DataError):
            open_source(text)
    with pytest.raises(DataError, match="holds no images"):
        open_source(tmp_path)
    with pytest.raises(ConfigError, match="unknown key 'captoin'"):
        open_source("glyphs", {"captoin": "text"})
    with pytest.raises(DataError, match="no columns"):
        open_source("glyphs", {"group": "concept"})


# Folders.


def test_folder_with_csv_and_a_named_column(folder: Path) -> None:
    (folder / "metadata.jsonl").unlink()
    lines = ['file_name,title,"n"', '0.png,"one, two\nthree",1', "1.jpg,,2", "2.png,zwei,2,3"]
    (folder / "metadata.csv").write_text("\n".join(lines), encoding="utf-8-sig")
    good, bad = read(open_source(folder, {"caption": "title"}))
    assert [row.caption for row in good] == ["one, two\nthree", ""]
    assert sorted(reject.reason for reject in bad) == ["no caption"] * 4 + ["unreadable row"]


def test_folder_with_text_files(folder: Path) -> None:
    (folder / "metadata.jsonl").unlink()
    (folder / "0.txt").write_text("zero")
    (folder / "more/4.txt").write_bytes("fünf".encode("latin-1"))
    (folder / ".hidden.png").write_bytes(b"")
    good, bad = read(open_source(folder))
    assert [row.caption for row in good] == ["zero"]
    assert [r.reason for r in bad if r.key == "more/4.png"] == ["caption is not UTF-8"]
    assert len(bad) == 5
    with pytest.raises(DataError, match="no columns to choose from"):
        open_source(folder, {"group": "who"})


@pytest.mark.parametrize(
    ("name", "text", "options", "words"),
    [
        ("metadata.jsonl", "", {}, "no readable row"),
        ("metadata.csv", "file_name,text\n0.png,x\n", {}, "both"),
        (
            "more/metadata.jsonl",  # captions in one file only
            '{"file_name": "4.png", "kind": 1}',
            {"label": "kind"},
            r"more/metadata.jsonl has no column 'text'",
        ),
    ],
)
def test_folders_that_are_refused(
    name: str, text: str, options: dict[str, str], words: str, folder: Path
) -> None:
    (folder / name).write_text(text)
    with pytest.raises(DataError, match=words):
        open_source(folder, options)


def test_a_stray_quote_in_a_csv_is_an_error_and_swallows_no_rows(folder: Path) -> None:
    (folder / "metadata.jsonl").unlink()
    (folder / "metadata.csv").write_text('file_name,text\n0.png,zero\n1.jpg,"one\n2.png,two\n')
    with pytest.raises(DataError, match="not readable CSV"):
        open_source(folder)


def test_folder_with_labels_and_no_captions(folder: Path) -> None:
    lines = (folder / "metadata.jsonl").read_text().splitlines()
    kinds = [3, "4", 5.0, -1, float("nan"), "1_2"]
    made = []
    for line, kind in zip(lines, kinds, strict=True):
        row = {**json.loads(line), "kind": kind}
        del row["text"]
        made.append(json.dumps(row))
    (folder / "metadata.jsonl").write_text("\n".join(made))
    good, bad = read(open_source(folder, {"label": "kind"}))
    assert [(row.caption, row.label) for row in good] == [("3", 3), ("4", 4), ("5", 5)]
    assert [reject.reason for reject in bad] == ["empty caption"] * 2 + ["label is no integer"]
    with pytest.raises(DataError, match=r"none of text.*data.ingest.caption.*data.ingest.label"):
        open_source(folder)


def test_hostile_rows_are_named_not_followed(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "secret.png").write_bytes(b"secret")
    (folder / "link.png").symlink_to("link.png")
    rows = [
        {"file_name": "../secret.png", "text": "climbs"},
        {"file_name": str(tmp_path / "secret.png"), "text": "absolute"},
        {"file_name": "a\\..\\b.png", "text": "backslash"},
        {"file_name": "a\0b.png", "text": "nul"},
        {"file_name": "", "text": "empty"},
        {"file_name": "x" * 5000, "text": "long"},
        {"file_name": 7, "text": "number"},
        {"file_name": "link.png", "text": "to itself"},
        {"file_name": "0.png", "text": 12},
        {"file_name": "1.jpg", "text": None},
        {"file_name": "2.png", "text": "ok", "kind": "cat"},
        {"file_name": "3.jpg", "text": "ok", "kind": 10**40},
    ]
    lines = [json.dumps(row).encode() for row in rows] + [b"{not json", b"[1]", b'{"text": "\xff"}', b""]
    (folder / "metadata.jsonl").write_bytes(b"\n".join(lines))
    good, bad = read(open_source(folder, {"label": "kind"}))
    assert not good
    expected = {"unsafe path": 4, "missing file": 3, "unreadable row": 3, "label is no integer": 2}
    expected |= {"caption is not text": 1, "empty caption": 1, "unreadable": 1, "no caption": 2}
    assert Counter(reject.reason for reject in bad) == expected


def test_the_fingerprint_follows_every_change(folder: Path) -> None:
    def fingerprint() -> str:
        return str(open_source(folder).describe()["fingerprint"])

    first = fingerprint()
    os.utime(folder / "0.png", ns=(1, 1))
    touched = fingerprint()
    text = (folder / "metadata.jsonl").read_text()
    (folder / "metadata.jsonl").write_text(text.replace("picture 3", "picture three"))
    assert len({first, touched, fingerprint()}) == 3


# Parquet.


def pictures(data: list[bytes | None], **columns: list[object]) -> pa.Table:
    images = [None if picture is None else {"bytes": picture, "path": "x.png"} for picture in data]
    return pa.table({"image": images, **columns})


def test_parquet_files_of_folders_below_and_captions_of_the_usual_names(tmp_path: Path) -> None:
    (tmp_path / "p/deep").mkdir(parents=True)
    pq.write_table(pictures([encoded(seed=0)], prompt=["zero"]), tmp_path / "p/a.parquet")
    pq.write_table(pictures([encoded(seed=1)], prompt=["one"]), tmp_path / "p/deep/b.parquet")
    good, _ = read(open_source(tmp_path / "p"))
    assert [(row.caption, row.image) for row in good] == [("zero", encoded(seed=0)), ("one", encoded(seed=1))]


def test_parquet_rejects(tmp_path: Path) -> None:
    wrong = pa.array([b"fine", b"caf\xe9", b"", None, b"x"]).cast(pa.binary()).view(pa.string())
    made = pictures([encoded()] * 4 + [None], caption=[""] * 5, n=[1, -1, 2, 3, 4])
    pq.write_table(made.set_column(1, "caption", wrong), tmp_path / "x.parquet")
    good, bad = read(open_source(tmp_path / "x.parquet", {"label": "n"}))
    assert [(row.caption, row.label) for row in good] == [("fine", 1), ("", 2)]
    assert [reject.reason for reject in bad] == ["caption is not UTF-8", "empty caption", "no picture"]


def test_parquet_with_labels_and_no_captions(tmp_path: Path) -> None:
    seen = []
    # Labels that are put right make another source, though size and footer stay; a copy is the same.
    for labels in ([0, 999, -1, None], [999, 0, -1, None], [0, 999, -1, None]):
        pq.write_table(pictures([encoded(seed=n) for n in range(4)], label=labels), tmp_path / "b.parquet")
        seen.append(open_source(tmp_path, {"label": "label"}).describe()["fingerprint"])
    assert seen[0] == seen[2] != seen[1]
    good, bad = read(open_source(tmp_path, {"label": "label"}))
    assert [(row.caption, row.label) for row in good] == [("0", 0), ("999", 999)]
    assert [reject.reason for reject in bad] == ["empty caption"] * 2
    for name in ("a", "c"):  # captions in one file only, whichever comes first
        other = tmp_path / f"{name}.parquet"
        pq.write_table(pictures([encoded()], label=[1], caption=["one"]), other)
        with pytest.raises(DataError, match=r"b\.parquet has no column 'caption'"):
            open_source(tmp_path, {"label": "label"})
        other.unlink()


def test_parquet_that_is_none_or_damaged(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    path.write_text("not parquet")
    with pytest.raises(DataError, match="not a readable parquet file"):
        open_source(path)
    for made, words in (
        (pictures([encoded()], title=["x"]), "image, title, but none of text, caption, prompt"),
        (pa.table({"a": [1], "text": ["x"]}), "pictures"),
    ):
        pq.write_table(made, path)
        with pytest.raises(DataError, match=words):
            open_source(path)
    pq.write_table(pictures([encoded()] * 4, text=["x"] * 4), path, compression="zstd", use_dictionary=False)
    data = path.read_bytes()
    path.write_bytes(data[:8] + bytes(192) + data[200:])
    source = open_source(path)
    with pytest.raises(DataError, match=r"cannot read .*x\.parquet"):
        list(source.records(0, 4))


# Several sources.


@pytest.fixture
def two(tmp_path: Path) -> dict[str, SourceConfig]:
    """A tar and a folder whose ids are the same."""
    for name in ("t", "f"):
        (tmp_path / name).mkdir()
    first = SourceConfig(source=as_tar(tmp_path / "t"), weight=3, licence="CC0", **COLUMNS)  # type: ignore[arg-type]
    named = {"caption": "caption", "id": "id", "licence": "CC-BY", "licence_column": "licence"}
    return {"tars": first, "web": SourceConfig(source=as_folder(tmp_path / "f"), **named)}  # type: ignore[arg-type]


def test_several_sources_tell_source_and_licence(two: dict[str, SourceConfig], store: Store) -> None:
    source = open_sources(two, CONFIG)
    assert len(source) == 2 * TOTAL
    whole = list(source.records(0, 2 * TOTAL))
    for start in (0, 5, 31, 32, 33, 34, 60, 66):
        for stop in (start, start + 1, start + 8, 99):
            assert list(source.records(start, min(stop, 2 * TOTAL))) == whole[start:stop]
    dataset = ingest(source, store, "d", CONFIG)
    stored = dataset.table().to_pylist()
    assert dataset.table().column_names == [*ROWS.names, "source", "licence"]
    assert [row["source"] for row in stored] == ["tars"] * TOTAL + ["web"] * TOTAL
    assert {row["licence"] for row in stored[:TOTAL]} == {"CC0"}
    assert [row["licence"] for row in stored[TOTAL:]] == [
        "MIT" if n % 2 else "CC-BY" for style in COUNTS for n in range(COUNTS[style])
    ]
    assert len(set(dataset.ids)) == 2 * TOTAL and dataset.ids[TOTAL] == "web-fluent-0"
    assert stored[0]["key"] == "tars: fluent.tar, 000"
    about = dataset.manifest.source
    assert about["name"] == "tars, web" and about["licence"] == "tars: CC0; web: CC-BY"
    assert set(about["sources"]) == {"tars", "web"}
    dataset.write_values(WEIGHTS, {"name": "opt-out"}, np.ones(len(dataset), dtype=np.float32))
    weigh_sources(dataset, {"tars": 3, "web": 1})
    assert dataset.weights.tolist() == [3] * TOTAL + [1] * TOTAL
    dataset.write_values(WEIGHTS, {"name": "filter"}, np.ones(len(dataset), dtype=np.float32))
    weigh_sources(dataset, {"tars": 3, "web": 1})  # what came later is not written over
    assert dataset.weights.tolist() == [1] * 2 * TOTAL
    part = write_subset(dataset, np.array([0, TOTAL, TOTAL + 1]), store, "p", [WEIGHTS])
    assert part.table(["source", "licence"]).to_pylist()[2] == {"source": "web", "licence": "MIT"}
    assert union(store, "u", [part], [WEIGHTS]).table().column_names == dataset.table().column_names


def test_what_a_source_does_not_say_is_as_for_a_single_one(tmp_path: Path) -> None:
    def first(**settings: Any) -> tuple[str, str | None, int | None, str | None]:
        source = open_sources({"web": SourceConfig(source=str(tmp_path), **settings)}, CONFIG)
        record = next(iter(source.records(0, 1)))
        assert isinstance(record, Record)
        return record.id, record.group, record.label, record.licence

    as_folder(tmp_path)
    assert first() == ("web-fluent-0", "thing 0", 0, "not stated")
    assert first(group="", licence="MIT") == ("web-fluent-0", None, 0, "MIT")
    assert len(open_sources({"drawn": SourceConfig(source="glyphs")}, CONFIG))  # they have no columns
    with pytest.raises(DataError, match=r"data\.source\.web\.label: .* has no column 'kind'"):
        first(label="kind")


def test_the_order_and_names_of_sources_count_and_their_weights_do_not(two: dict[str, SourceConfig]) -> None:
    def fingerprint(**changes: Any) -> str:
        web = two["web"].model_copy(update=changes)
        return str(open_sources({**two, "web": web}, CONFIG).describe()["fingerprint"])

    first = fingerprint()
    assert fingerprint(weight=9) == first == fingerprint(group="concept")  # as data.ingest has it
    assert len({first, fingerprint(group="caption"), fingerprint(licence="CC-BY-SA")}) == 3
    with pytest.raises(ConfigError, match="cannot name a source"):
        open_sources({"a-b": two["web"]}, CONFIG)
    with pytest.raises(ConfigError, match="names no source"):
        open_sources({}, CONFIG)
    data = {"path": "d", "source": {name: source.model_dump() for name, source in two.items()}}
    with pytest.raises(ConfigError, match=r"weights differ.*data\.weighted=true"):
        CampaignConfig.parse({"data": data}, "x")
    CampaignConfig.parse({"data": {**data, "weighted": True}}, "x")


def captioned(way: str, folder: Path) -> str:
    """Three rows with two captions, one, and none."""
    lists = [["one", "eins"], ["two"], ["", " "]]
    folder.mkdir()
    if way == "parquet":
        images = [{"bytes": encoded(seed=n)} for n in range(3)]
        pq.write_table(pa.table({"image": images, "caption": lists}), folder / "a.parquet")
    members = []
    for n, captions in enumerate(lists):
        text, data = "\n".join(captions), json.dumps({"caption": captions})
        members += [(f"{n}.png", encoded(seed=n))]
        members += [(f"{n}.json", data.encode()) if way == "tar json" else (f"{n}.txt", text.encode())]
        if way in ("texts", "jsonl"):
            (folder / f"{n}.png").write_bytes(encoded(seed=n))
        if way == "texts":
            (folder / f"{n}.txt").write_text(text)
    if way == "jsonl":
        made = [json.dumps({"file_name": f"{n}.png", "caption": names}) for n, names in enumerate(lists)]
        (folder / "metadata.jsonl").write_text("\n".join(made))
    if way.startswith("tar"):
        (folder / "a.tar").write_bytes(packed(members))
    return str(folder)


@pytest.mark.parametrize("way", ["parquet", "jsonl", "texts", "tar json", "tar text"])
def test_several_captions(way: str, tmp_path: Path, store: Store) -> None:
    place = captioned(way, tmp_path / "x")
    config = IngestConfig(size=8, captions=True, heldout=0)
    dataset = ingest(open_sources(place, config), store, "d", config)
    assert dataset.table(["caption", "captions"]).to_pylist() == [
        {"caption": "one", "captions": ["one", "eins"]},
        {"caption": "two", "captions": ["two"]},
    ]
    assert dataset.manifest.rejects == {"empty caption": 1}
    assert [name for name in dataset.table().column_names if name in OPTIONAL.names] == ["captions"]
    if way in ("texts", "tar text"):  # as ever
        caption = next(iter(open_sources(place, IngestConfig()).records(0, 1)))
        assert isinstance(caption, Record) and caption.caption == "one\neins" and caption.captions == ()
    else:
        with pytest.raises(DataError, match=r"rows of .* are no use: several captions .*captions=true"):
            open_sources(place, IngestConfig())


def test_captions_that_are_none(tmp_path: Path) -> None:
    values = [["a", 7], ["a", None], [], "b\n\n c ", 5, None]
    made = []
    for n, value in enumerate(values):
        (tmp_path / f"{n}.png").write_bytes(encoded())
        made.append(json.dumps({"file_name": f"{n}.png", "text": value}))
    (tmp_path / "metadata.jsonl").write_text("\n".join(made))
    source = open_source(tmp_path, {"captions": True})
    items = list(source.records(0, len(source)))
    found = [item.captions if isinstance(item, Record) else item.reason for item in items]
    assert found[:3] == ["caption is not text", ("a",), "empty caption"]
    assert found[3:] == [("b", " c "), "caption is not text", "empty caption"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"caption": "n"}, ["caption is not text (fluent.parquet, row 0", "data.ingest.caption"]),
        ({"label": "concept"}, ["label is no integer", "'thing 0'", "data.ingest.label"]),
        ({"id": "nothing"}, ["no id", "data.ingest.id"]),
        ({"group": "nope"}, ["data.ingest.group: ", "has no column 'nope'"]),
        ({"image": "caption"}, ["but 'caption' holds no pictures", "data.ingest.image"]),
    ],
)
def test_first_rows_tell_which_setting_is_wrong(
    options: dict[str, str], words: list[str], tmp_path: Path
) -> None:
    for style, count in COUNTS.items():
        empty = pa.array([None] * count, pa.string())
        pq.write_table(table(style).append_column("nothing", empty), tmp_path / f"{style}.parquet")
    with pytest.raises(AtollError) as raised:
        open_sources(str(tmp_path), IngestConfig(**options))
    assert all(text in str(raised.value) for text in words)


def test_several_sources_from_the_command_line(
    two: dict[str, SourceConfig], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Paths of the shell, weights as a column, and a campaign that goes on with them."""
    campaign = tmp_path / "c"
    settings = {"data.path": campaign / "data", "data.ingest.size": 8, "data.weighted": True}
    run("new", campaign, *sets(settings))
    plain = {name: source.model_dump(exclude_defaults=True) for name, source in two.items()}

    def ingested() -> Answer:
        return command(capsys, "data", "ingest", campaign, "--set", f"data.source={json.dumps(plain)}")

    plain["tars"]["caption"] = "n"
    refused(ingested(), "caption is not text", "data.source.tars.caption")
    assert not (campaign / "data").exists()  # nothing is made before the first rows are looked at
    plain["tars"]["caption"] = "caption"
    answer = ingested()
    assert answer.code == 0 and "66 rows of tars, web" in answer.out
    assert ingested().out == answer.out  # finished: found
    plain["tars"]["weight"] = 5
    assert ingested().code == 0
    assert set(DataSet.open(Store.open(campaign / "data")).weights.tolist()) == {5, 1}
    plain["tars"]["labl"] = "n"
    refused(ingested(), "labl", "did you mean 'label'?")


def test_what_lies_in_a_folder_is_accounted_for(tmp_path: Path) -> None:
    """A reject takes a position as a row does; links are named; a text counts beside a table elsewhere."""
    folder, other = tmp_path / "a", tmp_path / "b"
    for place in (folder, folder / "below", other):
        place.mkdir()
        (place / "0.png").write_bytes(encoded())
        (place / "1.png").write_bytes(encoded(seed=1))
        (place / "1.txt").write_text("one")
    (folder / "link").symlink_to(other)
    (folder / "metadata.jsonl").write_text('{"file_name": "0.png", "text": "zero"}\n')
    source = FolderSource(folder)
    records, rejects = read(source)
    assert [record.caption for record in records] == ["zero", "one", "one"]
    assert [reject.reason for reject in rejects] == ["no caption", "linked folder"]
    (folder / "below/0.png").unlink()
    assert FolderSource(folder).describe()["fingerprint"] != source.describe()["fingerprint"]
    # As img2dataset writes it: a table of metadata beside each tar.
    (other / "00000.tar").write_bytes(packed([("0.png", encoded()), ("0.txt", b"zero")]))
    pq.write_table(pa.table({"caption": ["zero"], "url": ["x"]}), other / "00000.parquet")
    for name in ("0.png", "1.png"):
        (other / name).unlink()
    assert isinstance(open_source(other), TarSource)
