"""Shuffled latents as a training step reads them: Atoll's columns against three loaders.

    python benchmarks/loading.py [--quick] [--peers PYTHON] [--rows N] [--json PATH]

400,000 latents of 4 x 32 x 32 in float16 (quick: 20,000) lie on disk as each loader keeps them: Atoll's
shards, WebDataset's tar files, litData's chunks, an Arrow file of Hugging Face's `datasets`. Every loader
gives whole shuffled batches of 256 as one tensor. A peer has 0 and 2 worker processes, and the better
number counts. Atoll and the peer take turns in one call; a ratio is the median over pairs of turns. Files
lie in memory as far as they fit, for all.

Atoll's resume is a fresh process that goes on in the middle of an epoch: from the folder to its first
batch, without the imports. A run also holds every file against its hash before its first step, which is
told apart.

Peers are imported by the Python of `--peers`, a virtual environment of their own:

    python -m venv PEERS
    PEERS/bin/pip install webdataset==1.0.2 datasets==5.2.0 torch numpy
    PEERS/bin/pip install --no-deps litdata==0.2.76       # asks for torchvision, which it does not need here

One that is missing is left out, and the JSON says so.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from harness import finish, median_row

from atoll.data.dataset import ROWS, DataSet, to_parquet
from atoll.data.formats import Manifest, Shard
from atoll.data.order import Order
from atoll.store.manifest import write_file
from atoll.store.store import Store

PEERS = ("webdataset", "litdata", "datasets")
SHAPE, BATCH, SHARD = (4, 32, 32), 256, 1024
SCRIPT = Path(__file__).with_name("loading_peers.py")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="20,000 rows, fewer turns")
    parser.add_argument("--rows", type=int, help="latents (quick: 20,000, else 400,000)")
    parser.add_argument("--peers", default=sys.executable, help="Python of the peers' virtual environment")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--work", nargs=2, help=argparse.SUPPRESS)  # what a child process measures
    options = parser.parse_args()
    if options.work:
        kind, folder = options.work
        print(json.dumps(resumed(Path(folder)) if kind == "resume" else turn(Path(folder))))
        return
    rows = options.rows or (20_000 if options.quick else 400_000)
    with tempfile.TemporaryDirectory(prefix="atoll-loading-") as work:
        lines, missing = measure(Path(work), rows, options.peers, 1 if options.quick else 3)
    finish("loading", lines, options.json, {"rows_of_data": rows, "missing": missing})


def measure(work: Path, rows: int, python: str, turns: int) -> tuple[list[dict[str, Any]], list[str]]:
    """Lines of the table, and the peers that could not be imported."""
    own = work / "atoll"
    write(own, rows)
    lines, missing, speeds = [], list[str](), list[float]()
    for peer in PEERS:
        about = peer_says(python, "version", peer)
        if about is None:
            missing.append(peer)
            continue
        folder = work / peer
        peer_says(python, "write", peer, folder, rows)
        pairs, workers = list[tuple[float, float]](), set[int]()
        for _ in range(turns):
            mine = child("turn", own)["rows_a_second"]
            theirs = [peer_says(python, "turn", peer, folder, rows, count) for count in (0, 2)]
            best = max((one for one in theirs if one), key=lambda one: one["rows_a_second"])
            workers.add(best["workers"])
            pairs.append((mine, best["rows_a_second"]))
        shutil.rmtree(folder)
        speeds += [mine for mine, _ in pairs]
        case = f"{peer} {about['version']}"
        lines.append(median_row(case, f"rows a second ({max(workers)} workers)", [b for _, b in pairs], "/s"))
        ratios = [a / b for a, b in pairs]
        lines.append(median_row("Atoll", f"rows a second / {peer}'s", ratios, target=(">=", 2.0)))
    resumes = [child("resume", own) for _ in range(turns)]
    speeds = speeds or [child("turn", own)["rows_a_second"]]
    lines.insert(0, median_row("Atoll", "rows a second", speeds, "/s"))
    firsts = [one["first_batch"] for one in resumes]
    lines.append(median_row("Atoll, resumed", "first batch", firsts, "s", target=("<=", 1.0)))
    lines.append(median_row("Atoll, resumed", "hashes of all files", [one["hashes"] for one in resumes], "s"))
    return lines, missing


def child(kind: str, folder: Path) -> Any:
    """A measurement in a process of its own."""
    done = subprocess.run(
        [sys.executable, __file__, "--work", kind, str(folder)], check=True, capture_output=True, text=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def peer_says(python: str, *words: str | int | Path) -> Any:
    """What `loading_peers.py` prints as JSON; None where the peer cannot be imported."""
    done = subprocess.run([python, str(SCRIPT), *map(str, words)], capture_output=True, text=True)
    if done.returncode == 3:
        return None
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, words))}:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def write(folder: Path, rows: int) -> None:
    """A data set of as many latents, all of them training rows."""
    store, shards = Store.open(folder, create=True), []
    for start in range(0, rows, SHARD):
        count = min(SHARD, rows - start)
        constant = {
            "caption": "",
            "label": 0,
            "width": 256,
            "height": 256,
            "key": "",
            "sha256": "",
            "group": "",
        }
        columns = {"id": [f"{start + n:08d}" for n in range(count)]}
        columns |= {name: [value] * count for name, value in constant.items()}
        table = to_parquet(pa.table(columns, ROWS))
        entry = write_file(store, "", f"rows/{start // SHARD:05d}.parquet", table)
        shards.append(Shard(rows=count, files={"rows": entry}))
    dataset = DataSet(store, "", Manifest(identity="", source={}, rows=rows, shards=shards))
    latents = torch.randn(SHARD, *SHAPE, generator=torch.Generator().manual_seed(0)).half()
    dataset.write_column("latents", {"name": "noise"}, lambda n: {"values": latents[: shards[n].rows]})
    zeros = torch.zeros(SHARD, dtype=torch.int8)
    dataset.write_column("split", {"name": "split"}, lambda n: {"values": zeros[: shards[n].rows]})
    dataset.finish()


def opened(folder: Path) -> tuple[Any, Any, Order]:
    """Latents, training rows, and their order."""
    dataset = DataSet.open(Store.open(folder))
    train = dataset.split("train")
    return dataset.column("latents"), train, Order(len(train), 0, dataset.id_hash)


def turn(folder: Path) -> dict[str, float]:
    """Rows a second over an epoch or 300 steps, after some to begin with."""
    torch.set_num_threads(1)
    latents, train, order = opened(folder)
    latents.localise()
    steps = min(300, len(train) // BATCH)
    warm = max(1, steps // 10)
    for step in range(-warm, steps):
        if step == 0:
            began = time.monotonic()
        begin = (step + warm) * BATCH
        batch = latents.read(train[order.at(range(begin, begin + BATCH))])
        assert batch.shape == (BATCH, *SHAPE)
    return {"rows_a_second": steps * BATCH / (time.monotonic() - began)}


def resumed(folder: Path) -> dict[str, float]:
    """Seconds to the first batch of a run that goes on in the middle of an epoch."""
    torch.set_num_threads(1)
    began = time.monotonic()
    latents, train, order = opened(folder)
    ready = time.monotonic() - began
    latents.localise()
    hashes = time.monotonic() - began - ready
    begun = time.monotonic()
    middle = len(train) // 2 // BATCH * BATCH
    batch = latents.read(train[order.at(range(middle, middle + BATCH))])
    assert bool(np.isfinite(batch.float().numpy()).all())
    return {"first_batch": ready + time.monotonic() - begun, "hashes": hashes}


if __name__ == "__main__":
    main()
