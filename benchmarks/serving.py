"""What `atoll serve` carries, beside the pipeline behind FastAPI and beside LitServe, in one run.

    python benchmarks/serving.py --model NAME=FOLDER [--model ...] [--requests 100] [--json PATH]
    python benchmarks/serving.py --quick

`FOLDER` is an exported ensemble (`campaigns/NAME/ensemble` is one). Requests of one picture, of mixed steps
and strategies, come as Poisson does: at a rate, whether earlier ones are answered or not. A server carries a
rate if all are answered rightly and 99 of 100 within `BOUND` times what a lone request takes with the
pipeline. The rate rises by `FACTOR` until it is not carried, then the last step is halved twice; every repeat
has arrivals of another seed. All servers have one thread for torch; the client has the other core.
"""

import asyncio
import base64
import io
import json
import os
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import torch
from harness import Row, finish, flags, median_row, paired, parsed, parser, ratios, row, tiny
from PIL import Image

from atoll.model.model import Model
from atoll.serve.sizing import PROMPTS

STEPS, ROUTINGS, GUIDANCE = (5, 10, 20), ("top-1", "once", "top-2"), 2.0
BOUND, FACTOR, BATCH = 10.0, 1.25, 32
KINDS = ("a small", "a red", "an old", "a happy", "the letter", "a green", "a flying", "a broken")
THINGS = ("cat", "flower", "house", "face", "car", "fish", "hand", "flag", "clock", "tree", "A", "moon")
PLACES = ("by the sea", "at night", "in winter", "serif", "seen from above", "as a sign", "in a box")
OURS, ALONE, WHOLE = "atoll serve", "pipeline, FastAPI", "LitServe"
PEERS = Path(__file__).with_name("serving_peers.py")


@dataclass
class Server:
    """A process that answers at an address, since it was started (`time.monotonic`)."""

    url: str
    born: float


@dataclass(frozen=True)
class Point:
    """What came of requests at a rate a second: seconds to each answer, and how many were wrong.

    An answer is wrong that is none, or another picture than that of the first server.
    """

    rate: float
    seconds: list[float]
    wrong: int

    @property
    def slow(self) -> float:
        """The 99th percentile."""
        return sorted(self.seconds)[max(0, -(-len(self.seconds) * 99 // 100) - 1)]

    @property
    def value(self) -> dict[str, float]:
        """For the JSON."""
        middle = statistics.median(self.seconds)
        return {"rate": self.rate, "p50": middle, "p99": self.slow, "wrong": self.wrong}


def main() -> None:
    """Measure every model."""
    words = parser(__doc__, "a tiny campaign, few requests")
    words.add_argument("--model", action="append", default=[], metavar="NAME=FOLDER")
    words.add_argument("--requests", type=int, default=100, help="of each point")
    words.add_argument("--repeats", type=int, default=3)
    options = parsed(words)
    if not options.quick and not (options.model and find_spec("litserve")):
        options.error("give --model NAME=FOLDER, and pip install litserve==0.2.19; or --quick")
    with tempfile.TemporaryDirectory() as folder:
        models = dict(one.split("=", 1) for one in options.model)
        if options.quick:
            models = {"tiny": str(tiny(Path(folder), 0, "monolith=false") / "ensemble")}
            options.requests, options.repeats = 12, 1
        rows, points = list[Row](), {}
        for name, source in models.items():
            count, repeats = options.requests, options.repeats
            with own(source) as ours:
                httpx.post(ours.url, json=requests(1, 0)[0], timeout=120).raise_for_status()
                cold = time.monotonic() - ours.born
            rows.append(row(name, "cold start to the first picture", cold, "s"))
            carried, points[name] = load(name, source, count, repeats)
            rows += [*carried, *overhead(name, source, max(1, repeats)), *swapping(name, source, count)]
    finish("serving", rows, options, {"points": points})


def load(name: str, source: str, count: int, repeats: int) -> tuple[list[Row], dict[str, Any]]:
    """Lone requests, and the rates that the servers carry beside each other."""
    peers = {ALONE: "pipeline", **({WHOLE: "litserve"} if find_spec("litserve") else {})}
    rows: list[Row] = []
    with ExitStack() as stack:
        # The pipeline is first: its pictures are the expected ones.
        servers = {peer: stack.enter_context(another(kind, source)) for peer, kind in peers.items()}
        ours = servers[OURS] = stack.enter_context(own(source))
        expected: dict[str, str] = {}
        lone = {one: asyncio.run(one_by_one(server, count, expected)) for one, server in servers.items()}
        middle = statistics.median(lone[ALONE].seconds)
        for one, point in lone.items():
            ratio = point.slow / middle
            rows.append(row(f"{name}, {one}", "lone request", statistics.median(point.seconds), "s"))
            rows.append(row(f"{name}, {one}", "p99 of lone requests, over the pipeline's median", ratio))
        carried: dict[str, list[float]] = {one: [] for one in servers}
        points: dict[str, list[Any]] = {one: [] for one in servers}
        before = calls(ours)
        for repeat in range(repeats):
            for one, server in servers.items():
                start = 0.7 * carried[one][-1] if carried[one] else 0.5 / middle
                rate, found = search(server, start, count, repeat, BOUND * middle, expected)
                carried[one].append(rate)
                points[one] += found
        runs, served, _ = (after - b for after, b in zip(calls(ours), before, strict=True))
        rows.append(row(name, "rows per run of an expert", served / max(runs, 1)))
        for one in servers:
            rows.append(median_row(f"{name}, {one}", "pictures a second carried", carried[one], "1/s"))
        for one, least in ((ALONE, 2.0), (WHOLE, 1.3)):
            if one in servers:
                over = ratios(carried[OURS], carried[one])
                rows.append(median_row(name, f"carried, over {one}", over, target=(">=", least)))
        rows += partials(name, ours, max(3, count // 10))
    return rows, points


# Requests.


def requests(count: int, seed: int) -> list[dict[str, Any]]:
    """Of mixed steps and strategies, the same for a seed."""
    draw = random.Random(seed)
    return [
        {
            "prompt": f"{draw.choice(KINDS)} {draw.choice(THINGS)}, {draw.choice(PLACES)}",
            "seed": draw.randrange(1000),
            "steps": draw.choice(STEPS),
            "guidance": GUIDANCE,
            "routing": draw.choice(ROUTINGS),
        }
        for _ in range(count)
    ]


async def ask(client: httpx.AsyncClient, server: Server, one: dict[str, Any], known: dict[str, str]) -> bool:
    """Whether a request is answered by its own picture; the first answer to it tells which that is."""
    answer = await client.post(server.url, json=one)
    if answer.status_code != 200:
        return False
    picture = base64.b64decode(answer.json()["data"][0]["b64_json"])
    # The pixels alone: servers say different things beside them in a PNG.
    pixels = Image.open(io.BytesIO(picture)).convert("RGB").tobytes().hex()
    return known.setdefault(json.dumps(one), pixels) == pixels


async def one_by_one(server: Server, count: int, known: dict[str, str]) -> Point:
    """One client that waits for every answer."""
    seconds, wrong = [], 0
    async with httpx.AsyncClient(timeout=120) as client:
        for one in requests(count, -1):
            start = time.monotonic()
            wrong += not await ask(client, server, one, known)
            seconds.append(time.monotonic() - start)
    return Point(0.0, seconds, wrong)


async def arrivals(server: Server, rate: float, count: int, seed: int, known: dict[str, str]) -> Point:
    """Requests at a rate, whether earlier ones are answered or not."""
    draw, due, tasks = random.Random(seed), 0.0, []
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
    async with httpx.AsyncClient(timeout=300, limits=limits) as client:
        start = time.monotonic()

        async def later(one: dict[str, Any], at: float) -> tuple[float, bool]:
            await asyncio.sleep(max(0.0, start + at - time.monotonic()))
            rightly = await ask(client, server, one, known)
            return time.monotonic() - start - at, rightly

        for one in requests(count, seed):
            due += draw.expovariate(rate)
            tasks.append(asyncio.ensure_future(later(one, due)))
        done = await asyncio.gather(*tasks)
    return Point(rate, [seconds for seconds, _ in done], sum(not rightly for _, rightly in done))


def search(
    server: Server, rate: float, count: int, seed: int, bound: float, known: dict[str, str]
) -> tuple[float, list[dict[str, float]]]:
    """The highest rate that a server carries, and all that were tried.

    Where not even the first is carried, the rate falls until one is.
    """
    found: list[dict[str, float]] = []

    def carries(rate: float) -> bool:
        point = asyncio.run(arrivals(server, rate, count, seed, known))
        found.append(point.value)
        print({name: round(value, 3) for name, value in point.value.items()}, file=sys.stderr, flush=True)
        return point.slow <= bound and not point.wrong

    first = carries(rate)
    for _ in range(16):
        rate *= FACTOR if first else 1 / FACTOR
        if carries(rate) != first:
            break
    low, high = (rate / FACTOR, rate) if first else (rate, rate * FACTOR)
    for _ in range(2):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if carries(middle) else (low, middle)
    return low, found


# Servers.


@contextmanager
def own(source: str, *sets: str) -> Iterator[Server]:
    """`atoll serve`, ready."""
    words = flags([f"batch={BATCH}", "queue=100000", "port=PORT", *sets])
    argv = ("-m", "atoll", "serve", source, *words)
    with running(*argv, path="/v1/images/generations", ready="/ready") as server:
        yield server


@contextmanager
def another(kind: str, source: str) -> Iterator[Server]:
    """One of the other ways, ready."""
    words = (str(PEERS), kind, source, "PORT", str(BATCH))
    with running(*words, path="/predict", ready="/docs") as server:
        yield server


@contextmanager
def running(*words: str, path: str, ready: str) -> Iterator[Server]:
    """A process that listens on a free port, until it is no longer wanted."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    argv = [sys.executable, *(word.replace("PORT", str(port)) for word in words)]
    quiet, born = {**os.environ, "OMP_NUM_THREADS": "1"}, time.monotonic()
    # A session of its own, so that a server's workers end with it.
    process = subprocess.Popen(argv, env=quiet, stderr=subprocess.DEVNULL, start_new_session=True)
    address = f"http://127.0.0.1:{port}"
    try:
        while not _answers(address + ready):
            if process.poll() is not None or time.monotonic() - born > 120:
                raise SystemExit(f"a server ended, or is not ready after two minutes: {process.args}")
            time.sleep(0.1)
        yield Server(address + path, born)
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _answers(address: str) -> bool:
    try:
        return httpx.get(address, timeout=1).status_code == 200
    except httpx.HTTPError:
        return False


# Single figures.


def partials(name: str, server: Server, count: int) -> Iterator[Row]:
    """Time to the first partial picture, over that to the picture."""
    first, shares = [], []
    for one in requests(count, 1):
        body = {**one, "steps": STEPS[-1], "stream": True, "partial_images": 3}
        start, times = time.monotonic(), []
        with httpx.stream("POST", server.url, json=body, timeout=120) as answer:
            times += [time.monotonic() - start for line in answer.iter_lines() if line.startswith("event:")]
        first.append(times[0])
        shares.append(times[0] / times[-1])
    yield median_row(name, "to the first partial picture", first, "s")
    yield median_row(name, "the same, over the whole picture's", shares)


def calls(server: Server) -> tuple[float, float, float]:
    """Runs of experts, their rows and experts brought, since the server started."""
    text = httpx.get(re.sub("/v1.*", "/metrics", server.url)).text
    names = ("atoll_expert_calls_total", "atoll_expert_rows_total", "atoll_expert_swaps_total")
    sums = [sum(float(n) for n in re.findall(rf"^{one}(?:{{.*}})? (\S+)$", text, re.M)) for one in names]
    return sums[0], sums[1], sums[2]


def overhead(name: str, source: str, repeats: int) -> Iterator[Row]:
    """A full batch by the server, over the same by the model in one call; they take turns."""
    torch.set_num_threads(1)
    model, how = Model.load(source), {"steps": STEPS[-1], "guidance": GUIDANCE, "routing": "top-1"}
    with own(source, f"pictures={BATCH}") as server:
        body = {"prompt": PROMPTS[0], "n": BATCH, "seed": 0, **how}

        def by_server() -> None:
            httpx.post(server.url, json=body, timeout=300).raise_for_status()

        def by_model() -> None:
            model([PROMPTS[0]], BATCH, model.generation, seed=0, **how)

        by_server(), by_model()
        over = ratios(*paired((by_server, by_model), 2 * repeats + 1))
    yield median_row(name, "full batch, over Model.generate", over, target=("<=", 1.05))


def swapping(name: str, source: str, count: int) -> Iterator[Row]:
    """Experts brought for each picture with one on the device: many clients, and one after the other."""
    with own(source, "residency.experts=1") as server:
        known: dict[str, str] = {}
        started = calls(server)[2]
        asyncio.run(one_by_one(server, count, known))
        between = calls(server)[2]
        point = asyncio.run(arrivals(server, 1e3, count, -1, known))
        ended = calls(server)[2]
    if point.wrong:
        raise SystemExit(f"{point.wrong} pictures of a server with one resident expert are others")
    yield row(name, "one resident, alone: brought a picture", (between - started) / count)
    yield row(name, "one resident, all at once: the same", (ended - between) / count)


if __name__ == "__main__":
    main()
