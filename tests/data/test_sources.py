import json
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from atoll.base.errors import ConfigError, DataError
from atoll.data.formats import Reject
from atoll.data.records import Record, Source
from atoll.data.settings import SourceOptions
from atoll.data.sources import open_source
from helpers_data import encoded


def read(source: Source) -> tuple[list[Record], list[Reject]]:
    found = list(source.records(0, len(source)))
    assert len(found) == len(source)
    return [r for r in found if isinstance(r, Record)], [r for r in found if isinstance(r, Reject)]


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


def test_folder_with_jsonl(folder: Path) -> None:
    good, bad = read(open_source(folder, {"label": "kind", "group": "who"}))
    assert not bad
    assert [row.caption for row in good] == [f"picture {n}" for n in range(6)]
    assert [row.label for row in good] == [0, 1, 2, 0, 1, 2]
    assert [row.group for row in good] == ["g0", "g0", "g1", "g1", "g2", "g2"]
    assert good[4].key == "more/4.png"
    assert good[4].image == (folder / "more/4.png").read_bytes()


def test_folder_with_csv_and_a_named_column(folder: Path) -> None:
    (folder / "metadata.jsonl").unlink()
    lines = ['file_name,title,"n"', '0.png,"one, two\nthree",1', "1.jpg,,2", "2.png,zwei,2,3"]
    (folder / "metadata.csv").write_text("\n".join(lines), encoding="utf-8-sig")
    good, bad = read(open_source(folder, {"caption": "title"}))
    assert [row.caption for row in good] == ["one, two\nthree", ""]
    assert sorted(reject.reason for reject in bad) == ["no caption"] * 4 + ["unreadable row"]


def test_a_stray_quote_in_a_csv_is_an_error_and_swallows_no_rows(folder: Path) -> None:
    (folder / "metadata.jsonl").unlink()
    (folder / "metadata.csv").write_text('file_name,text\n0.png,zero\n1.jpg,"one\n2.png,two\n')
    with pytest.raises(DataError, match="not a readable CSV file"):
        open_source(folder)


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
    (folder / "0.txt").unlink()
    (folder / "more/4.txt").unlink()
    with pytest.raises(DataError, match="no captions"):
        open_source(folder)


def test_a_wrong_column_names_what_is_there(folder: Path) -> None:
    with pytest.raises(DataError, match=r"no column 'captoin'.*file_name, text, kind, who"):
        open_source(folder, {"caption": "captoin"})
    (folder / "metadata.jsonl").write_text('{"file_name": "0.png", "title": "x"}')
    with pytest.raises(DataError, match="file_name, title, but none of text, caption, prompt"):
        open_source(folder)
    (folder / "metadata.jsonl").write_text('{"name": "0.png", "text": "x"}')
    with pytest.raises(DataError, match="not file_name"):
        open_source(folder)
    (folder / "metadata.jsonl").write_text("")
    with pytest.raises(DataError, match="no readable row"):
        open_source(folder)
    (folder / "metadata.csv").write_text("file_name,text\n0.png,x\n")
    with pytest.raises(DataError, match="both"):
        open_source(folder)


def test_folder_with_labels_and_no_captions(folder: Path) -> None:
    table = folder / "metadata.jsonl"
    rows = [json.loads(line) for line in table.read_text().splitlines()]
    kinds = [3, "4", 5.0, -1, None, "cat"]
    for row, kind in zip(rows, kinds, strict=True):
        row["kind"] = kind
        del row["text"]
    table.write_text("".join(json.dumps(row) + "\n" for row in rows))
    good, bad = read(open_source(folder, {"label": "kind"}))
    assert [(row.caption, row.label) for row in good] == [("3", 3), ("4", 4), ("5", 5)]
    assert [reject.reason for reject in bad] == ["empty caption"] * 2 + ["label is no integer"]
    with pytest.raises(
        DataError, match=r"none of text, caption, prompt.*data.ingest.caption.*data.ingest.label"
    ):
        open_source(folder)
    with pytest.raises(DataError, match="no column 'text'"):
        open_source(folder, {"label": "kind", "caption": "text"})
    more = json.dumps({"file_name": "4.png", "text": "four", "kind": 1})
    (folder / "more/metadata.jsonl").write_text(more)  # captions in one file only
    with pytest.raises(DataError, match=r"images/metadata.jsonl has no column 'text'"):
        open_source(folder, {"label": "kind"})


def test_hostile_rows_are_named_not_followed(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "secret.png").write_bytes(b"secret")
    (folder / "link.png").symlink_to(tmp_path / "gone.png")
    rows = [
        {"file_name": "../secret.png", "text": "climbs"},
        {"file_name": str(tmp_path / "secret.png"), "text": "absolute"},
        {"file_name": "a\\..\\b.png", "text": "backslash"},
        {"file_name": "a\0b.png", "text": "nul"},
        {"file_name": "", "text": "empty"},
        {"file_name": "x" * 5000, "text": "long"},
        {"file_name": 7, "text": "number"},
        {"file_name": "missing.png", "text": "missing"},
        {"file_name": "0.png", "text": 12},
        {"file_name": "1.jpg", "text": None},
        {"file_name": "2.png", "text": "ok", "kind": "cat"},
        {"file_name": "3.jpg", "text": "ok", "kind": 10**40},
    ]
    lines = [json.dumps(row).encode() for row in rows] + [b"{not json", b"[1]", b'{"text": "\xff"}', b""]
    (folder / "metadata.jsonl").write_bytes(b"\n".join(lines))
    good, bad = read(open_source(folder, {"label": "kind"}))
    assert not good
    reasons = [reject.reason for reject in bad]
    assert reasons.count("unsafe path") == 4
    assert reasons.count("missing file") == 4
    assert reasons.count("unreadable row") == 3
    assert reasons.count("label is no integer") == 2
    assert "caption is not text" in reasons
    assert "empty caption" in reasons
    assert reasons.count("no caption") == 3


def test_the_fingerprint_follows_every_change(folder: Path) -> None:
    def fingerprint(**options: str) -> str:
        return str(open_source(folder, SourceOptions(**options)).describe()["fingerprint"])

    first = fingerprint()
    assert fingerprint() == first
    assert fingerprint(group="who") != first
    os.utime(folder / "0.png", ns=(1, 1))
    touched = fingerprint()
    assert touched != first
    text = (folder / "metadata.jsonl").read_text()
    (folder / "metadata.jsonl").write_text(text.replace("picture 3", "picture three"))
    assert fingerprint() != touched


def table(pictures: list[bytes | None], **columns: list[object]) -> pa.Table:
    images = [None if data is None else {"bytes": data, "path": "x.png"} for data in pictures]
    return pa.table({"image": images, **columns})


def test_parquet_of_many_files_and_row_groups(tmp_path: Path) -> None:
    data = [encoded(seed=n) for n in range(100)]
    captions = [f"number {n}" for n in range(100)]
    (tmp_path / "p/deep").mkdir(parents=True)
    pq.write_table(table(data[:70], prompt=captions[:70]), tmp_path / "p/a.parquet", row_group_size=9)
    pq.write_table(table(data[70:], prompt=captions[70:]), tmp_path / "p/deep/b.parquet", row_group_size=50)
    source = open_source(tmp_path / "p")
    assert len(source) == 100
    for start, stop in [(0, 100), (5, 8), (8, 10), (63, 75), (70, 71), (99, 200), (40, 40)]:
        found = list(source.records(start, stop))
        assert [row.caption for row in found] == captions[start:stop]  # type: ignore[union-attr]
        assert [row.image for row in found] == data[start:stop]  # type: ignore[union-attr]
    ids = [row.id for row in read(source)[0]]
    assert len(set(ids)) == 100


def test_parquet_rejects(tmp_path: Path) -> None:
    wrong = pa.array([b"fine", b"caf\xe9", b"", None, b"x"]).cast(pa.binary()).view(pa.string())
    made = table([encoded(), encoded(), encoded(), encoded(), None], caption=[""] * 5, n=[1, -1, 2, 3, 4])
    pq.write_table(made.set_column(1, "caption", wrong), tmp_path / "x.parquet")
    good, bad = read(open_source(tmp_path / "x.parquet", {"label": "n"}))
    assert [(row.caption, row.label) for row in good] == [("fine", 1), ("", 2)]
    assert [reject.reason for reject in bad] == ["caption is not UTF-8", "empty caption", "no picture"]


def test_parquet_with_labels_and_no_captions(tmp_path: Path) -> None:
    labels = [0, 999, -1, None]
    pq.write_table(table([encoded(seed=n) for n in range(4)], label=labels), tmp_path / "b.parquet")
    good, bad = read(open_source(tmp_path, {"label": "label"}))
    assert [(row.caption, row.label) for row in good] == [("0", 0), ("999", 999)]
    assert [reject.reason for reject in bad] == ["empty caption"] * 2
    with pytest.raises(DataError, match="none of text, caption, prompt"):
        open_source(tmp_path)
    for name in ("a", "c"):  # captions in one file only, whichever comes first
        other = tmp_path / f"{name}.parquet"
        pq.write_table(table([encoded()], label=[1], caption=["one"]), other)
        with pytest.raises(DataError, match=r"b\.parquet has no column 'caption'"):
            open_source(tmp_path, {"label": "label"})
        other.unlink()


def test_parquet_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "text.parquet").write_text("not parquet")
    with pytest.raises(DataError, match="not a readable parquet file"):
        open_source(tmp_path / "text.parquet")
    pq.write_table(table([encoded()], title=["x"]), tmp_path / "y.parquet")
    with pytest.raises(DataError, match="image, title, but none of text, caption, prompt"):
        open_source(tmp_path / "y.parquet")
    pq.write_table(pa.table({"a": [1], "text": ["x"]}), tmp_path / "z.parquet")
    with pytest.raises(DataError, match="pictures"):
        open_source(tmp_path / "z.parquet")


def test_damaged_parquet_says_where(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    pq.write_table(table([encoded()] * 4, text=["x"] * 4), path, compression="zstd", use_dictionary=False)
    data = bytearray(path.read_bytes())
    data[8:200] = bytes(192)
    path.write_bytes(data)
    source = open_source(path)
    with pytest.raises(DataError, match=r"cannot read .*x\.parquet"):
        list(source.records(0, 4))
