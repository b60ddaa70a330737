"""The same rows from every kind of source, several sources at once, several captions, and first rows."""

import io
import json
import tarfile
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from atoll.base.errors import ConfigError, DataError
from atoll.campaign.settings.campaign import CampaignConfig
from atoll.data.dataset import OPTIONAL, ROWS, WEIGHTS, DataSet
from atoll.data.ingest import ingest
from atoll.data.records import Record
from atoll.data.settings import IngestConfig, SourceConfig, SourceOptions
from atoll.data.sources import open_source, open_sources
from atoll.data.subsets import union, write_subset
from atoll.data.weights import weigh_sources
from atoll.store.store import Store
from helpers import Answer, command, refused
from helpers_data import encoded
from whole import run, sets

COLUMNS = {"caption": "caption", "group": "concept", "label": "n", "id": "id"}
COUNTS = {"fluent": 7, "google": 12, "openmoji": 5, "twitter": 9}
"""Files of a small collection in four styles, and their rows."""
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
    lines = []
    for style in COUNTS:
        for row in rows(style):
            name = f"{style}-{row['n']:03d}.{'jpg' if row['n'] % 2 else 'png'}"
            (folder / name).write_bytes(row.pop("bytes"))
            lines.append(json.dumps({**row, "file_name": name}))
    (folder / "metadata.jsonl").write_text("\n".join(lines))
    return str(folder)


def as_tar(folder: Path) -> str:
    for style in COUNTS:
        with tarfile.open(folder / f"{style}.tar", "w") as tar:
            for row in rows(style):
                picture = row.pop("bytes")
                for ending, data in (("json", json.dumps(row).encode()), ("jpg", picture)):
                    info = tarfile.TarInfo(f"{row['n']:03d}.{ending}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
    return str(folder)


def as_hub_parquet(folder: Path) -> str:
    return f"hf://{as_parquet(folder)}"


def as_hub_tar(folder: Path) -> str:
    return f"hf://{as_tar(folder)}"


def as_hub_arrow(folder: Path) -> str:
    for style in COUNTS:
        with pa.OSFile(str(folder / f"{style}.arrow"), "wb") as file:
            made = table(style)
            with pa.ipc.new_stream(file, made.schema) as writer:
                writer.write_table(made)
    return f"hf://{folder}"


def as_hub_images(folder: Path) -> str:
    return f"hf://{as_folder(folder)}"


def as_s3(folder: Path) -> str:
    store = Store.open(f"memory://{uuid.uuid4().hex}/x", create=True)
    for path in Path(as_parquet(folder)).iterdir():
        store.put(path.name, path.read_bytes())
    return store.location


WAYS = (as_parquet, as_folder, as_tar, as_s3, as_hub_parquet, as_hub_tar, as_hub_arrow, as_hub_images)


def content(dataset: DataSet) -> list[dict[str, Any]]:
    """Rows but for where the source has them, with their pictures."""
    found = dataset.table().to_pylist()
    return [
        {**row, "key": None, "picture": np.asarray(dataset.image(n)).tolist()} for n, row in enumerate(found)
    ]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_every_way_gives_the_same_rows(way: Any, tmp_path: Path, store: Store) -> None:
    (tmp_path / "plain").mkdir()
    (tmp_path / "other").mkdir()
    plain = ingest(open_sources(as_parquet(tmp_path / "plain"), CONFIG), store, "a", CONFIG)
    other = ingest(open_sources(way(tmp_path / "other"), CONFIG), store, "b", CONFIG)
    assert content(other) == content(plain) and len(plain) == sum(COUNTS.values())
    assert other.split("heldout").tolist() == plain.split("heldout").tolist()
    assert other.table().column_names == ROWS.names


def two(tmp_path: Path) -> dict[str, SourceConfig]:
    """A tar and a folder whose ids are the same."""
    for name in ("t", "f"):
        (tmp_path / name).mkdir()
    first = SourceConfig(source=as_tar(tmp_path / "t"), weight=3, licence="CC0", **COLUMNS)  # type: ignore[arg-type]
    second = SourceConfig(
        source=as_folder(tmp_path / "f"),
        caption="caption",
        id="id",
        licence="CC-BY",
        licence_column="licence",
    )
    return {"tars": first, "web": second}


def test_several_sources_tell_source_and_licence(tmp_path: Path, store: Store) -> None:
    named = two(tmp_path)
    source = open_sources(named, CONFIG)
    count = sum(COUNTS.values())
    assert len(source) == 2 * count
    mended = {**named, "web": named["web"].model_copy(update={"licence": "CC-BY-SA"})}
    assert open_sources(mended, CONFIG).describe()["fingerprint"] != source.describe()["fingerprint"]
    dataset = ingest(source, store, "d", CONFIG)
    found = dataset.table().to_pylist()
    assert dataset.table().column_names == [*ROWS.names, "source", "licence"]
    assert [row["source"] for row in found] == ["tars"] * count + ["web"] * count
    assert {row["licence"] for row in found[:count]} == {"CC0"}
    assert [row["licence"] for row in found[count:]] == [
        "MIT" if n % 2 else "CC-BY" for style in COUNTS for n in range(COUNTS[style])
    ]
    assert len(set(dataset.ids)) == 2 * count and dataset.ids[count] == "web-fluent-0"
    assert found[0]["key"] == "tars: fluent.tar, 000"
    about = dataset.manifest.source
    assert about["name"] == "tars, web" and about["licence"] == "tars: CC0; web: CC-BY"
    assert set(about["sources"]) == {"tars", "web"}
    weigh_sources(dataset, {"tars": 3, "web": 1})
    assert dataset.weights.tolist() == [3] * count + [1] * count
    dataset.write_values(WEIGHTS, {"name": "filter"}, np.ones(len(dataset), dtype=np.float32))
    weigh_sources(dataset, {"tars": 3, "web": 1})  # what came later is not written over
    assert dataset.weights.tolist() == [1] * 2 * count
    rows = np.array([0, count, count + 1])
    part = write_subset(dataset, rows, store, "p", [WEIGHTS])
    assert part.table(["source", "licence"]).to_pylist()[2] == {"source": "web", "licence": "MIT"}
    assert union(store, "u", [part], [WEIGHTS]).table().column_names == dataset.table().column_names


def test_what_a_source_does_not_say_is_as_for_a_single_one(tmp_path: Path) -> None:
    bare = open_sources({"web": SourceConfig(source=as_folder(tmp_path))}, CONFIG)
    first = next(iter(bare.records(0, 1)))
    assert isinstance(first, Record)
    assert (first.id, first.group, first.label) == ("web-fluent-0", "thing 0", 0)
    bare = open_sources({"web": SourceConfig(source=str(tmp_path), group="", licence="MIT")}, CONFIG)
    first = next(iter(bare.records(0, 1)))
    assert isinstance(first, Record)
    assert (first.id, first.group, first.licence) == ("web-fluent-0", None, "MIT")
    assert len(open_sources({"drawn": SourceConfig(source="glyphs")}, CONFIG))  # they have no columns
    wrong = SourceConfig(source=str(tmp_path), label="kind")
    with pytest.raises(DataError, match=r"data\.source\.web\.label: .* has no column 'kind'"):
        open_sources({"web": wrong}, CONFIG)


@pytest.mark.parametrize("start", [0, 5, 31, 32, 33, 34, 60, 66])
def test_positions_of_several_sources(tmp_path: Path, start: int) -> None:
    source = open_sources(two(tmp_path), CONFIG)
    whole = list(source.records(0, len(source)))
    for stop in (start, start + 1, start + 8, 99):
        assert list(source.records(start, min(stop, len(source)))) == whole[start:stop]


def test_the_order_and_names_of_sources_count_and_their_weights_do_not(tmp_path: Path) -> None:
    named = two(tmp_path)

    def fingerprint(**changes: SourceConfig) -> str:
        return str(open_sources({**named, **changes}, CONFIG).describe()["fingerprint"])

    first = fingerprint()
    assert fingerprint(web=named["web"].model_copy(update={"weight": 9})) == first
    assert fingerprint(web=named["web"].model_copy(update={"group": "caption"})) != first
    assert (
        fingerprint(web=named["web"].model_copy(update={"group": "concept"})) == first
    )  # as data.ingest has it
    with pytest.raises(ConfigError, match="cannot name a source"):
        open_sources({"a-b": named["web"]}, CONFIG)
    with pytest.raises(ConfigError, match="names no source"):
        open_sources({}, CONFIG)
    with pytest.raises(ConfigError, match=r"weights differ.*data\.weighted=true"):
        CampaignConfig.parse({"data": {"path": "d", "source": named}}, "x")
    CampaignConfig.parse({"data": {"path": "d", "source": named, "weighted": True}}, "x")


def captioned(way: str, folder: Path) -> str:
    """Three rows with two captions, one, and none."""
    lists = [["one", "eins"], ["two"], ["", " "]]
    folder.mkdir()
    if way == "parquet":
        pictures = [{"bytes": encoded(seed=n)} for n in range(3)]
        pq.write_table(pa.table({"image": pictures, "caption": lists}), folder / "a.parquet")
        return str(folder)
    for n, captions in enumerate(lists):
        (folder / f"{n}.png").write_bytes(encoded(seed=n))
        if way == "texts":
            (folder / f"{n}.txt").write_text("\n".join(captions))
    if way == "jsonl":
        made = [json.dumps({"file_name": f"{n}.png", "caption": one}) for n, one in enumerate(lists)]
        (folder / "metadata.jsonl").write_text("\n".join(made))
    if way.startswith("tar"):
        with tarfile.open(folder / "a.tar", "w") as tar:
            for n, captions in enumerate(lists):
                tar.add(folder / f"{n}.png", f"{n}.png")
                data = json.dumps({"caption": captions}) if way == "tar json" else "\n".join(captions)
                info = tarfile.TarInfo(f"{n}.{'json' if way == 'tar json' else 'txt'}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data.encode()))
        return str(folder / "a.tar")
    return str(folder)


@pytest.mark.parametrize("way", ["parquet", "jsonl", "texts", "tar json", "tar text"])
def test_several_captions(way: str, tmp_path: Path, store: Store) -> None:
    place = captioned(way, tmp_path / "x")
    config = IngestConfig(size=8, captions=True, heldout=0)
    dataset = ingest(open_sources(place, config), store, "d", config)
    found = dataset.table(["caption", "captions"]).to_pylist()
    assert found == [
        {"caption": "one", "captions": ["one", "eins"]},
        {"caption": "two", "captions": ["two"]},
    ]
    assert dataset.manifest.rejects == {"empty caption": 1}
    assert [name for name in dataset.table().column_names if name in OPTIONAL.names] == ["captions"]
    if way in ("texts", "tar text"):  # as ever
        caption = next(iter(open_sources(place, SourceOptions()).records(0, 1)))
        assert isinstance(caption, Record) and caption.caption == "one\neins" and caption.captions == ()
    else:
        with pytest.raises(DataError, match=r"rows of .* are no use: several captions .*captions=true"):
            open_sources(place, SourceOptions())


def test_captions_that_are_none(tmp_path: Path) -> None:
    lines = [["a", 7], ["a", None], [], "b\n\n c ", 5, None]
    (tmp_path / "x").mkdir()
    made = []
    for n, line in enumerate(lines):
        (tmp_path / f"x/{n}.png").write_bytes(encoded())
        made.append(json.dumps({"file_name": f"{n}.png", "text": line}))
    (tmp_path / "x/metadata.jsonl").write_text("\n".join(made))
    source = open_source(tmp_path / "x", {"captions": True})
    found = list(source.records(0, len(source)))
    assert [item.captions if isinstance(item, Record) else item.reason for item in found] == [
        "caption is not text",
        ("a",),
        "empty caption",
        ("b", " c "),
        "caption is not text",
        "empty caption",
    ]


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
    options: dict[str, str], words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for style, count in COUNTS.items():
        empty = pa.array([None] * count, pa.string())
        pq.write_table(table(style).append_column("nothing", empty), tmp_path / f"{style}.parquet")
    campaign = tmp_path / "c"
    run("new", campaign, *sets({"data.path": campaign / "data"}))
    settings = {"data.source": tmp_path, **{f"data.ingest.{name}": value for name, value in options.items()}}
    answer = command(capsys, "data", "ingest", campaign, *sets(settings))
    refused(answer, *words)
    assert not (campaign / "data").exists()


def test_several_sources_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Paths of the shell, weights as a column, and a campaign that goes on with them."""
    named, campaign = two(tmp_path), tmp_path / "c"
    run(
        "new", campaign, *sets({"data.path": campaign / "data", "data.ingest.size": 8, "data.weighted": True})
    )
    plain = {name: one.model_dump(exclude_defaults=True) for name, one in named.items()}

    def ingested() -> Answer:
        return command(capsys, "data", "ingest", campaign, "--set", f"data.source={json.dumps(plain)}")

    answer = ingested()
    assert answer.code == 0 and "66 rows of tars, web" in answer.out and "column weights" in answer.out
    assert ingested().out == answer.out  # finished: found
    plain["tars"]["weight"] = 5
    assert ingested().code == 0
    weights = DataSet.open(Store.open(campaign / "data")).weights
    assert set(weights.tolist()) == {5, 1}
    plain["tars"]["labl"] = "n"
    refused(ingested(), "labl", "did you mean 'label'?")
