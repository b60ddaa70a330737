"""Fit performance to the frequency of concepts (Udandarao et al. 2024, arXiv 2404.04125)."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from atoll.base.console import say
from atoll.base.errors import ConfigError, DataError, nearest
from atoll.base.format import File
from atoll.curate.image_hits import numeric, read_table
from atoll.data.words import words_of
from atoll.store.store import Store

F64 = NDArray[np.float64]


class Estimate(NamedTuple):
    """A number with the 95 % interval of a bootstrap over concepts."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.4g} (95 % {self.low:.4g} to {self.high:.4g})"


@dataclass(frozen=True)
class Fit:
    """Performance over the logarithm of the frequency; see `FrequencyFit` for the fields."""

    concepts: int
    slope: Estimate
    pearson: Estimate
    spearman: Estimate
    binned: float | None

    def examples_for(self, gain: float) -> Estimate:
        """How many times the examples a gain takes; infinite where there is no rising trend."""

        def times(slope: float) -> float:
            exponent = gain / slope if slope > 0 else math.inf
            return 10.0**exponent if exponent < 300 else math.inf

        return Estimate(times(self.slope.value), times(self.slope.high), times(self.slope.low))


class FrequencyFit(File):
    """`fit.json`: how performance goes with the frequency of concepts."""

    FORMAT, PLACE, ERROR = "atoll/concept-fit", "reports/concepts/fit.json", DataError
    REMEDY = "run 'atoll concepts fit' again"

    counts: str
    """Name of the table and column of the frequencies."""
    results: str
    """Name of the table and column of the performances."""
    where: list[str]
    """What rows were chosen by."""
    concepts: int
    """Those in both tables."""
    unmatched: int
    """Those with a result and no count."""
    slope: tuple[float, float, float]
    """Performance gained by ten times the examples, with its 95 % interval."""
    pearson: tuple[float, float, float]
    """Correlation with the logarithm of the count."""
    spearman: tuple[float, float, float]
    """Correlation of the ranks."""
    binned: float | None
    """Correlation of the means of the paper's twelve bins."""


STATISTICS: dict[str, Callable[[F64, F64], float]] = {
    "slope": lambda logs, y: float(math.log(10) * stats.linregress(logs, y).slope),
    "pearson": lambda logs, y: float(stats.pearsonr(logs, y).statistic),
    "spearman": lambda logs, y: float(stats.spearmanr(logs, y).statistic),
}


def fit(counts: ArrayLike, performance: ArrayLike, draws: int = 1000, seed: int = 0) -> Fit:
    """Fit performance `(N,)` to ln(max(count, 1)) `(N,)` by least squares.

    Raises:
        DataError: fewer than three concepts, values that are no numbers, negative counts, or one value only.
    """
    x, y = np.asarray(counts, dtype=np.float64), np.asarray(performance, dtype=np.float64)
    if x.shape != y.shape or x.ndim != 1:
        raise DataError(f"{x.size} counts for {y.size} results", "give one of each for every concept")
    if len(x) < 3:
        raise DataError(f"{len(x)} concepts have both a count and a result", "give three or more")
    if not (np.isfinite(x).all() and np.isfinite(y).all() and (x >= 0).all()):
        raise DataError("a count or a result is negative or no number", "leave that concept out")
    for name, values in (("counts", x), ("results", y)):
        if not np.ptp(values):
            raise DataError(f"all {name} are {values[0]:g}: nothing can be fitted", "give others")
    logs = np.log(np.maximum(x, 1))
    if not np.ptp(logs):
        raise DataError("all counts are 0 or 1: nothing can be fitted", "give others")
    samples = np.random.default_rng(seed).integers(0, len(x), (draws, len(x)))
    # A resample of one concept many times has neither slope nor correlation: it says nothing about either.
    usable = [rows for rows in samples if np.ptp(logs[rows]) and np.ptp(y[rows])]
    estimates = {}
    for name, statistic in STATISTICS.items():
        low, high = np.percentile(
            [statistic(logs[rows], y[rows]) for rows in usable] or [math.nan], [2.5, 97.5]
        )
        estimates[name] = Estimate(statistic(logs, y), float(low), float(high))
    return Fit(len(x), **estimates, binned=binned(x, y))


def binned(counts: F64, performance: F64, bins: int = 12) -> float | None:
    """The paper's figure: correlation of 12 bins' edges and means, less the first and the last bin.

    Bins are even in ln(max(count, 1)) and closed on the right. None where all means are the same.
    """
    # It hides how far concepts scatter, and is here only to be compared with. An empty bin has the mean 0,
    # as in the authors' notebooks: a figure made otherwise would not be theirs.
    logs = np.log(np.maximum(counts, 1))
    edges = np.linspace(logs.min(), logs.max(), bins)
    bin_of = np.digitize(logs, edges, right=True)
    means = np.array([performance[bin_of == n].mean() if (bin_of == n).any() else 0.0 for n in range(bins)])
    inner = means[1:-1]
    return float(stats.pearsonr(edges[1:-1], inner).statistic) if np.ptp(inner) else None


def fit_stage(
    counts: Path, results: Path, where: Sequence[str], columns: tuple[str | None, str | None], out: str
) -> Fit:
    """Fit results to counts, both by concept; write `fit.json` and print it.

    Args:
        counts: parquet or CSV with `concept` and a column of numbers.
        results: likewise. Other columns of words that both have, such as a data set's name, join them too.
        where: `COLUMN=VALUE` or `COLUMN!=VALUE` that rows must fulfil, in whichever table has the column.
        columns: names of the two columns of numbers; by default the only one.
        out: folder or store of `reports/`.

    Raises:
        DataError: a table or column is missing, or too few concepts are in both.
    """
    tables = [read_table(path) for path in (counts, results)]

    # The rows that --where asks for.
    known = sorted({name for table in tables for name in table.column_names})
    fixed = set()
    for condition in where:
        name, mark, value = condition.partition("!=") if "!=" in condition else condition.partition("=")
        if not mark:
            raise ConfigError(f"--where {condition!r}", "write COLUMN=VALUE or COLUMN!=VALUE")
        if name not in known:
            raise ConfigError(f"--where {condition!r}: neither table has {name!r}", nearest(name, known))
        for number, table in enumerate(tables):
            if name in table.column_names:
                same = pc.equal(pc.cast(table[name], pa.string()), value)
                tables[number] = table.filter(same if mark == "=" else pc.invert(same))
        fixed |= {name} if mark == "=" else set()

    # Joined by concept, and by the columns of words that both have.
    numbers = [_number(*of) for of in zip(tables, columns, (counts, results), strict=True)]
    words = [n for n in tables[0].column_names if n in tables[1].column_names and _of_words(tables[0], n)]
    keys = ["concept", *(name for name in words if name != "concept" and name not in fixed)]
    x, y = (_values(table, keys, number) for table, number in zip(tables, numbers, strict=True))
    both = [key for key in y if key in x]
    found = fit([x[key] for key in both], [y[key] for key in both])
    unmatched = len(y) - len(both)
    file = FrequencyFit(
        counts=f"{counts.name}, {numbers[0]}",
        results=f"{results.name}, {numbers[1]}",
        where=list(where),
        unmatched=unmatched,
        **asdict(found),
    )
    Store.open(out, create=True).put_json(FrequencyFit.PLACE, file.to_json())

    say(f"{len(both):,} concepts" + (f"; {unmatched:,} results have no count" if unmatched else ""))
    say(f"  ten times the examples: {found.slope}")
    say(f"  correlation with the logarithm {found.pearson}, of the ranks {found.spearman}")
    figure = "none" if found.binned is None else f"{found.binned:.4f}"
    say(f"  correlation of the means of twelve bins, as published: {figure}")
    if found.slope.low > 0:
        say(f"  ten more of performance cost {found.examples_for(10).value:,.3g} times the examples")
    elif found.slope.high > 0:
        say("  no trend: the interval holds 0")
    return found


def _of_words(table: pa.Table, name: str) -> bool:
    kind = table.schema.field(name).type
    return bool(pa.types.is_string(kind.value_type if pa.types.is_dictionary(kind) else kind))


def _number(table: pa.Table, named: str | None, path: Path) -> str:
    if "concept" not in table.column_names:
        raise DataError(f"{path} has no column 'concept'", "name the column of the concepts so")
    numbers = numeric(table)
    if named is not None and named not in numbers:
        raise DataError(f"{path} has no numbers {named!r}", nearest(named, numbers))
    if named is None and len(numbers) != 1:
        raise DataError(f"{path} has {len(numbers)} columns of numbers", f"name one of {', '.join(numbers)}")
    return named or numbers[0]


def _values(table: pa.Table, keys: Sequence[str], number: str) -> dict[tuple[str, ...], float]:
    values: dict[tuple[str, ...], float] = {}
    rows: list[dict[str, Any]] = table.select([*keys, number]).drop_null().to_pylist()
    for row in rows:
        # "Hot_Dog" and "hot dog" are one concept.
        key = (" ".join(words_of(str(row["concept"]).replace("_", " "))), *(str(row[k]) for k in keys[1:]))
        if values.setdefault(key, float(row[number])) != row[number]:
            what = f"{' / '.join(key)} stands twice in the table, as {values[key]:g} and {row[number]:g}"
            raise DataError(what, "choose rows by --where")
    return values
