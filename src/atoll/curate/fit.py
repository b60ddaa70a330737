"""Fit performance to the frequency of concepts (Udandarao et al. 2024, arXiv 2404.04125)."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from atoll.base.console import say
from atoll.base.errors import ConfigError, DataError, nearest
from atoll.base.format import File
from atoll.base.text import words_of
from atoll.curate.concepts import numeric, read_tables
from atoll.store.store import Store

F64 = NDArray[np.float64]
RESAMPLED = 1 << 22
"""Values of resamples that are in memory at once."""


class Estimate(NamedTuple):
    """A number with the 95 % interval of a bootstrap over concepts."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.4g} (95 % {self.low:.4g} to {self.high:.4g})"


class FrequencyFit(File):
    """`fit.json`: how performance goes with the frequency of concepts."""

    FORMAT, PLACE, ERROR = "atoll/concept-fit", "reports/concepts/fit.json", DataError
    REMEDY = "run 'atoll concepts fit' again"

    counts: str = ""
    """Name of the table and column of the frequencies."""
    results: str = ""
    """Name of the table and column of the performances."""
    where: list[str] = []
    """What rows were chosen by."""
    concepts: int
    """Those in both tables."""
    unmatched: int = 0
    """Those with a result and no count."""
    slope: Estimate
    """Performance gained by ten times the examples, with its 95 % interval."""
    pearson: Estimate
    """Correlation with the logarithm of the count."""
    spearman: Estimate
    """Correlation of the ranks."""
    binned: float | None
    """Correlation of the means of the paper's twelve bins."""


def fit(counts: ArrayLike, performance: ArrayLike, draws: int = 1000, seed: int = 0) -> FrequencyFit:
    """Fit performance `(N,)` to ln(max(count, 1)) `(N,)` by least squares.

    `DataError` for fewer than three concepts, values that are no numbers or negative, or one value only.
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

    def statistics(rows: NDArray[np.int64]) -> list[F64]:
        own, of = logs[rows], y[rows]
        pearson = stats.pearsonr(own, of, axis=1).statistic
        ranks = stats.pearsonr(stats.rankdata(own, axis=1), stats.rankdata(of, axis=1), axis=1).statistic
        # The slope of least squares is r times the ratio of deviations; ln 10 turns it into one per tenfold.
        return [math.log(10) * pearson * of.std(1) / own.std(1), pearson, ranks]

    random = np.random.default_rng(seed)
    # At once for as many resamples as fit into memory: one by one, scipy's calls cost more than the sums.
    counted = map(len, np.array_split(np.arange(draws), 1 + draws * len(x) // RESAMPLED))
    parts = (random.integers(0, len(x), (count, len(x))) for count in counted)
    # A resample of one concept many times has neither slope nor correlation: it says nothing about either.
    usable = (p[(np.ptp(logs[p], axis=1) > 0) & (np.ptp(y[p], axis=1) > 0)] for p in parts)
    drawn = np.concatenate([np.empty((3, 0)), *(statistics(part) for part in usable if len(part))], axis=1)
    low, high = np.percentile(drawn if drawn.size else np.full((3, 1), math.nan), [2.5, 97.5], axis=1)
    values = np.concatenate(statistics(np.arange(len(x))[None]))
    slope, pearson, spearman = map(Estimate, values.tolist(), low.tolist(), high.tolist())
    own = binned(x, y)
    return FrequencyFit(concepts=len(x), slope=slope, pearson=pearson, spearman=spearman, binned=own)


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
) -> FrequencyFit:
    """Fit results to counts, both by concept; write `fit.json` and print it.

    Both tables have `concept`. Other columns of words that both have, such as a data set's name, join them
    too. `DataError` where a table or column is missing, or too few concepts are in both.
    """
    tables = [pa.concat_tables(read_tables(path, "concept")) for path in (counts, results)]

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

    # The column of numbers of each.
    numbers = []
    for table, named, path in zip(tables, columns, (counts, results), strict=True):
        there = numeric(table)
        if named is not None and named not in there:
            raise DataError(f"{path} has no numbers {named!r}", nearest(named, there))
        if named is None and len(there) != 1:
            fix = f"name one of {', '.join(there)}" if there else "write 1000, and not 1,000 or '1000'"
            raise DataError(f"{path} has {len(there)} columns of numbers", fix)
        numbers.append(named or there[0])

    # Joined by concept, and by the columns of words that both have.
    shared = [name for name in tables[0].column_names if name in tables[1].column_names]
    # Also large strings, and dictionaries of either, by the names of their types.
    words = [name for name in shared if "string" in str(tables[0].schema.field(name).type)]
    keys = ["concept", *(name for name in words if name != "concept" and name not in fixed)]
    x, y = (_values(table, keys, number) for table, number in zip(tables, numbers, strict=True))
    both = [key for key in y if key in x]
    about = {"counts": f"{counts.name}, {numbers[0]}", "results": f"{results.name}, {numbers[1]}"}
    rest = {"where": [*where], "unmatched": (unmatched := len(y) - len(both))}
    fitted = fit([x[key] for key in both], [y[key] for key in both]).model_copy(update={**about, **rest})
    Store.open(out, create=True).put_json(FrequencyFit.PLACE, fitted.to_json())

    say(f"{len(both):,} concepts" + (f"; {unmatched:,} results have no count" if unmatched else ""))
    say(f"  ten times the examples: {fitted.slope}")
    say(f"  correlation with the logarithm {fitted.pearson}, of the ranks {fitted.spearman}")
    figure = "none" if fitted.binned is None else f"{fitted.binned:.4f}"
    say(f"  correlation of the means of twelve bins, as published: {figure}")
    if fitted.slope.low > 0:
        times = 10 ** min(300.0, 10 / fitted.slope.value)  # a larger power is an OverflowError
        say(f"  ten more of performance cost {times:,.3g} times the examples")
    elif fitted.slope.high > 0:
        say("  no trend: the interval holds 0")
    return fitted


def _values(table: pa.Table, keys: Sequence[str], number: str) -> dict[tuple[str, ...], float]:
    values: dict[tuple[str, ...], float] = {}
    for row in table.select([*keys, number]).drop_null().to_pylist():
        # "Hot_Dog" and "hot dog" are one concept.
        key = (" ".join(words_of(str(row["concept"]).replace("_", " "))), *(str(row[k]) for k in keys[1:]))
        if not math.isfinite(value := float(row[number])):  # of large integers two may be one float
            raise DataError(f"{' / '.join(key)} has {value}, which is no number", "leave it out")
        if values.setdefault(key, value) != value:
            what = f"{' / '.join(key)} stands twice in the table, as {values[key]:g} and {value:g}"
            raise DataError(what, "choose rows by --where")
    return values
