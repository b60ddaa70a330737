"""Which value of which result a number of the documentation is: proposes `tests/numbers.json`.

    python tests/numbers_of.py

keeps what is right and proposes a place in the results for every number without one, or of another value:
read the difference before you commit it. A number is named by its block, row, column and order in the cell;
a place is `FILE | rows | case | metric | value`, or the keys of the JSON from the outside in.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "tests" / "numbers.json"
PAGES = [
    "README.md",
    "examples/emoji/README.md",
    *sorted(p.relative_to(ROOT).as_posix() for p in (ROOT / "docs").rglob("*.md")),
]
MARK = re.compile(r"<!-- numbers: (?P<files>[\w. -]+) -->\n(?P<block>.+?)(?=\n\n|\Z)", re.DOTALL)
NUMBER = re.compile(r"(?<![\w.,])\d+\.\d+(?![\w.])")
Leaves = dict[str, float]
"""Numbers by their place in the results."""


def leaves(tree: Any, path: str) -> Iterator[tuple[str, float]]:
    """The numbers of a JSON tree; rows of a result by case and metric, large numbers in millions too."""
    if isinstance(tree, dict) and {"case", "metric", "value"} <= tree.keys():
        of = {name: tree[name] for name in ("value", "spread")}
        yield from leaves(of, f"{path.rpartition(' | ')[0]} | {tree['case']} | {tree['metric']}")
    elif isinstance(tree, dict | list):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from leaves(value, f"{path} | {key}")
    elif isinstance(tree, int | float) and not isinstance(tree, bool):
        yield path, abs(tree)
        if abs(tree) > 1e5:
            yield f"{path} | millions", abs(tree) / 1e6


@cache
def values(file: str) -> Leaves:
    """All numbers of a file in benchmarks/results/."""
    found: Leaves = {}
    for path, value in leaves(json.loads((ROOT / "benchmarks/results" / file).read_text()), file):
        again = 2
        while path in found:  # measured twice in one call
            path, again = f"{path.removesuffix(f' #{again - 1}')} #{again}", again + 1
        found[path] = value
    return found


def numbers(page: str, text: str) -> Iterator[tuple[str, list[str], str, str]]:
    """Cells with numbers of a page's marked blocks: the block's name and files, the cell's name and text.

    A cell is called `row / column` of its table; a block that is none has one, `text`.
    """
    seen: Counter[str] = Counter()
    for match in MARK.finditer(text):
        heading = re.findall(r"^#+ (.+)$", text[: match.start()], re.MULTILINE)[-1]
        seen[heading] += 1
        block = re.sub(r"`[^`]*`|\]\([^)]*\)", lambda m: re.sub(r"\d\.\d", "", m[0]), match["block"])
        cells = [("text", block)]
        if block.startswith("|"):
            head, _, *rows = ([c.strip() for c in line.strip("|").split("|")] for line in block.splitlines())
            cells = [(f"{row[0]} / {c}", cell) for row in rows for c, cell in zip(head, row, strict=True)]
        for name, cell in cells:
            if NUMBER.search(cell):
                yield f"{page}: {heading} {seen[heading]}", match["files"].split(), name, cell


def said(text: str, value: float) -> bool:
    """Whether a number of a text is a value, rounded to as many decimals."""
    return text == f"{value:.{len(text.partition('.')[2])}f}"


SETTING = "a setting, not a result"
SAME = {
    "160 epochs": "2228480 images",
    "29 epochs": "rate 0.002 400000 images",
    "28.7 epochs": "rate 0.002 400000 images",
    "commit": "once",
    "share nothing": "islands that share nothing",
    "real images": "real pictures",
    "guided by": "null milestone",
    "captions found": "retrieval",
    "own caption found": "retrieval",
}
"""Words of the documentation, and of the results."""


def words(text: str) -> Counter[str]:
    """Words and numbers of a text, some as the results have them."""
    text = text.lower().replace(",", "")
    for ours, theirs in SAME.items():
        text = text.replace(ours, f"{ours} {theirs}" if ours != "commit" else theirs)
    return Counter(re.findall(r"[a-z]+|\d+(?:\.\d+)?", text))


def kinds(cell: str) -> list[str]:
    """What each number of a cell should be: `value`, an end of its `spread`, or one seed's of `points`."""
    apart = re.sub(r"(\d\.\d+) to (\d+\.\d+)", r"<\1 >\2", cell)
    several = len(re.findall(r"\d\.\d+, \d", cell)) > 1 and "<" not in apart
    marks = {"<": "spread | 0", ">": "spread | 1"}
    numbers = [(apart[max(0, m.start() - 1)], m) for m in NUMBER.finditer(apart)]
    return [marks.get(mark, "test |" if several else "value") for mark, _ in numbers]


def main() -> None:
    """Propose, by the words that a number's row and column share with a value's."""
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    proposed: dict[str, dict[str, list[str]]] = {}
    for page in PAGES:
        for block, files, name, cell in numbers(page, (ROOT / page).read_text()):
            known = {path: value for file in files for path, value in values(file).items()}
            texts = NUMBER.findall(cell)
            matching = [[path for path, value in known.items() if said(text, value)] for text in texts]
            before = record.get(block, {}).get(name, [])
            for number, (text, kind, paths) in enumerate(zip(texts, kinds(cell), matching, strict=True)):
                place = f"{block} {name}"
                if name.startswith("text"):
                    at = cell.find(text)
                    place = f"{block} {cell[max(0, at - 150) : at + 60]}"
                others = [each for at, each in enumerate(matching) if at != number and each]
                best = max(paths, key=lambda path: score(path, words(place), kind, others), default="nowhere")
                named = any(text in path.split() or f"{text}," in path.split() for path in known)
                best = SETTING if named and "0.00" in text and ("text" in name or not paths) else best
                old = before[number] if number < len(before) else ""
                proposed.setdefault(block, {}).setdefault(name, []).append(old if old in paths else best)
    RECORD.write_text(json.dumps(proposed, indent=1, ensure_ascii=False) + "\n")


def shared(one: str, other: str) -> int:
    """Characters with which both begin."""
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), len(one))


def score(path: str, wanted: Counter[str], kind: str, others: list[list[str]]) -> float:
    """How well a value's place suits a number's name, and what the cell's other numbers may be."""
    have = words(path)
    near = [max(shared(path, other) for other in paths) / len(path) for paths in others]
    together = 2 * sum(near) / len(near) if near else 0
    return (have & wanted).total() / have.total() ** 0.5 + together + 1.5 * (kind in path)


if __name__ == "__main__":
    main()
