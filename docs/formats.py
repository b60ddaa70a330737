"""Write the generated parts of docs/formats.md and docs/reference/settings.md from the types in the code.

python docs/formats.py           write them
python docs/formats.py --check   exit 1 unless they are what the pages hold
"""

import importlib
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

import atoll
from atoll.base.config import Config
from atoll.base.format import File
from atoll.campaign.settings.campaign import CampaignConfig

SOURCE = Path(atoll.__file__).parent
DOCS = Path(__file__).parent
BEGIN = "<!-- From here on by docs/formats.py, from the docstrings of the types: change them there. -->"
END = "<!-- Until here. -->"


def main(argv: list[str]) -> int:
    """Write the page, or check it."""
    for path in sorted(SOURCE.rglob("*.py")):
        if re.search(r"^    FORMAT\b", path.read_text(), re.MULTILINE):
            importlib.import_module(".".join(("atoll", *path.relative_to(SOURCE).with_suffix("").parts)))
    generated = {
        "formats.md": document(list(_formats(File))),
        "reference/settings.md": settings(CampaignConfig),
    }
    stale = []
    for name, text in generated.items():
        page = (DOCS / name).read_text()
        new = f"{page.partition(BEGIN)[0]}{BEGIN}\n\n{text}\n\n{END}{page.partition(END)[2]}"
        stale += [name] * (new != page)
        if argv != ["--check"]:
            (DOCS / name).write_text(new)
    if argv == ["--check"]:
        print(f"run: python docs/formats.py, for {stale}" if stale else "the pages are as generated")
        return int(bool(stale))
    return 0


def settings(root: type[Config]) -> str:
    """Describe settings as Markdown: a section for each top-level key, a row for each path of `--set`."""
    sections: dict[str, list[str]] = {}
    for path, default, meaning in _settings(root, None, "", {}):
        row = f"| `{path}` | {default} | {_sentence(meaning)} |"
        sections.setdefault(path.partition(".")[0], []).append(row)
    head = "| setting | default | meaning |\n| --- | --- | --- |"
    return "\n\n".join("\n".join([f"## {name}\n", head, *rows]) for name, rows in sections.items())


def _settings(
    group: type[Config], held: Config | None, before: str, seen: dict[type[Config], str]
) -> Iterator[tuple[str, str, str]]:
    """Path, default and meaning of every setting of a group and of the groups in it.

    What a group has in common with one that was described before is not described again.
    """
    bases = [kind for kind in group.__mro__ if issubclass(kind, Config) and kind is not Config]
    known = next((kind for kind in bases if kind in seen), None)
    if known is not None:
        yield f"{before}*", "", f"Settings as in `{seen[known]}`."
    for kind in bases:
        seen.setdefault(kind, before.rstrip("."))
    for name, field in group.model_fields.items():
        if known is not None and name in known.model_fields:
            continue
        path, kinds = before + name, (field.annotation, *get_args(field.annotation))
        value = field.get_default(call_default_factory=True) if held is None else getattr(held, name)
        plain = value.model_dump(mode="json", exclude_defaults=True) if isinstance(value, Config) else value
        default = "required" if plain is PydanticUndefined else f"`{json.dumps(plain, default=list)}`"
        yield path, "" if plain == {} else default, field.description or ""
        inner = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Config)), None)
        if inner is not None:
            keyed = any(get_origin(kind) is dict for kind in kinds)
            below = value if isinstance(value, inner) else None
            yield from _settings(inner, below, f"{path}.NAME." if keyed else f"{path}.", seen)


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
    if origin in (list, tuple) or hasattr(kind, "_fields"):  # a named tuple is written as a list
        return f"list of {_type(inner[0] if inner else next(iter(kind.__annotations__.values())))}"
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
