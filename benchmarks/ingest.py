"""Pictures a second of `atoll data ingest` against a plain loop of Pillow, and memory against rows.

    python benchmarks/ingest.py [--rows 3000] [--pairs 5] [--json PATH]
    python benchmarks/ingest.py --quick

The source is parquet with JPEGs of 640 x 480; both sides crop the middle, resize it to 256 with Lanczos's
filter and write PNG, the loop into one file and nothing else: no hashes, no checks, no restart. Both run in
processes of their own, one and then two at a time (which share the data set's shards, and halve the loop's
rows), each on one thread, in turn. Peak memory is that of one process at N and at 8 N rows of 64 px.

Encoding (`--only encode`) reads 256 px pictures for an encoder that takes 5 ms for each and no processor, as
a GPU does: batch by batch while threads decode ahead, and a whole shard first and the encoder after it.
"""

import io
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from harness import Row, finish, in_turn, measured, median_row, parsed, parser, ratios, row
from PIL import Image
from pyarrow import parquet

from atoll.base.part import Part
from atoll.data.dataset import DataSet
from atoll.data.ingest import IngestJob
from atoll.data.settings import IngestConfig
from atoll.data.sources.several import open_source
from atoll.store.store import Store

SIZE, SHARD_ROWS = 256, 256
SIDES = ("ingest", "loop")


def main() -> None:
    """Measure what `--only` asks for."""
    words = parser(__doc__, "512 rows, 2 turns, memory at 1,000 and 8,000", "parts (speed, encode, memory)")
    words.add_argument("--rows", type=int, default=3000, help="pictures of the measured source")
    words.add_argument("--pairs", type=int, default=5, help="turns of both sides")
    words.add_argument("--memory", type=int, default=8000, help="rows of the smaller source for memory")
    options = parsed(words, work)
    if options.quick:
        options.rows, options.pairs, options.memory = 512, 2, 1000
    with tempfile.TemporaryDirectory() as folder:
        cases = {
            "speed": partial(speed, Path(folder), options.rows, options.pairs),
            "encode": partial(encode, Path(folder), 128 if options.quick else 512, options.pairs),
            "memory": partial(memory, Path(folder), options.memory),
        }
        rows = measured(options, cases)
    finish("ingest", rows, options)


def speed(folder: Path, rows: int, pairs: int) -> Iterator[Row]:
    """Pictures a second of both sides, with one process and with two."""
    source = pictures(folder / "source.parquet", rows, (640, 480), "JPEG")
    for processes in (1, 2):
        seconds: dict[str, list[float]] = {side: [] for side in SIDES}
        for turn, side in enumerate(in_turn(SIDES, pairs)):
            to = folder / f"{side}-{processes}-{turn}"
            spans = [one[:2] for one in together(side, source, to, SIZE, processes)]
            taken = max(end for _, end in spans) - min(start for start, _ in spans)
            if side == "ingest":  # the end of the work, after all parts
                start = time.time()
                job(str(source), to, SIZE).run()
                taken += time.time() - start
            seconds[side].append(taken)
        case = f"{processes} process{'es' if processes > 1 else ''}"
        for side in SIDES:
            yield median_row(case, f"{side}: pictures", [rows / s for s in seconds[side]], "/s")
        faster = ratios(seconds["loop"], seconds["ingest"])
        yield median_row(case, "ingest over loop", faster, target=(">=", 0.9))


def memory(folder: Path, rows: int) -> Iterator[Row]:
    """Peak memory of an ingest of few and of many rows."""
    peaks = []
    for count in (rows, 8 * rows):
        source = pictures(folder / f"{count}.parquet", count, (64, 64), "PNG")
        ((*_, peak),) = together("ingest", source, folder / f"memory-{count}", 64, 1)
        peaks.append(peak)
        yield row("memory", f"peak at {count:,} rows", peak, "MiB")
    yield row("memory", f"{8 * rows:,} over {rows:,} rows", peaks[1] / peaks[0], target=("<=", 1.1))


def encode(folder: Path, rows: int, pairs: int) -> Iterator[Row]:
    """Pictures a second that reach the encoder, both ways."""
    source = pictures(folder / "encoded.parquet", rows, (640, 480), "JPEG")
    job(str(source), folder / "encoded", SIZE).run()
    dataset = DataSet.open(Store.open(folder / "encoded"))
    seconds: dict[str, list[float]] = {"ahead": [], "before": []}
    for side in in_turn(tuple(seconds), pairs):
        began = time.monotonic()
        for shard in range(len(dataset.shards)):
            shown = dataset.iter_images(shard)
            if side == "before":
                numbers = range(*dataset.bounds[shard : shard + 2].tolist())
                shown = iter([dataset.image(number) for number in numbers])
            while part := list(islice(shown, 32)):
                time.sleep(0.005 * len(part))
        seconds[side].append(time.monotonic() - began)
    for side, taken in seconds.items():
        yield median_row("encode", f"decoded {side}: pictures", [rows / s for s in taken], "/s")
    yield median_row("encode", "ahead over before", ratios(seconds["before"], seconds["ahead"]))


def pictures(path: Path, rows: int, size: tuple[int, int], kind: str) -> Path:
    """A parquet file of smooth pictures with noise, in groups of 1,000 rows."""
    draws = np.random.default_rng(0)
    schema = pa.schema([("image", pa.binary()), ("text", pa.string())])
    with parquet.ParquetWriter(path, schema) as writer:
        for start in range(0, rows, 1000):
            files = []
            for _ in range(start, min(start + 1000, rows)):
                coarse = Image.fromarray(draws.integers(0, 256, (6, 8, 3), dtype=np.uint8))
                buffer = io.BytesIO()
                coarse.resize(size, Image.Resampling.BICUBIC).save(buffer, kind)
                files.append(buffer.getvalue())
            texts = [f"picture {start + number}" for number in range(len(files))]
            writer.write_table(pa.table({"image": files, "text": texts}, schema))
    return path


def together(
    side: str, source: Path, to: Path, size: int, processes: int
) -> list[tuple[float, float, float]]:
    """Start and end by the clock, and peak MiB, of processes that share the work."""
    asked = {"side": side, "source": str(source), "to": str(to), "size": size, "count": processes}
    words = [json.dumps({**asked, "number": number}) for number in range(processes)]
    how: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    how["env"] = {**os.environ, "OMP_NUM_THREADS": "1"}
    started = [subprocess.Popen([sys.executable, __file__, "--work", word], **how) for word in words]
    for one in started:
        assert one.stdout is not None
        assert one.stdout.readline() == "ready\n", f"{side} did not start; see above"
    for one in started:
        assert one.stdin is not None
        one.stdin.write("go\n")
        one.stdin.flush()
    found = [json.loads(one.communicate()[0].splitlines()[-1]) for one in started]
    assert all(one.returncode == 0 for one in started)
    return [tuple(one) for one in found]


def work(side: str, source: str, to: str, size: int, number: int, count: int) -> tuple[float, float, float]:
    """One process: says that it is ready, waits for the word, works, and says how long that took."""
    print("ready", flush=True)
    sys.stdin.readline()
    start = time.time()
    if side == "loop":
        loop(Path(source), Path(f"{to}{number}-of-{count}"), size, number, count)
    else:
        part = job(source, to, size)
        part.run() if count == 1 else part.write_part(Part(number, count))
    return start, time.time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def job(source: str, to: str | Path, size: int) -> IngestJob:
    """The ingest of a source into a folder."""
    config = IngestConfig(size=size, mode="rgb", shard_rows=SHARD_ROWS)
    return IngestJob(open_source(source, config), Store.open(to, create=True), "", config)


def loop(source: Path, to: Path, size: int, number: int, count: int) -> None:
    """What a script does that trusts its data."""
    row = 0
    with to.open("wb") as out:
        for batch in parquet.ParquetFile(source).iter_batches(SHARD_ROWS, columns=["image"]):
            for data in batch.column(0):
                row += 1
                if row % count != number:
                    continue
                image = Image.open(io.BytesIO(data.as_py())).convert("RGB")
                side = min(image.size)
                left, top = (image.width - side) // 2, (image.height - side) // 2
                middle = image.crop((left, top, left + side, top + side))
                middle.resize((size, size), Image.Resampling.LANCZOS).save(out, "PNG")


if __name__ == "__main__":
    main()
