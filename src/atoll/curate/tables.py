"""Fits of performance to frequency, of any two tables: `atoll concepts fit`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from atoll.base.console import say
from atoll.base.errors import ConfigError, DataError, nearest
from atoll.base.format import File
from atoll.curate.frequency import Estimate, Fit, fit
from atoll.curate.image_hits import read_table
from atoll.data.words import words_of
from atoll.store.store import Store

Values = dict[tuple[str, ...], float]


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


def fit_stage(
    counts: Path, results: Path, where: Sequence[str], columns: tuple[str | None, str | None], out: str
) -> Fit:
    """Fit results to counts, both by concept, and write and say what was found.

    Args:
        counts: parquet or CSV with `concept` and a column of numbers.
        results: likewise. Other columns of words that both have, such as a data set's name, join them too.
        where: `COLUMN=VALUE` or `COLUMN!=VALUE` that rows must fulfil, in whichever table has the column.
        columns: names of the two columns of numbers; by default the only one.
        out: folder or store of `reports/`.

    Raises:
        DataError: a table or column is missing, or too few concepts are in both.
    """
    tables = [_chosen(read_table(path), where) for path in (counts, results)]
    _all_used(where, tables)
    numbers = [_number(t, c, p) for t, c, p in zip(tables, columns, (counts, results), strict=True)]
    fixed = {condition.partition("=")[0] for condition in where if "!=" not in condition}
    words = [n for n in tables[0].column_names if n in tables[1].column_names and _of_words(tables[0], n)]
    keys = ["concept", *(name for name in words if name != "concept" and name not in fixed)]
    x, y = (_values(table, keys, number) for table, number in zip(tables, numbers, strict=True))
    both = [key for key in y if key in x]
    found = fit([x[key] for key in both], [y[key] for key in both])
    file = FrequencyFit(
        counts=f"{counts.name}, {numbers[0]}",
        results=f"{results.name}, {numbers[1]}",
        where=list(where),
        concepts=len(both),
        unmatched=len(y) - len(both),
        slope=_three(found.slope),
        pearson=_three(found.pearson),
        spearman=_three(found.spearman),
        binned=None if found.binned != found.binned else found.binned,
    )
    store = Store.open(out, create=True)
    store.put_json(FrequencyFit.PLACE, file.to_json())
    for line in lines(found, len(y) - len(both)):
        say(line)
    return found


def lines(found: Fit, unmatched: int = 0) -> list[str]:
    """What a fit says."""
    low, high = found.slope.interval
    said = [
        f"{found.concepts:,} concepts" + (f"; {unmatched:,} results have no count" if unmatched else ""),
        f"  ten times the examples: {_text(found.slope)}",
        f"  correlation with the logarithm {_text(found.pearson)}, of the ranks {_text(found.spearman)}",
        f"  correlation of the means of twelve bins, as published: {found.binned:.4f}",
    ]
    if low > 0:
        times = found.examples_for(10)
        said.append(f"  ten more of performance cost {times.value:,.3g} times the examples")
    elif high > 0:
        said.append("  no trend: the interval holds 0")
    return said


def _text(one: Estimate) -> str:
    return f"{one.value:.4g} (95 % {one.interval[0]:.4g} to {one.interval[1]:.4g})"


def _three(one: Estimate) -> tuple[float, float, float]:
    return one.value, *one.interval


def _chosen(table: pa.Table, where: Sequence[str]) -> pa.Table:
    for condition in where:
        name, mark, value = condition.partition("!=") if "!=" in condition else condition.partition("=")
        if not mark:
            raise ConfigError(f"--where {condition!r}", "write COLUMN=VALUE or COLUMN!=VALUE")
        if name in table.column_names:
            same = pc.equal(pc.cast(table[name], pa.string()), value)
            table = table.filter(same if mark == "=" else pc.invert(same))
    return table


def _all_used(where: Sequence[str], tables: Sequence[pa.Table]) -> None:
    known = sorted({name for table in tables for name in table.column_names})
    for condition in where:
        name = condition.partition("=")[0].rstrip("!")
        if name not in known:
            raise ConfigError(f"--where {condition!r}: neither table has {name!r}", nearest(name, known))


def _of_words(table: pa.Table, name: str) -> bool:
    kind = table.schema.field(name).type
    return bool(pa.types.is_string(kind.value_type if pa.types.is_dictionary(kind) else kind))


def _number(table: pa.Table, named: str | None, path: Path) -> str:
    if "concept" not in table.column_names:
        raise DataError(f"{path} has no column 'concept'", "name the column of the concepts so")
    kinds = {n: table.schema.field(n).type for n in table.column_names}
    numbers = [n for n, kind in kinds.items() if pa.types.is_integer(kind) or pa.types.is_floating(kind)]
    if named is not None and named not in numbers:
        raise DataError(f"{path} has no numbers {named!r}", nearest(named, numbers))
    if named is None and len(numbers) != 1:
        raise DataError(f"{path} has {len(numbers)} columns of numbers", f"name one of {', '.join(numbers)}")
    return named or numbers[0]


def _values(table: pa.Table, keys: Sequence[str], number: str) -> Values:
    """Numbers by concept, as its words, and by the other keys."""
    found: Values = {}
    rows: list[dict[str, Any]] = table.select([*keys, number]).to_pylist()
    for row in rows:
        key = (" ".join(words_of(str(row["concept"]).replace("_", " "))), *(str(row[k]) for k in keys[1:]))
        if row[number] is None:
            continue
        if key in found and found[key] != row[number]:
            what = f"{' / '.join(key)} stands twice in the table, as {found[key]:g} and {row[number]:g}"
            raise DataError(what, "choose rows by --where")
        found[key] = float(row[number])
    return found
