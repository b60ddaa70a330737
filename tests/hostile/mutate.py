"""Mutations of files that Atoll reads: of their structure where they have one, of their bytes where not."""

import io
import json
import os
import re
import tarfile
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from atoll.base.hashing import digest, sha256
from hostile.arena import replace

NUMBERS = [0, -1, 1, 2, 255, 2**31, 2**63, -(2**63), 10**40]
TEXTS = ["", " ", "x", "nan", "../x", "../../../etc/passwd", "/etc/passwd", "a\0b", "a\nb", "~nobody/x"]
VALUES: list[Callable[[Random], Any]] = [
    lambda r: None,
    lambda r: r.choice([True, False]),
    lambda r: r.choice(NUMBERS),
    lambda r: r.choice([0.0, -0.5, 1e-300, 1e308, -1e308]),
    lambda r: r.choice(TEXTS),
    lambda r: r.choice(["é" * 300, "\u202e", "{{ 7 * 7 }}", "<script>", "s3://a:SECRET@b/c", "none"]),
    lambda r: "x" * r.choice([300, 5_000, 200_000]),
    lambda r: r.choice([[], {}, [[]], [None], [1, 2], {"": 1}, {"name": "x"}]),
    lambda r: json.loads("[" * (levels := r.choice([5, 60, 150])) + "1" + "]" * levels),
]


def places(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of all values within plain data, the whole first."""
    found = [path]
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in list(items)[:200]:
        found += places(value, (*path, key))
    return found


def value_at(tree: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def structure(tree: Any, random: Random) -> tuple[Any, str]:
    """Plain data with one value replaced, removed, moved or multiplied, and what was done."""
    path = random.choice(places(tree))
    if not path:
        return random.choice(VALUES)(random), "all of it"
    group, last = value_at(tree, path[:-1]), path[-1]
    acts = ["replace", "replace", "number", "remove", "rename", "repeat", "swap"]
    value, act = group[last], random.choice(acts)
    if act == "number" and isinstance(value, int | float) and not isinstance(value, bool):
        group[last] = random.choice([value + 1, value - 1, -value, value * 10**9, value / 2, str(value)])
    elif act == "remove":
        del group[last]
    elif act == "rename" and isinstance(group, dict):
        group[str(last) + "x"] = group.pop(last)
    elif act == "repeat" and isinstance(group, list):
        group.extend([value] * random.choice([1, 3, 100]))
    elif act == "swap":
        group[last] = json.loads(json.dumps(value_at(tree, random.choice(places(tree)))))
    else:
        act, group[last] = "replace", random.choice(VALUES)(random)
    return tree, f"{act} {'.'.join(map(str, path))}"


def bytes_of(data: bytes, random: Random) -> tuple[bytes, str]:
    """Bytes with some flipped, cut off, inserted or repeated, and what was done."""
    act = random.choice(("flip", "flip", "cut", "insert", "repeat", "empty", "digits", "zero"))
    at = random.randrange(len(data) + 1)
    if act == "flip" and data:
        changed = bytearray(data)
        for _ in range(random.choice([1, 1, 4, 64])):
            changed[random.randrange(len(data))] ^= 1 << random.randrange(8)
        return bytes(changed), act
    if act == "cut":
        return data[:at], act
    if act == "zero":
        return data[:at] + bytes(len(data) - at), act
    more = {"repeat": data[max(0, at - 100) : at], "digits": b"9" * 5_000}
    if act == "insert":
        more[act] = random.randbytes(random.choice([1, 8, 400]))
    return (data[:at] + more[act] + data[at:], act) if act in more else (b"", "empty")


def _json(data: bytes, random: Random) -> tuple[bytes, str]:
    tree, act = structure(json.loads(data), random)
    return json.dumps(tree).encode(), act


def _safetensors(data: bytes, random: Random) -> tuple[bytes, str]:
    length = int.from_bytes(data[:8], "little")
    header, act = _json(data[8 : 8 + length], random)
    return len(header).to_bytes(8, "little") + header + data[8 + length :], f"header: {act}"


def _lines(data: bytes, random: Random) -> tuple[bytes, str]:
    lines = data.splitlines()
    at = random.randrange(len(lines))
    lines[at], act = _json(lines[at], random)
    return b"\n".join(lines) + b"\n", f"line {at}: {act}"


def _parquet(data: bytes, random: Random) -> tuple[bytes, str]:
    table = pq.read_table(io.BytesIO(data))
    at = random.randrange(table.num_columns) if table.num_columns else 0
    names, columns = list(table.column_names), list(table.columns)
    act = random.choice(("drop", "twice", "rename", "nulls", "type", "type", "rows", "empty", "tree"))
    if act == "drop":
        del names[at], columns[at]
    elif act == "twice":
        names.append(names[at])
        columns.append(columns[random.randrange(len(columns))])
    elif act == "rename":
        names[at] = random.choice(["", "x" * 5_000, "a\0b", "\u202e", *table.column_names])
    elif act in ("nulls", "type"):
        odd = [None, 2**63 - 1, -1.5, float("nan"), "x", b"\xff", [[1]], {"a": {"b": 1}}, "../x", "é" * 9]
        columns[at] = pa.array([None if act == "nulls" else random.choice(odd)] * table.num_rows)
    elif act == "tree":
        values = columns[at].to_pylist()
        if values:
            tree, act = structure(json.loads(json.dumps(values, default=repr)), random)
            tree = tree if isinstance(tree, list) else [tree]
            columns[at] = pa.array([json.dumps(value) for value in tree][: table.num_rows])
            columns[at] = pa.array([*columns[at].to_pylist(), *[None] * table.num_rows][: table.num_rows])
    result = pa.table(columns, names=names)
    if act in ("rows", "empty"):
        result = result.slice(0, 0 if act == "empty" else max(0, table.num_rows - 1))
    written = io.BytesIO()
    pq.write_table(result, written)
    return written.getvalue(), f"table: {act}"


def _tar(data: bytes, random: Random) -> tuple[bytes, str]:
    written, act = io.BytesIO(), random.choice(("name", "name", "kind", "size", "twice", "pax", "data"))
    with tarfile.open(fileobj=io.BytesIO(data)) as old, tarfile.open(fileobj=written, mode="w") as new:
        members = old.getmembers()
        at = random.randrange(len(members))
        for number, info in enumerate(members):
            content = old.extractfile(info)
            body = content.read() if content is not None else b""
            if number == at:
                if act == "name":
                    info.name = random.choice(
                        ["../x.png", "/etc/x.png", "x" * 300, "a\nb.png", ".png", "0.png/x"]
                    )
                elif act == "kind":
                    info.type, info.linkname = bytes([random.choice(b"123456gxLK")]), "/etc/hostname"
                elif act == "pax":
                    info.pax_headers = {
                        random.choice(["path", "size", "comment", "GNU.sparse.map"]): "9" * 400
                    }
                elif act == "data":
                    body, act = bytes_of(body, random)
                    info.size = len(body)
                elif act == "twice":
                    new.addfile(info, io.BytesIO(body))
            new.addfile(info, io.BytesIO(body))
    result = written.getvalue()
    if act == "size":
        header = bytearray(result[:512])
        header[124:136] = random.choice([b"77777777777\0", b"00000000000\0", b"-0000000001\0", b"\xff" * 12])
        header[148:156] = b" " * 8
        header[148:156] = b"%06o\0 " % sum(header)
        result = bytes(header) + result[512:]
    return result, f"tar: {act}"


def linked(path: Path, beside: Path, random: Random) -> str:
    """Put a link or a pipe where a file was, and say which."""
    targets = {
        "device": "/dev/zero",
        "loop": path.name,
        "folder": ".",
        "outside": str(beside),
        "none": "nowhere",
    }
    path.unlink()
    if (kind := random.choice(["pipe", *targets])) == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(targets[kind])
    return f"link: {kind}"


def _yaml(data: bytes, random: Random) -> tuple[bytes, str]:
    if random.random() < 0.5:
        tree, act = structure(yaml.safe_load(data), random)
        return yaml.safe_dump(tree).encode(), f"tree: {act}"
    lines = data.decode().splitlines()
    at = random.choice(
        [n for n, line in enumerate(lines) if ":" in line and not line.lstrip().startswith("#")]
    )
    key, _, value = lines[at].partition(":")
    act = random.choice(("value", "value", "key", "twice", "indent", "alias"))
    text = json.dumps(random.choice(VALUES)(random))
    odd = ["!!python/name:os.system", "2024-13-45", "0x_", "[", "*a"]
    lines[at] = {
        "value": f"{key}: {random.choice([text, text.strip(chr(34)), *odd])}",
        "key": f"{key}x:{value}",
        "twice": f"{lines[at]}\n{lines[at]}",
        "indent": f"  {lines[at]}",
        "alias": f"{key}: &a [1, *a]",
    }[act]
    return "\n".join(lines).encode(), f"line {at}: {act}"


KINDS = {".json": _json, ".jsonl": _lines, ".parquet": _parquet, ".safetensors": _safetensors}
KINDS |= {".tar": _tar, ".yaml": _yaml}


def mutated(path: Path, random: Random) -> tuple[bytes, str]:
    """What a file is changed to, and how."""
    data = path.read_bytes()
    structured = data and path.suffix in KINDS and random.random() < 0.75
    return (KINDS[path.suffix] if structured else bytes_of)(data, random)


def agree(root: Path, path: Path) -> None:
    """Make digests agree with a changed file, as a forger would: of cards, log entries and manifests."""
    if path.name == "config.json" and (card := path.with_name("card.json")).is_file():
        tree, config = _tree(card), _tree(path)
        if isinstance(tree, dict) and config is not None:
            replace(card, json.dumps({**tree, "config_sha256": digest(config)}).encode())
    if path.parent.name == "log" and isinstance(tree := _tree(path), dict):
        tree.pop("digest", None)
        replace(path, json.dumps({**tree, "digest": digest(tree)}).encode())
    for _ in range(2):  # a column is named by no file, a card by a manifest that may be named itself
        for manifest in sorted(root.rglob("*.json")):
            if re.search(r"(manifest|column|ensemble|init|COMMIT)\.json$", manifest.name):
                _relist(manifest)


def _relist(manifest: Path) -> None:
    tree = _tree(manifest)
    before = json.dumps(tree)
    for entry in _groups(tree):
        if isinstance(entry.get("path"), str) and "sha256" in entry:
            try:
                data = (manifest.parent / entry["path"]).read_bytes()
            except (OSError, ValueError):
                continue
            values = {"bytes": len(data), "sha256": sha256(data)}
            entry.update({key: value for key, value in values.items() if key in entry})
    if (after := json.dumps(tree)) != before:
        replace(manifest, after.encode())


def _groups(tree: Any) -> list[dict[str, Any]]:
    rest, groups = [tree], []
    while rest:  # trees may be deeper than calls may be
        value = rest.pop()
        groups += [value] if isinstance(value, dict) else []
        rest += value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
    return groups


def _tree(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
