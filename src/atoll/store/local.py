"""Files of a local store: written whole or not at all, and what killed writers left is removed.

A file is written under a passing name beside its own, then renamed. Listings pass over such names: `#` and
digits that say which process of which machine writes, and so whether it lives.
"""

import itertools
import os
import re
import shutil
import time
import zlib
from collections.abc import Iterable
from functools import cache
from pathlib import Path

_NUMBERS = itertools.count()
_PART = re.compile(r"#(\d{10})(\d{10})(\d{14})\d{6}")
_FOREIGN = re.compile(r"[^#]*#\d+")  # also those of obstore: NAME#1
EXPIRY = 24 * 3600.0
"""Seconds without a change after which a passing file is removed whose writer nobody here can know."""


def write(path: Path, data: bytes | Path | Iterable[bytes], *, replace: bool) -> bool:
    """Write a file, at once or in blocks, or copy one; False if it is there already and not to `replace`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = _passing(path.parent)
    try:
        if isinstance(data, Path):
            shutil.copyfile(data, part)
        else:
            with part.open("wb") as file:
                file.writelines([data] if isinstance(data, bytes) else data)
        if replace:
            part.replace(path)
        else:
            # Unlike a file opened with O_EXCL, a link appears with all its bytes; unlike a rename, it refuses
            # to replace. It is atomic on NFS too.
            try:
                path.hardlink_to(part)
            except FileExistsError:
                return False
        return True
    finally:
        part.unlink(missing_ok=True)


def now(folder: Path) -> float:
    """The time by the clock of the disk or server that holds a folder."""
    part = _passing(folder)
    part.touch()
    try:
        return part.stat().st_mtime
    finally:
        part.unlink(missing_ok=True)


def sweep(folder: Path) -> None:
    """Remove what killed writers left below a folder: never a file whose writer may still live."""
    for path in folder.rglob("*#*"):
        try:
            if not (_FOREIGN.fullmatch(path.name) and path.is_file()):
                continue
            abandoned = time.time() - path.stat().st_mtime > EXPIRY
            match = _PART.fullmatch(path.name)
            if match and _machine_number() and int(match[1]) == _machine_number():
                abandoned = started(int(match[2])) != int(match[3])
            if abandoned:
                path.unlink()
        except OSError:
            continue  # another process removes it, or its folder is not ours to change


def machine() -> str:
    """What tells this machine, since it was booted, from all others; "" where that cannot be known."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def started(pid: int) -> int | None:
    """When a process of this machine started, in clock ticks; None if there is none, or a zombie."""
    try:
        # The command's name may hold spaces and parentheses: the fields begin after its last one.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    # `starttime` is field 22 of proc(5), and the state, with which these begin, field 3.
    return None if fields[0] in "ZX" else int(fields[19])


def _passing(folder: Path) -> Path:
    return folder / f"{_writer(os.getpid())}{next(_NUMBERS) % 10**6:06d}"


@cache
def _writer(pid: int) -> str:
    return f"#{_machine_number():010d}{pid:010d}{started(pid) or 0:014d}"


@cache
def _machine_number() -> int:
    name = machine()
    return zlib.crc32(name.encode()) if name else 0
