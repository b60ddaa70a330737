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

Text (`--only text`) is what the thread that reads ahead does for 32 samples with T5-XXL's states, 120 tokens
of 4096 numbers each: as they go to a GPU, and filled up, widened and dropped on the CPU, as before that. It
counts seconds of the processor that one thread takes.

Peers are imported by the Python of `--peers`, a virtual environment of their own:

    python -m venv PEERS
    PEERS/bin/pip install webdataset==1.0.2 datasets==5.2.0 torch numpy
    PEERS/bin/pip install --no-deps litdata==0.2.76       # asks for torchvision, which it does not need here

One that is missing is left out, and the JSON says so.
"""

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import Row, asked, child, finish, in_turn, median_row, parsed, parser, ratios, synthetic
from numpy.typing import NDArray
from torch import Tensor

from atoll.base.condition import Condition
from atoll.data.dataset import DataSet
from atoll.data.order import Order
from atoll.data.samples import Samples
from atoll.flow.objective import drop_condition
from atoll.networks.settings import DataShape
from atoll.store.store import Store

PEERS = ("webdataset", "litdata", "datasets")
SHAPE, BATCH, SHARD = (4, 32, 32), 256, 1024
SCRIPT = Path(__file__).with_name("loading_peers.py")


def main() -> None:
    """Measure Atoll and the peers that `--only` asks for."""
    words = parser(__doc__, "20,000 rows, fewer turns", "peers, or text,")
    words.add_argument("--rows", type=int, help="latents (quick: 20,000, else 400,000)")
    words.add_argument("--peers", default=sys.executable, help="Python of the peers' virtual environment")
    options = parsed(words, work)
    rows = options.rows or (20_000 if options.quick else 400_000)
    peers = [peer for peer in PEERS if asked(options, peer)]
    lines, missing = list(texts(options.quick)) if asked(options, "text") else [], list[str]()
    if peers or not options.only:
        with tempfile.TemporaryDirectory(prefix="atoll-loading-") as folder:
            measured = measure(Path(folder), rows, options.peers, 1 if options.quick else 3, peers)
        lines, missing = [*measured[0], *lines], measured[1]
    finish("loading", lines, options, {"rows_of_data": rows, "missing": missing})


def measure(
    folder: Path, rows: int, python: str, turns: int, peers: Sequence[str] = PEERS
) -> tuple[list[Row], list[str]]:
    """Lines of the table, and the peers that could not be imported."""
    own = folder / "atoll"
    write(own, rows)

    def ours(kind: str) -> dict[str, float]:
        return dict(child(__file__, kind=kind, folder=str(own)))

    lines, missing, speeds = [], list[str](), list[float]()
    for peer in peers:
        about = peer_says(python, "version", peer)
        if about is None:
            missing.append(peer)
            continue
        peer_says(python, "write", peer, folder / peer, rows)
        mine, best = [], []
        for _ in range(turns):
            mine.append(ours("turn")["rows_a_second"])
            theirs = [peer_says(python, "turn", peer, folder / peer, rows, count) for count in (0, 2)]
            best.append(max((one for one in theirs if one), key=lambda one: one["rows_a_second"]))
        shutil.rmtree(folder / peer)
        speeds += mine
        case, workers = f"{peer} {about['version']}", max(one["workers"] for one in best)
        values = [one["rows_a_second"] for one in best]
        lines.append(median_row(case, f"rows a second ({workers} workers)", values, "/s"))
        over = f"rows a second / {peer}'s"
        lines.append(median_row("Atoll", over, ratios(mine, values), target=(">=", 2.0)))
    resumes = [ours("resume") for _ in range(turns)]
    speeds = speeds or [ours("turn")["rows_a_second"]]
    lines.insert(0, median_row("Atoll", "rows a second", speeds, "/s"))
    firsts = [one["first_batch"] for one in resumes]
    lines.append(median_row("Atoll, resumed", "first batch", firsts, "s", target=("<=", 1.0)))
    lines.append(median_row("Atoll, resumed", "hashes of all files", [one["hashes"] for one in resumes], "s"))
    return lines, missing


def texts(quick: bool) -> Iterator[Row]:
    """Samples that one thread reads in a second of its core, with text of the largest encoder in use."""
    torch.set_num_threads(1)
    count, batch, length, width = (32, 8, 8, 16) if quick else (512, 32, 120, 4096)
    with tempfile.TemporaryDirectory(prefix="atoll-loading-") as folder:
        samples = drawn_texts(Store.open(folder, create=True), count, length, width)
        rows = np.random.default_rng(0).permutation(count)
        keep = torch.rand(batch)
        null_states = samples.null.map(Tensor.float)

        def widened(part: NDArray[np.int64]) -> Condition:
            return drop_condition(samples.conditions(part), null_states, keep, 0.1)

        speeds: dict[str, list[float]] = {"stored": [], "widened": []}
        for way in in_turn(("stored", "widened"), 2 if quick else 6):
            began = time.thread_time()
            for first in range(0, count, batch):
                part = rows[first : first + batch]
                samples.latents(part), (samples.stored if way == "stored" else widened)(part)
            speeds[way].append(count / (time.thread_time() - began))
    case = f"text, {length} x {width}"
    each, target = "samples a second of a core", (">=", 2000)
    yield median_row(case, f"{each}, as stored", speeds["stored"], "/s", target=target)
    yield median_row(case, f"{each}, filled up on the CPU", speeds["widened"], "/s")
    yield median_row(case, "as stored / filled up", ratios(speeds["stored"], speeds["widened"]))


def drawn_texts(store: Store, count: int, length: int, width: int) -> Samples:
    """Write training rows of latents and text states, the same states in each."""
    columns = {
        "latents": lambda _: torch.randn(count, *SHAPE).half(),
        "split": lambda _: torch.zeros(count, dtype=torch.int8),
    }
    dataset, states = synthetic(store, [count], columns), torch.randn(length, width).half()
    values = {"values": states.repeat(count, 1), "lengths": torch.full((count,), length)}
    null = {"null": {"values": states[:1]}}
    dataset.write_column("text", {"name": "drawn", "hash": ""}, lambda _: values, null, "ragged")
    return Samples(dataset, dataset.split("train"), "text", DataShape(4, 32, width, length))


def work(kind: str, folder: str) -> dict[str, float]:
    """What a child process measures."""
    return resumed(Path(folder)) if kind == "resume" else turn(Path(folder))


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
    sizes = [min(SHARD, rows - start) for start in range(0, rows, SHARD)]
    latents = torch.randn(SHARD, *SHAPE, generator=torch.Generator().manual_seed(0)).half()
    zeros = torch.zeros(SHARD, dtype=torch.int8)
    columns = {"latents": lambda n: latents[: sizes[n]], "split": lambda n: zeros[: sizes[n]]}
    synthetic(Store.open(folder, create=True), sizes, columns)


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
