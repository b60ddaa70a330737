"""What every benchmark shares: options, tiny campaigns, turns, processes of its own, the table, the JSON."""

import argparse
import json
import math
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import torch
from scipy.stats import ttest_ind
from torch import Tensor

from atoll import __version__
from atoll.campaign.folder import Campaign
from atoll.campaign.measured import Comparison
from atoll.campaign.runs import runs_of
from atoll.cli.main import atoll
from atoll.cli.main import run_command as exit_code
from atoll.data.dataset import ROWS, DataSet, to_parquet
from atoll.data.formats import Manifest, Shard
from atoll.measure.seeds import interval
from atoll.store.manifest import write_file
from atoll.store.store import Store

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks/results"
TINY = [
    "data.ingest.glyphs.limit=1200",
    "budget.samples=4000",
    "compare.samples=100",
    "compare.fit_rows=300",
    "compare.steps=5",
    "compare.strategies=[once]",
]
"""Settings of the campaigns that `--quick` trains; their distances mean nothing."""
T = TypeVar("T")
STARTED, LOAD = time.monotonic(), os.getloadavg()
Row = dict[str, Any]
"""One line of a result: case, metric, value, unit, spread, target, met."""


# Options.


def options_of(parser: argparse.ArgumentParser, quick: str, only: str = "") -> argparse.ArgumentParser:
    """Add what all benchmarks are asked for: `quick` and `only` are what these two mean here."""
    parser.add_argument("--quick", action="store_true", help=quick)
    if only:
        parser.add_argument("--only", nargs="+", metavar="TEXT", help=f"{only} that hold one of these texts")
    # A part or a quick look must never replace a result that is committed.
    elsewhere = "in place of benchmarks/results/NAME.json; else --quick and --only write nothing"
    parser.add_argument("--json", type=Path, metavar="PATH", help=elsewhere)
    parser.set_defaults(error=parser.error)
    return parser


def parser(doc: str | None, quick: str, only: str = "") -> argparse.ArgumentParser:
    """The options of a benchmark by its docstring's first line."""
    return options_of(argparse.ArgumentParser(description=(doc or "").splitlines()[0]), quick, only)


def case(
    cases: Any, run: Callable[..., None], quick: str, only: str = "", name: str = "", does: str = ""
) -> argparse.ArgumentParser:
    """One of several cases of a program, from `add_subparsers`: `options.run` is what it does."""
    help = does or (run.__doc__ or "").splitlines()[0]
    added = options_of(cases.add_parser(name or run.__name__, help=help, description=help), quick, only)
    added.set_defaults(run=run)
    return added


def parsed(parser: argparse.ArgumentParser, work: Callable[..., Any] | None = None) -> argparse.Namespace:
    """What the command line says; a `child` process does its work and ends here."""
    parser.add_argument("--work", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if work and options.work:
        print(json.dumps(work(**json.loads(options.work))))
        raise SystemExit
    return options


def asked(options: argparse.Namespace, name: str) -> bool:
    """Whether `--only` asks for a name, or for all."""
    only = getattr(options, "only", None)
    return not only or any(text in name for text in only)


def measured(options: argparse.Namespace, cases: Mapping[str, Callable[[], Iterable[Row]]]) -> list[Row]:
    """Rows of the cases that are asked for, each said when it is there: the whole may take an hour.

    Ctrl-C ends the measuring and keeps what there is.
    """
    rows = []
    with suppress(KeyboardInterrupt):
        for measure in (measure for name, measure in cases.items() if asked(options, name)):
            for line in measure():
                print(f"  {line['case']}: {line['metric']} {line['value']:.4g}", flush=True)
                rows.append(line)
    return rows


# Campaigns.


def run_command(*argv: str | Path, alone: bool = True) -> None:
    """Run one of Atoll's commands, which has to succeed; alone is in a process of its own, as a user does.

    `--quick` has them in this one, since importing torch costs more than its work.
    """
    words = [str(word) for word in argv]
    print(f"atoll {' '.join(words)}", flush=True)
    if alone:
        subprocess.run([sys.executable, "-m", "atoll", *words], check=True)
    elif code := exit_code(lambda: atoll.main(words, standalone_mode=False)):
        raise SystemExit(f"atoll {words[0]} ended with {code}")


def flags(sets: Iterable[str]) -> list[str]:
    """`--set` before each."""
    return [part for each in sets for part in ("--set", each)]


def new(folder: Path, recipe: str, sets: Sequence[str], alone: bool = True) -> Path:
    """A campaign's folder; one that is there stays, if it was started with these settings."""
    if (folder / "campaign.yaml").exists():
        Campaign.open(folder, sets)
    else:
        run_command("new", folder, "--recipe", recipe, *flags(sets), alone=alone)
    return folder


def train(
    folder: Path,
    role: str = "",
    sets: Sequence[str] = (),
    alone: bool = True,
    before_partition: Callable[[], None] = lambda: None,
) -> None:
    """Prepare, partition, train and assemble, one command after the other, as far as that is missing.

    With a role only its runs are trained.
    """
    run_command("data", "prepare", folder, *flags(sets), alone=alone)
    before_partition()
    run_command("partition", folder, *flags(sets), alone=alone)
    for run in runs_of(Campaign.open(folder).config):
        if role in ("", run.role):
            number = [] if run.expert is None else ["--expert", str(run.expert)]
            run_command("train", run.role, folder, *number, alone=alone)
    if not role:
        run_command("assemble", folder, alone=alone)


def tiny(folder: Path, seed: int, *sets: str) -> Path:
    """`seed-SEED` in a folder: a quickstart, just large enough for a look at whether a benchmark works."""
    made = new(folder / f"seed-{seed}", "quickstart", [f"seed={seed}", *TINY, *sets], alone=False)
    train(made, alone=False)
    run_command("compare", made, alone=False)
    return made


def comparison_of(folder: Path) -> Comparison:
    """What `atoll compare` found of a campaign."""
    if not (folder / Comparison.PLACE).is_file():
        raise SystemExit(f"{folder} has not been compared: atoll compare {folder}")
    return Comparison.read(Store.open(folder), Comparison.PLACE)


def synthetic(
    store: Store, sizes: Sequence[int], columns: Mapping[str, Callable[[int], Tensor]], classes: int = 1
) -> DataSet:
    """Write a data set of so many rows in each shard: ids, labels, and columns by their values of a shard."""
    shards, first = [], 0
    for number, rows in enumerate(sizes):
        content: dict[str, Any] = {field.name: pa.nulls(rows, field.type) for field in ROWS}
        content["id"] = [f"{row:09d}" for row in range(first, first + rows)]
        content["label"] = [row % classes for row in range(first, first + rows)]
        table = to_parquet(pa.table(content, schema=ROWS))
        files = {"rows": write_file(store, "", f"rows/{number:05d}.parquet", table)}
        shards.append(Shard(rows=rows, files=files))
        first += rows
    manifest = Manifest(identity=f"{first}", source={"name": "synthetic"}, rows=first, shards=shards)
    dataset = DataSet(store, "", manifest)
    for name, values in columns.items():
        producer = {"name": "synthetic", "hash": ""}  # a network's card names the latents' by it
        dataset.write_column(name, producer, lambda n, values=values: {"values": values(n)})
    return dataset.finish()


# Turns, processes and memory.


def in_turn(sides: Sequence[T], count: int) -> Iterator[T]:
    """All sides, so many times; who goes first changes, so that what drifts hits all alike."""
    for number in range(count):
        yield from reversed(sides) if number % 2 else sides


def paired(sides: Sequence[Callable[[], Any]], pairs: int) -> list[list[float]]:
    """Seconds of each side, in turn."""
    seconds: dict[int, list[float]] = {number: [] for number in range(len(sides))}
    for number in in_turn(range(len(sides)), pairs):
        before = moment()
        sides[number]()
        seconds[number].append(moment() - before)
    return [*seconds.values()]


def moment() -> float:
    """A clock for differences, once the GPU has done what it was told."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def ratios(values: Sequence[float], bases: Sequence[float]) -> list[float]:
    """Of pairs."""
    return [value / base for value, base in zip(values, bases, strict=True)]


def child(
    script: str, cores: int | None = None, environment: Mapping[str, str] | None = None, **work: Any
) -> Any:
    """What `work(**work)` of a script gives, see `parsed`, in a process of its own.

    It is bound to so many cores before it starts a thread: torch counts them once, when it is imported.
    """

    def bind() -> None:
        if cores is not None and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])

    argv = [sys.executable, script, "--work", json.dumps(work)]
    env = {**os.environ, **(environment or {})}
    done = subprocess.run(argv, check=True, stdout=subprocess.PIPE, text=True, env=env, preexec_fn=bind)
    return json.loads(done.stdout.splitlines()[-1])


def forget_peak() -> int:
    """Measure the peak of memory anew; the bytes that this process has now."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    Path("/proc/self/clear_refs").write_text("5")  # Linux: the peak is what is in use now
    return memory("VmRSS")


def memory(which: str) -> int:
    """Bytes of this process by Linux's account: `VmRSS` has now, `VmHWM` at most."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(f"{which}:")).split()[1])


# The result.


def row(
    case: str,
    metric: str,
    value: float,
    unit: str = "",
    spread: Sequence[float] | None = None,
    target: tuple[str, float] | None = None,
) -> Row:
    """One line of a result.

    Args:
        case: what was measured.
        metric: which number of it.
        value: the number, a median where there are several.
        unit: of the number.
        spread: smallest and largest of several, or an interval.
        target: an operator (`<=`, `>=`) and a bound; a missed one stays in the table as missed.
    """
    bound = {"op": target[0], "value": target[1]} if target else None
    met = None if target is None else (value <= target[1] if target[0] == "<=" else value >= target[1])
    wide = list(spread) if spread else None
    line = {"case": case, "metric": metric, "value": value, "unit": unit}
    return {**line, "spread": wide, "target": bound, "met": met}


def median_row(case: str, metric: str, values: Sequence[float], unit: str = "", **target: Any) -> Row:
    """The median of several values with their range."""
    return row(case, metric, statistics.median(values), unit, (min(values), max(values)), **target)


def ratio_interval(ratios: Sequence[float]) -> tuple[float, tuple[float, float] | None]:
    """Mean of paired ratios and its 95 % interval: Student's, of the logarithms."""
    logs = [math.log(ratio) for ratio in ratios]
    ends = interval(logs)
    return math.exp(statistics.fmean(logs)), ends and (math.exp(ends[0]), math.exp(ends[1]))


def welch_interval(values: Sequence[float], bases: Sequence[float]) -> tuple[float, float] | None:
    """95 % interval of the ratio of two geometric means, as if the runs were not paired (Welch's, of logs).

    Runs of one seed share the order of the data and the noise but no weights, so pairing them by seed is no
    design, and an interval of paired ratios may be narrow by luck. None with fewer than two runs on a side.
    """
    if len(values) < 2 or len(bases) < 2:
        return None
    low, high = ttest_ind(np.log(values), np.log(bases), equal_var=False).confidence_interval(0.95)
    return math.exp(low), math.exp(high)


def finish(
    name: str, rows: list[Row], options: argparse.Namespace, notes: Mapping[str, Any] | None = None
) -> None:
    """Print the table and write the JSON; see `options_of` for when it is not."""
    for line in rows:
        target = f"{line['target']['op']} {line['target']['value']:g}" if line["target"] else ""
        verdict = {True: "met", False: "MISSED", None: ""}[line["met"]]
        number = f"{line['value']:>12.4g} {line['unit']:<4}"
        print(f"{line['case']:<20} {line['metric']:<34} {number} {target:<10} {verdict}")
    if options.json is None and (options.quick or getattr(options, "only", None)):
        print("not written: give --json PATH")
        return
    result = {
        "benchmark": name,
        "command": command(),
        "machine": machine(),
        "versions": {
            "atoll": __version__,
            **{package: version(package) for package in ("torch", "diffusers", "numpy")},
        },
        "rows": rows,
        "quick": options.quick,
        "load_before": [round(part, 2) for part in LOAD],
        "seconds": round(time.monotonic() - STARTED, 1),
        **(notes or {}),
    }
    path = options.json or RESULTS / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n")
    print(f"wrote {path}")


def command() -> str:
    """What was called, without the folders that only this machine has."""
    program = Path(sys.argv[0]).resolve()
    words = [str(program.relative_to(ROOT)) if program.is_relative_to(ROOT) else program.name]
    words += [Path(word).name if Path(word).is_absolute() else word for word in sys.argv[1:]]
    return "python " + " ".join(shlex.quote(word) for word in words)


def machine() -> dict[str, Any]:
    """Processor, cores and memory."""

    def line(path: str, key: str) -> str:
        """What stands behind a key of one of Linux's files."""
        lines = Path(path).read_text().splitlines() if Path(path).exists() else []
        return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(key)), "")

    return {
        "system": platform.system(),
        "processor": line("/proc/cpuinfo", "model name") or platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "memory_gib": round(int((line("/proc/meminfo", "MemTotal") or "0").split()[0]) / 2**20, 1),
        "python": platform.python_version(),
    }
