"""Files, JSON and YAML that nobody vouches for: bounded, nothing is run, and an error is one line."""

import os
import re
from collections.abc import Collection
from pathlib import Path
from stat import S_ISREG
from typing import Annotated, Any, NoReturn

import yaml
from pydantic import AfterValidator
from pydantic_core import from_json

from atoll.base.errors import ConfigError, DataError

LARGEST = 256 * 2**20  # bytes; the manifest of 150 million rows in shards of 4,096 has 20 MB
LARGEST_YAML = 2**20
DEEPEST_YAML, DEEP = 50, "it is nested too deeply"
MOST_YAML = 100_000
LONGEST_PATH = 1024


class _Loader(yaml.SafeLoader):
    """YAML 1.2's words for true and false, as JSON's: 1.1 takes `on`, `off`, `yes` and `no` as well."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        # PyYAML takes the last of two alike, and forgets the settings of the first.
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.value != "<<"]
        if twice := [key for key in keys if keys.count(key) > 1]:
            raise yaml.constructor.ConstructorError(problem=f"{twice[0]!r} is written twice")
        return super().construct_mapping(node, deep)


_BOOL = "tag:yaml.org,2002:bool"
_Loader.yaml_implicit_resolvers = {
    first: [(tag, words) for tag, words in known if tag != _BOOL]
    for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(_BOOL, re.compile("true|True|TRUE|false|False|FALSE"), list("tTfF"))


def read_json(data: bytes | str) -> Any:
    """Parse JSON of at most `LARGEST` bytes and 200 levels; `ValueError` where it is something else."""
    if len(data) > LARGEST:
        raise ValueError(f"it has {len(data):,} bytes")
    return from_json(data)


def read_yaml(text: bytes | str, where: str) -> Any:
    """Parse YAML of at most `LARGEST_YAML` bytes and, aliases written out, `MOST_YAML` values."""
    try:
        if len(text) > LARGEST_YAML:
            raise ValueError(f"it has {len(text):,} bytes")
        try:
            tree = _Loader(text).get_single_data()
        except RecursionError:  # PyYAML lets it through
            raise ValueError(DEEP) from None
        # A few lines of aliases of aliases are billions of values, or one that holds itself.
        rest, count = [(tree, 1)], 0
        while rest:
            (value, depth), count = rest.pop(), count + 1
            if count > MOST_YAML:
                raise ValueError(f"it holds more than {MOST_YAML:,} values")
            if depth > DEEPEST_YAML:
                raise ValueError(DEEP)
            values = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
            rest += [(below, depth + 1) for below in values]
        return tree
    except (yaml.YAMLError, ValueError) as error:  # PyYAML lets the last one through
        reason = " ".join(str(error).split())
        raise ConfigError(f"{where} is not valid YAML ({reason[:200]})", "correct it, or quote it") from None


def read_bytes(path: Path, most: int = LARGEST) -> bytes:
    """A file in whole; `DataError` where it cannot be read, is no file, or has more bytes."""
    try:
        # A pipe would wait for its writer, and a device has no end.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            if not S_ISREG((state := os.fstat(file.fileno())).st_mode):
                raise DataError(f"{path} is no file", "give a file")
            if state.st_size > most:
                raise DataError(f"{path} has {state.st_size:,} bytes", f"give at most {most:,}")
            return file.read(state.st_size)  # of what grows meanwhile, what it was
    except (OSError, ValueError) as error:  # the second of a NUL in the path
        reason = getattr(error, "strerror", error)
        raise DataError(f"cannot read {path}: {reason}", "check the path") from None


def read_text(path: Path, most: int = LARGEST) -> str:
    """A UTF-8 text file in whole; `DataError` where it is none, as `read_bytes`."""
    try:
        return read_bytes(path, most).decode("utf-8-sig")  # editors of Windows begin with a mark
    except UnicodeDecodeError:
        raise DataError(f"{path} is no UTF-8 text", "save it as UTF-8") from None


def unreadable(why: OSError, path: Path | None = None) -> NoReturn:
    """`DataError` in one line; with `path`, since only opening a file names it, and reading it does not."""
    raise DataError(f"cannot read {path or why.filename}: {why.strerror}", "check path and access") from None


def files_below(folder: Path, suffixes: Collection[str]) -> list[Path]:
    """The files below a folder whose names end so, by path; `DataError` where a folder cannot be read."""
    walked = ((base, name) for base, _, names in os.walk(folder, onerror=unreadable) for name in names)
    paths = (Path(base, name) for base, name in walked if os.path.splitext(name)[1].lower() in suffixes)
    return sorted(path for path in paths if path.is_file())


def _normalised(path: str) -> str:
    parts = path.split("/")
    names = [part for number, part in enumerate(parts) if part != ".." or set(parts[:number]) - {".."}]
    plain = path.isprintable() and "\\" not in path and len(path) <= LONGEST_PATH
    if not plain or not names or {"", ".", ".."} & set(names):
        raise ValueError("not a relative, normalised path")
    return path


NormalPath = Annotated[str, AfterValidator(_normalised)]
"""A relative, normalised POSIX path; `..` may stand at its beginning only."""


def expanded(path: str | os.PathLike[str]) -> Path:
    """A path whose `~` is the home folder; `ConfigError` where there is no such user, or a NUL in it."""
    try:
        if "\0" in str(path):
            raise RuntimeError
        return Path(path).expanduser()
    except RuntimeError:
        raise ConfigError(f"there is no folder {str(path)!r}", "write the path out, without ~") from None


def resolved(path: str | os.PathLike[str]) -> Path:
    """An absolute path without links; `ConfigError` where links lead in a circle."""
    place = expanded(path)
    try:
        return place.resolve()
    except (RuntimeError, OSError):
        what = f"links of {place} lead in a circle"
        raise ConfigError(what, "remove them, or name another place") from None
