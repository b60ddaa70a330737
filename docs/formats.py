"""Write the generated part of docs/formats.md from the types of the files that Atoll writes.

python docs/formats.py           write it
python docs/formats.py --check   exit 1 unless it is what the page holds
"""

import importlib
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel

import atoll
from atoll.base.format import File

SOURCE = Path(atoll.__file__).parent
PAGE = Path(__file__).with_name("formats.md")
BEGIN = "<!-- From here on by docs/formats.py, from the docstrings of the types: change them there. -->"
END = "<!-- Until here. -->"


def main(argv: list[str]) -> int:
    """Write the page, or check it."""
    for path in sorted(SOURCE.rglob("*.py")):
        if re.search(r"^    FORMAT\b", path.read_text(), re.MULTILINE):
            importlib.import_module(".".join(("atoll", *path.relative_to(SOURCE).with_suffix("").parts)))
    page = PAGE.read_text()
    before, after = page.partition(BEGIN)[0], page.partition(END)[2]
    new = f"{before}{BEGIN}\n\n{document(list(_formats(File)))}\n\n{END}{after}"
    if argv == ["--check"]:
        print("docs/formats.md is as generated" if new == page else "run: python docs/formats.py")
        return int(new != page)
    PAGE.write_text(new)
    return 0


def document(formats: list[type[File]]) -> str:
    """Describe formats as Markdown: a section for each, with its fields, their types and what they mean.

    What several of them hold is described once, at the end.
    """
    ordered = sorted(formats, key=lambda kind: (kind.PLACE, kind.FORMAT))
    for name, count in Counter(kind.FORMAT for kind in ordered).items():
        assert count == 1, f"{count} files are of the format {name}: each needs a name of its own"
    groups = {kind: list(_groups(kind)) for kind in ordered}
    uses = Counter(group for held in groups.values() for group in held)
    shared = [group for group in uses if uses[group] > 1 and group not in formats]
    own = {kind: [g for g in held if uses[g] == 1 and g not in formats] for kind, held in groups.items()}
    sections = [_section(kind, own[kind]) for kind in ordered]
    parts = [f"Of each `{group.__name__}`:\n\n{_fields(group)}" for group in shared]
    return "\n\n".join([*sections, "### In several of them", *parts])


def _formats(kind: type[File]) -> Iterator[type[File]]:
    """The formats of the modules that are imported."""
    if "FORMAT" in vars(kind) and kind is not File:  # else it is the base of several
        yield kind
    for below in kind.__subclasses__():
        yield from _formats(below)


def _section(kind: type[File], groups: list[type[BaseModel]]) -> str:
    version = f"`{kind.FORMAT}` {kind.VERSION}"
    remedy = f" Of another version: {kind.REMEDY}." if kind.HEADED else ""
    head = f"### {kind.PLACE}\n\n{version}. {_sentence(kind.__doc__)}{remedy}\n\n{_fields(kind)}"
    return "\n\n".join([head, *(f"Of each `{group.__name__}`:\n\n{_fields(group)}" for group in groups)])


def _fields(model: type[BaseModel]) -> str:
    rows = [
        f"| `{field.alias or name}` | {_type(field.annotation)} | {_sentence(field.description)} |"
        for name, field in model.model_fields.items()
    ]
    return "\n".join(["| field | type | meaning |", "| --- | --- | --- |", *rows])


def _groups(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    """The models that the fields of a model hold, each once, however deep."""
    seen: list[type[BaseModel]] = []
    waiting = [field.annotation for field in model.model_fields.values()]
    while waiting:
        kind = waiting.pop(0)
        waiting += get_args(kind)
        if isinstance(kind, type) and issubclass(kind, BaseModel) and kind not in seen:
            seen.append(kind)
            waiting += [field.annotation for field in kind.model_fields.values()]
    yield from seen


def _type(kind: Any) -> str:
    origin, inner = get_origin(kind), get_args(kind)
    if kind is type(None):
        return "null"
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in inner)
    if isinstance(kind, UnionType) or "Union" in str(origin):
        return " or ".join(map(_type, inner))
    if origin in (list, tuple):
        return f"list of {_type(inner[0])}"
    if origin is dict:
        return f"{_type(inner[1])} by {_type(inner[0])}"
    plain = {str: "text", int: "integer", float: "number", bool: "true or false", Any: "any"}
    if getattr(kind, "__metadata__", None):
        return _type(inner[0])
    return plain.get(kind) or f"`{getattr(kind, '__name__', kind)}`"


def _sentence(text: str | None) -> str:
    return " ".join((text or "").split()).replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
