"""What benchmarks on emoji share: a small campaign by category, a cluster a style, and its runs at once."""

import argparse
import io
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from harness import child, parsed, parser, run_command
from PIL import Image

from atoll.base.errors import AtollError
from atoll.campaign.settings.launch import merged
from atoll.encoders.vision import vision_encoder

SETTINGS: dict[str, Any] = {
    "seed": 0,
    "condition": "class",
    "data": {
        "ingest": {"size": 32, "mode": "rgb", "heldout": 0.1, "group": "concept", "label": "label"},
        "vae": "none",
    },
    "partition": {"method": "column", "column": "source"},
    "network": {"family": "dit", "size": "nano", "patch": 4, "depth": 4, "heads": 3, "head_width": 32},
    "train": {"batch": 64, "lr": 1e-3, "lr_schedule": "cosine", "validations": 1, "previews": 0},
    "router": {"patch": 8, "depth": 2, "heads": 2, "head_width": 32, "train": {"batch": 64, "lr": 1e-3}},
    "budget": {"samples": 400_000, "expert_batch": 64},
    "sampling": {"steps": 25, "guidance": 2.0, "routing": "top-1"},
    "compare": {"samples": 1000, "guidance": 2.0, "strategies": ["top-1"]},
}
JUDGE = "efficientnet-lite2"
"""Its package holds its weights; a machine without it has pixels."""


def words_of(doc: str | None, quick: str, jobs: str) -> argparse.ArgumentParser:
    """The options that both have."""
    words = parser(doc, quick)
    words.add_argument("folder", type=Path, nargs="?", help="parquet files of emoji")
    words.add_argument("--samples", type=int, default=SETTINGS["budget"]["samples"], help="of the budget")
    words.add_argument("--jobs", type=int, default=8, help=f"{jobs} at a time")
    return words


def options_of(words: argparse.ArgumentParser, work: Callable[..., Any]) -> argparse.Namespace:
    """What is asked for: a folder of emoji, or `--quick`."""
    options = parsed(words, work)
    if options.quick == (options.folder is not None):
        options.error("give a folder of parquet files, or --quick")
    return options


def partitioned(folder: Path, emoji: Path | None, changes: Mapping[str, Any]) -> tuple[Path, dict[str, Any]]:
    """A campaign below a folder up to its partition, and its settings; without emoji its images are drawn."""
    base, sources = folder / "base", folder / "sources"
    for made in (base, sources):
        made.mkdir(parents=True, exist_ok=True)
    tables = {"one": drawn(0), "two": drawn(1)}
    if emoji is not None:
        tables = {path.stem: pq.read_table(path) for path in sorted(emoji.glob("*.parquet"))}
    known = sorted({name for table in tables.values() for name in table.column("category").to_pylist()})
    for name, table in tables.items():
        numbers = [known.index(category) for category in table.column("category").to_pylist()]
        labels = pa.array(numbers, pa.int64())
        pq.write_table(table.append_column("label", labels), sources / f"{name}.parquet")
    try:
        vision_encoder(JUDGE, 64)
        judge = JUDGE
    except AtollError:
        judge = "pixels"
    content = {name: {"source": str(sources / f"{name}.parquet")} for name in tables}
    own: dict[str, Any] = {
        "data": {"path": str(folder / "data"), "source": content},
        "partition": {"k": len(tables)},
        "compare": {"extractor": judge},
    }
    settings = merged(merged(SETTINGS, own), changes)
    (base / "campaign.yaml").write_text(yaml.safe_dump(settings))
    run_command("data", "prepare", base)
    run_command("partition", base)
    return base, settings


def drawn(number: int) -> pa.Table:
    """150 images of coloured rectangles."""
    source, rows = np.random.default_rng(number), list[dict[str, Any]]()
    for n in range(150):
        picture, side = np.full((32, 32, 3), 255, np.uint8), int(source.integers(8, 24))
        picture[:side, : side + number * 8] = source.integers(0, 255, 3)
        data = io.BytesIO()
        Image.fromarray(picture).save(data, "PNG")
        image, concept = {"bytes": data.getvalue(), "path": None}, f"{number} {n}"
        category = "large" if side > 16 else "small"
        rows.append({"image": image, "caption": concept, "concept": concept, "category": category})
    return pa.Table.from_pylist(rows)


def side_by_side(
    script: str, pool: Executor, calls: Sequence[Mapping[str, Any]], **environment: str
) -> list[Any]:
    """What `work` of a script gives for each call, in processes of one thread."""
    started, environment = time.monotonic(), {"OMP_NUM_THREADS": "1", **environment}
    found = list(pool.map(lambda call: child(script, environment=environment, **call), calls))
    print(f"  {len(calls)} processes in {time.monotonic() - started:.0f} s", flush=True)
    return found
