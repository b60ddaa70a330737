"""The partition's k-means against MiniBatchKMeans and faiss over all rows: time, peak memory, inertia.

    python benchmarks/partition.py [--quick] [--json PATH] [--peers VENV]

Features of clusters with a long tail are written as a column of a data set. Every contestant is a process
of its own on one thread, so that its peak memory is its own; it makes 1,024 fine centroids, 8 coarse ones and
the cluster of every row. Peers hold all rows in memory, and their fine centroids go through the same coarse
step. scikit-learn is no dependency: `--peers` names a Python that has it; else it is left out, and told.
"""

import json
import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
import torch
from harness import Row, asked, finish, parsed, parser, row, synthetic

from atoll.data.cluster import normalise
from atoll.data.dataset import DataSet
from atoll.store.store import Store

K, FINE, SHARD = 8, 1024, 4096
THREADS = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


def write_features(folder: Path, rows: int, width: int, seed: int = 0) -> None:
    """Write a data set of rows with nothing but ids, a split and features."""
    sizes = [min(SHARD, rows - start) for start in range(0, rows, SHARD)]
    draw = LongTail(width, seed)
    columns = {
        "split": lambda n: torch.zeros(sizes[n], dtype=torch.int8),
        "features": lambda n: torch.from_numpy(draw(n, sizes[n])),
    }
    synthetic(Store.open(folder, create=True), sizes, columns)


class LongTail:
    """Directions around 4,096 middles of 24 themes, a few of them common and most rare, in float16."""

    def __init__(self, width: int, seed: int) -> None:
        draws = np.random.default_rng(seed)
        self.scale = (1 / np.sqrt(np.arange(1, width + 1))).astype(np.float32)
        self.scale /= np.linalg.norm(self.scale)
        themes = draws.normal(size=(24, width)).astype(np.float32)
        own = 0.8 * draws.normal(size=(4096, width)).astype(np.float32)
        self.middles = (themes[draws.integers(0, 24, 4096)] + own) * self.scale
        masses = draws.pareto(1.2, 4096) + 0.2
        self.shares, self.seed = masses / masses.sum(), seed

    def __call__(self, number: int, rows: int) -> np.ndarray:
        """Features of one shard `(rows, width)`."""
        draws = np.random.default_rng([self.seed, number])
        chosen = self.middles[draws.choice(len(self.middles), rows, p=self.shares)]
        noise = draws.standard_normal((rows, len(self.scale)), dtype=np.float32)
        return (chosen + 0.6 * noise * self.scale).astype(np.float16)


ATOLL = """
import json, resource, sys, time
import numpy as np, faiss, torch
from atoll.data.partition import make
from atoll.data.dataset import DataSet
from atoll.data.settings import PartitionConfig
from atoll.store.store import Store
torch.set_num_threads(1); faiss.omp_set_num_threads(1)
folder, out, k, fine = sys.argv[1:]
dataset = DataSet.open(Store.open(folder))
start = time.perf_counter()
cut = make(dataset, dataset.column("features"), PartitionConfig(k=int(k), fine=int(fine)), 0)
seconds = time.perf_counter() - start
np.save(out, cut.centroids)
print(json.dumps([seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024]))
"""
PEER = """
import glob, json, resource, sys, time
import numpy as np
name, folder, out, k, fine = sys.argv[1:]
k, fine = int(k), int(fine)
def read(path):  # safetensors without the package: eight bytes of length, a header, the numbers
    with open(path, "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))["values"]
        return np.fromfile(file, np.float16).reshape(header["shape"])
def load():
    parts = [read(path) for path in sorted(glob.glob(folder + "/columns/features/*.safetensors"))]
    rows = np.empty((sum(map(len, parts)), parts[0].shape[1]), np.float32)
    start = 0
    for number in range(len(parts)):
        part, parts[number] = parts[number].astype(np.float32), None
        rows[start : start + len(part)] = part / np.linalg.norm(part, axis=1, keepdims=True)
        start += len(part)
    return rows
start = time.perf_counter()
rows = load()
if name == "faiss":
    import faiss
    faiss.omp_set_num_threads(1)
    def kmeans(points, k, redo=1):
        one = faiss.Kmeans(points.shape[1], k, niter=25, nredo=redo, seed=1, max_points_per_centroid=10**9,
                           min_points_per_centroid=1)
        one.train(points)
        return one.centroids
    centroids = kmeans(kmeans(rows, fine), k, 8) if fine else kmeans(rows, k, 8)
else:
    from sklearn.cluster import KMeans, MiniBatchKMeans
    first = MiniBatchKMeans(fine or k, random_state=0, n_init=1, compute_labels=False).fit(rows)
    centroids = first.cluster_centers_
    if fine:
        centroids = KMeans(k, random_state=0, n_init=8).fit(centroids).cluster_centers_
blocks = (rows[i : i + 8192] for i in range(0, len(rows), 8192))
clusters = np.concatenate([((centroids**2).sum(1) - 2 * b @ centroids.T).argmin(1) for b in blocks])
seconds = time.perf_counter() - start
np.save(out, centroids.astype(np.float32))
print(json.dumps([seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024]))
"""


def inertia(folder: Path, centroids: np.ndarray) -> float:
    """Mean squared distance of all rows to the nearest of the centroids."""
    column, total = DataSet.open(Store.open(folder)).column("features"), 0.0
    for _, values in column.blocks(np.arange(len(column)), 8192):
        rows = normalise(values.numpy())
        nearest = ((centroids**2).sum(1) - 2 * rows @ centroids.T).min(1) + (rows**2).sum(1)
        total += float(nearest.sum(dtype=np.float64))
    return total / len(column)


def contestants(python: str) -> dict[str, tuple[str, str, list[str], int]]:
    """For each its Python, code, first words, and the fine centroids it makes; 0 for none."""
    found = {
        "Atoll": (sys.executable, ATOLL, [], FINE),
        "faiss, all rows": (sys.executable, PEER, ["faiss"], FINE),
        "faiss, K at once": (sys.executable, PEER, ["faiss"], 0),
    }
    if subprocess.run([python, "-c", "import sklearn"], capture_output=True).returncode:
        print(f"{python} has no scikit-learn: MiniBatchKMeans is left out")
        return found
    return {**found, "MiniBatchKMeans": (python, PEER, ["sklearn"], FINE)}


def measure(folder: Path, scratch: Path, who: tuple[str, str, list[str], int], fine: int) -> dict[str, float]:
    """Seconds, peak bytes and inertia of one contestant, in a process of its own."""
    python, code, words, own = who
    out = scratch / "centroids.npy"
    argv = [python, "-c", code, *words, str(folder), str(out), str(K), str(min(fine, own))]
    done = subprocess.run(argv, capture_output=True, text=True, env={**os.environ, **THREADS})
    if done.returncode:
        sys.exit(done.stderr[-2000:])
    seconds, peak = json.loads(done.stdout.splitlines()[-1])
    return {"seconds": seconds, "peak": peak, "inertia": inertia(folder, np.load(out))}


def table(
    found: dict[str, dict[str, float]], growth: tuple[dict[str, float], dict[str, float], int]
) -> list[Row]:
    """What was measured, ratios to the peers, and how time and memory grow with rows."""
    rows, ours = [], found["Atoll"]
    for name, one in found.items():
        rows.append(row(name, "seconds", one["seconds"], "s"))
        target = ("<=", 2e9) if name == "Atoll" else None
        rows.append(row(name, "peak memory", one["peak"], "B", target=target))
        rows.append(row(name, "inertia", one["inertia"]))
    for name in ("MiniBatchKMeans", "faiss, all rows"):
        if name in found:
            ratio = ours["seconds"] / found[name]["seconds"]
            rows.append(row("Atoll", f"seconds / {name}", ratio, target=("<=", 1.0)))
    best = min(one["inertia"] for one in found.values())
    rows.append(row("Atoll", "inertia / best", ours["inertia"] / best, target=("<=", 1.02)))
    few, many, times = growth
    ratio = many["seconds"] / few["seconds"]
    rows.append(row(f"Atoll, {times} times the rows", "seconds", ratio, "x", target=("<=", float(times))))
    rows.append(row(f"Atoll, {times} times the rows", "peak memory", many["peak"] / few["peak"], "x"))
    return rows


def main() -> None:
    """Write the features, let everybody cluster them, print the table."""
    words = parser(__doc__, "100,000 rows of 64 numbers", "peers")
    words.add_argument("--peers", default=sys.executable, help="Python of an environment with scikit-learn")
    options = parsed(words)
    count, width = (100_000, 64) if options.quick else (1_000_000, 384)
    with tempfile.TemporaryDirectory() as scratch:
        everybody, ours = contestants(options.peers), []
        for rows in (count // 10, count // 4, count):
            folder = Path(scratch) / str(rows)
            write_features(folder, rows, width)
            one = partial(measure, folder, Path(scratch), fine=FINE)
            ours.append(one(everybody["Atoll"]))
            print(f"{rows:,} rows: {ours[-1]}", flush=True)
        found = {"Atoll": ours[-1]}
        for name, who in everybody.items():
            if name != "Atoll" and asked(options, name):
                found[name] = one(who)
                print(f"{name}: {found[name]}", flush=True)
    lines = table(found, (ours[0], ours[-1], 10))
    for rows, figures in zip((count // 10, count // 4), ours, strict=False):
        lines.append(row(f"Atoll, {rows:,} rows", "seconds", figures["seconds"], "s"))
        lines.append(row(f"Atoll, {rows:,} rows", "peak memory", figures["peak"], "B"))
    notes = {"rows of features": count, "width": width, "fine": FINE, "k": K}
    finish("partition", lines, options, notes)


if __name__ == "__main__":
    main()
