"""What every benchmark shares: the machine, the table, the JSON."""

import json
import math
import os
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import ttest_ind

from atoll.campaign.measured import Comparison
from atoll.cli.main import atoll
from atoll.cli.main import run_command as exit_code
from atoll.measure.seeds import interval
from atoll.store.store import Store

RESULTS = Path(__file__).parent / "results"
TINY = [
    "data.ingest.glyphs.limit=1200",
    "budget.samples=4000",
    "compare.samples=100",
    "compare.fit_rows=300",
    "compare.steps=5",
    "compare.strategies=[once]",
]
"""Settings of the campaigns that `--quick` trains; their distances mean nothing."""


def run_command(*argv: str | Path, alone: bool = True) -> None:
    """Run one of Atoll's commands, which has to succeed.

    Args:
        argv: its words.
        alone: as a process of its own; else within this one, for `--quick`: imports cost more than its work.
    """
    words = [str(word) for word in argv]
    print(f"atoll {' '.join(words)}", flush=True)
    if alone:
        subprocess.run([sys.executable, "-m", "atoll", *words], check=True)
    elif code := exit_code(lambda: atoll.main(words, standalone_mode=False)):
        raise SystemExit(f"atoll {words[0]} ended with {code}")


def row(
    case: str,
    metric: str,
    value: float,
    unit: str = "",
    spread: Sequence[float] | None = None,
    target: tuple[str, float] | None = None,
) -> dict[str, Any]:
    """One line of a result.

    Args:
        case: what was measured.
        metric: which number of it.
        value: the number, a median where there are several.
        unit: of the number.
        spread: smallest and largest of several.
        target: an operator (`<=`, `>=`) and a bound; a missed one stays in the table as missed.
    """
    bound = {"op": target[0], "value": target[1]} if target else None
    met = None if target is None else (value <= target[1] if target[0] == "<=" else value >= target[1])
    wide = list(spread) if spread else None
    line = {"case": case, "metric": metric, "value": value, "unit": unit}
    return {**line, "spread": wide, "target": bound, "met": met}


def median_row(
    case: str, metric: str, values: Sequence[float], unit: str = "", **target: Any
) -> dict[str, Any]:
    """The median of several values with their range."""
    return row(case, metric, statistics.median(values), unit, (min(values), max(values)), **target)


def ratio_interval(ratios: Sequence[float]) -> tuple[float, tuple[float, float] | None]:
    """Mean of paired ratios and its 95 % interval: Student's, of the logarithms."""
    logs = [math.log(ratio) for ratio in ratios]
    found = interval(logs)
    return math.exp(statistics.fmean(logs)), found and (math.exp(found[0]), math.exp(found[1]))


def welch_interval(values: Sequence[float], bases: Sequence[float]) -> tuple[float, float] | None:
    """95 % interval of the ratio of two geometric means, as if the runs were not paired (Welch's, of logs).

    Runs of one seed share the order of the data and the noise but no weights, so pairing them by seed is no
    design, and an interval of paired ratios may be narrow by luck. None with fewer than two runs on a side.
    """
    if len(values) < 2 or len(bases) < 2:
        return None
    logs, base_logs = np.log(values), np.log(bases)
    low, high = ttest_ind(logs, base_logs, equal_var=False).confidence_interval(0.95)
    return math.exp(low), math.exp(high)


def finish(
    name: str, rows: list[dict[str, Any]], path: Path | None, notes: dict[str, Any] | None = None
) -> None:
    """Print the table and write the JSON; a quick look is not written without a path."""
    for line in rows:
        target = f"{line['target']['op']} {line['target']['value']:g}" if line["target"] else ""
        verdict = {True: "met", False: "MISSED", None: ""}[line["met"]]
        number = f"{line['value']:>12.4g} {line['unit']:<4}"
        print(f"{line['case']:<20} {line['metric']:<34} {number} {target:<10} {verdict}")
    result = {
        "benchmark": name,
        "command": command(),
        "machine": machine(),
        "versions": {package: version(package) for package in ("atoll", "torch", "diffusers", "numpy")},
        "rows": rows,
        **(notes or {}),
    }
    if path is None and "--quick" in sys.argv:
        print("not written: give --json PATH")
        return
    path = path or RESULTS / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n")
    print(f"wrote {path}")


def command() -> str:
    """What was called, without the folders that only this machine has."""
    program, root = Path(sys.argv[0]).resolve(), Path(__file__).resolve().parents[1]
    words = [str(program.relative_to(root)) if program.is_relative_to(root) else program.name]
    for word in sys.argv[1:]:
        path = Path(word)
        words.append(path.name if path.is_absolute() else word)
    return "python " + " ".join(shlex.quote(word) for word in words)


def comparison_of(folder: Path) -> Comparison:
    """What `atoll compare` found of a campaign."""
    return Comparison.read(Store.open(folder), Comparison.PLACE)


def tiny(folder: Path, seed: int, *own: str) -> Path:
    """A quickstart, trained and compared, just large enough for a look at whether a benchmark works.

    Args:
        folder: `seed-SEED` in it becomes the campaign.
        seed: of the campaign.
        own: further settings.
    """
    made = folder / f"seed-{seed}"
    sets = [part for one in (f"seed={seed}", *TINY, *own) for part in ("--set", one)]
    run_command("new", made, "--recipe", "quickstart", *sets)
    for stage in ("launch", "compare"):
        run_command(stage, made)
    return made


def machine() -> dict[str, Any]:
    """Processor, cores and memory."""
    model = platform.processor() or platform.machine()
    for line in _read("/proc/cpuinfo").splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    memory = next(
        (line.split()[1] for line in _read("/proc/meminfo").splitlines() if line.startswith("MemTotal")), "0"
    )
    return {
        "system": platform.system(),
        "processor": model,
        "cores": os.cpu_count(),
        "memory_gib": round(int(memory) / 2**20, 1),
        "python": platform.python_version(),
    }


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
