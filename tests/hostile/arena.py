"""Places to attack: copies of a finished campaign, its export and a folder of pictures."""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from nursery import Nursery

LARGE = 2**20  # bytes; larger files are links to the template's
SECONDS = 10.0


@dataclass(frozen=True)
class Outcome:
    """How a command ended (None: it hung), what it printed, and what it did that it must not."""

    code: int | None
    said: str
    acts: list[str]
    changed: list[str]

    @property
    def error(self) -> str:
        """The one line of error."""
        lines = [line for line in self.said.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1, self.said
        return lines[0]

    def check(self) -> None:
        """What holds of every input: no hang, no traceback, no act and no change outside."""
        assert self.code is not None, f"still running: {self.said}"
        assert "Traceback" not in self.said, self.said
        # tqdm's bars go up a line.
        assert not re.search("\x1b(?!\\[A)|[\u202a-\u202e]", self.said), "a terminal would obey it"
        assert self.code in (0, 2, 75), (self.code, self.said)
        assert not self.acts, self.acts
        assert not self.changed, self.changed
        assert self.code != 2 or self.error


class Arena:
    """A folder in which commands are run; `inside` is theirs, what lies beside it is not.

    Templates are copied into it; files from `large` bytes on are links, but for logs, which are appended to.
    """

    def __init__(
        self,
        folder: Path,
        templates: dict[str, Path],
        nursery: Nursery,
        seconds: float = SECONDS,
        large: int = LARGE,
    ) -> None:
        self.folder, self.nursery, self.seconds = folder, nursery, seconds
        self.inside = folder / "inside"
        for name, template in templates.items():
            shutil.copytree(template, self.inside / name, copy_function=partial(_copy, large), symlinks=True)
        (self.inside / "tmp").mkdir(parents=True, exist_ok=True)
        (folder / "beside.txt").write_text("not yours")

    def __truediv__(self, name: str) -> Path:
        return self.inside / name

    def run(
        self, *argv: str | Path, call: tuple[str, ...] = (), env: dict[str, str] | None = None
    ) -> Outcome:
        """Run a command, or with `call` a function of `calls.py`, within the arena."""
        before, log = self._beside(), self.folder.parent / f"{self.folder.name}.acts"
        faults: dict[str, list[Any]] = {"watched": [str(self.inside), str(log)]}
        faults |= {"call": list(call)} if call else {}
        temporary = self.inside / "tmp"
        places = {"TMPDIR": "", "HF_HOME": "hub", "ATOLL_CACHE": "cache"}
        places = {name: str(temporary / folder) for name, folder in places.items()}
        child = self.nursery.start(*argv, faults=faults, env={**places, **(env or {})})
        code = child.ended(self.seconds)
        if code is None:
            child.kill()
        acts = log.read_text().splitlines() if log.exists() else []
        log.unlink(missing_ok=True)
        after = self._beside()
        changed = sorted(path for path in before.keys() | after.keys() if before.get(path) != after.get(path))
        return Outcome(code, child.said(), acts, changed)

    def _beside(self) -> dict[str, str]:
        """Digests of the files of the arena that are not inside."""
        files = [path for path in self.folder.rglob("*") if not path.is_relative_to(self.inside)]
        return {str(path): _digest(path) for path in files}


def replace(path: Path, data: bytes) -> None:
    """Write a file anew: large ones are links to the template's."""
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def edit(path: Path, change: Callable[[Any], Any]) -> None:
    """Change the content of a JSON file, in place or by what is returned."""
    tree = json.loads(path.read_bytes())
    changed = change(tree)
    replace(path, json.dumps(tree if changed is None else changed).encode())


def relisted(folder: Path) -> None:
    """Make the manifest agree with the files again, as whoever forges a folder would."""

    def relist(manifest: dict[str, Any]) -> None:
        for entry in manifest["files"]:
            path = folder / entry["path"]
            if path.is_file():
                data = path.read_bytes()
                entry.update(bytes=len(data), sha256=hashlib.sha256(data).hexdigest())

    edit(folder / "ensemble.json", relist)


def _copy(large: int, source: str, target: str) -> None:
    if os.path.getsize(source) >= large and not source.endswith(".jsonl"):
        os.link(source, target)
    else:
        shutil.copy2(source, target)


def _digest(path: Path) -> str:
    is_file = path.is_file() and not path.is_symlink()
    return hashlib.sha256(path.read_bytes()).hexdigest() if is_file else "no file"
