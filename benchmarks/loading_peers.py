"""The loaders that `loading.py` measures Atoll's against, each as its documentation has it.

    python benchmarks/loading_peers.py version|write|turn PEER [FOLDER ROWS [WORKERS]]

Runs in a virtual environment of its own, without Atoll, and prints one line of JSON. It leaves with 3 where
the peer is not installed.
"""

import importlib
import io
import json
import sys
import tarfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

SHAPE, BATCH, SHARD = (4, 32, 32), 256, 1024
Rows = Iterator[np.ndarray[Any, np.dtype[np.float16]]]


def latents(rows: int) -> Rows:
    """Latents that repeat after a shard; what they hold does not count."""
    some = np.random.default_rng(0).standard_normal((SHARD, *SHAPE)).astype(np.float16)
    return (some[number % SHARD] for number in range(rows))


def _write_webdataset(folder: Path, rows: int) -> None:
    folder.mkdir()
    every = latents(rows)
    for start in range(0, rows, SHARD):
        with tarfile.open(folder / f"{start // SHARD:05d}.tar", "w") as tar:
            for number in range(start, min(start + SHARD, rows)):
                data = io.BytesIO()
                np.save(data, next(every))
                member = tarfile.TarInfo(f"{number:08d}.npy")
                member.size = data.tell()
                data.seek(0)
                tar.addfile(member, data)


def _webdataset(folder: Path, rows: int, workers: int) -> Iterable[Any]:
    import torch
    import webdataset

    urls = sorted(map(str, folder.glob("*.tar")))
    dataset = webdataset.WebDataset(urls, shardshuffle=100, seed=0, empty_check=False).shuffle(5000)
    dataset = dataset.decode().to_tuple("npy").map(lambda one: torch.from_numpy(one[0]))
    batches = dataset.batched(BATCH, collation_fn=torch.stack, partial=False)
    return webdataset.WebLoader(batches, batch_size=None, num_workers=workers)


def _write_litdata(folder: Path, rows: int) -> None:
    from litdata.streaming.writer import BinaryWriter

    folder.mkdir()
    writer = BinaryWriter(str(folder), chunk_bytes="64MB")
    for number, one in enumerate(latents(rows)):
        writer.add_item(number, one)
    writer.done()
    writer.merge()


def _litdata(folder: Path, rows: int, workers: int) -> Iterable[Any]:
    from litdata import StreamingDataLoader, StreamingDataset

    dataset = StreamingDataset(str(folder), shuffle=True, drop_last=True)
    return StreamingDataLoader(dataset, batch_size=BATCH, num_workers=workers)


def _write_datasets(folder: Path, rows: int) -> None:
    import pyarrow as pa
    from datasets import Features, List, Value
    from datasets.arrow_writer import ArrowWriter

    folder.mkdir()
    numbers, every = int(np.prod(SHAPE)), latents(rows)
    features = Features({"latents": List(Value("float16"), length=numbers)})
    with ArrowWriter(path=str(folder / "latents.arrow"), features=features) as writer:
        for start in range(0, rows, SHARD):
            flat = np.stack([next(every) for _ in range(min(SHARD, rows - start))]).ravel()
            column = pa.FixedSizeListArray.from_arrays(pa.array(flat), numbers)
            writer.write_table(pa.table({"latents": column}))
        writer.finalize()


def _datasets(folder: Path, rows: int, workers: int) -> Iterable[Any]:
    import torch
    from datasets import Dataset
    from torch.utils.data import BatchSampler, DataLoader, RandomSampler

    dataset = Dataset.from_file(str(folder / "latents.arrow")).with_format("numpy", dtype=np.float16)
    sampler = RandomSampler(dataset, generator=torch.Generator().manual_seed(0))

    def whole(batch: dict[str, Any]) -> Any:
        return torch.from_numpy(batch["latents"]).reshape(-1, *SHAPE)

    # A batch is one access by a list of rows, as its documentation advises.
    steps = BatchSampler(sampler, BATCH, drop_last=True)
    return DataLoader(dataset, sampler=steps, batch_size=None, collate_fn=whole, num_workers=workers)


WRITE = {"webdataset": _write_webdataset, "litdata": _write_litdata, "datasets": _write_datasets}
OPEN = {"webdataset": _webdataset, "litdata": _litdata, "datasets": _datasets}


def turn(peer: str, folder: Path, rows: int, workers: int) -> dict[str, float]:
    """Rows a second over an epoch or 300 steps, after some to begin with."""
    import torch

    torch.set_num_threads(1)
    most = rows // BATCH
    warm = max(1, min(330, most) // 11)
    seen, began = 0, 0.0
    for number, batch in enumerate(OPEN[peer](folder, rows, workers)):
        tensor = batch if isinstance(batch, torch.Tensor) else torch.as_tensor(batch)
        assert tensor.shape == (BATCH, *SHAPE) and tensor.dtype == torch.float16, tensor.shape
        if number == warm - 1:
            began = time.monotonic()
        elif number >= warm:
            seen += BATCH
        if number + 1 == warm + 300:
            break
    return {"rows_a_second": seen / (time.monotonic() - began), "workers": workers}


def main() -> None:
    what, peer, *rest = sys.argv[1:]
    try:
        package = importlib.import_module(peer)
    except ImportError as error:
        print(error, file=sys.stderr)
        raise SystemExit(3) from None
    answer: dict[str, Any] = {"version": package.__version__}
    if what != "version":
        folder, rows = Path(rest[0]), int(rest[1])
        if what == "write":
            WRITE[peer](folder, rows)
        else:
            answer = turn(peer, folder, rows, int(rest[2]))
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
