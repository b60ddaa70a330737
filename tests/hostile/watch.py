"""What a process that meets hostile input is watched and bounded by (a fault of `nursery.py`)."""

import os
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

MEMORY = 2 * 2**30  # bytes beside those that the imports took
FILE = 512 * 2**20
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
ALWAYS = {"os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.Popen", "pickle.find_class"}
CHANGES = {  # arguments: a path, and the folder that it is relative to
    "os.remove": ((0, 1),),
    "os.rename": ((0, 2), (1, 3)),
    "os.rmdir": ((0, 1),),
    "os.mkdir": ((0, 2),),
    "os.link": ((1, 3),),
    "os.symlink": ((1, 2),),
    "os.chmod": ((0, 2),),
}


def watched(root: str, log: str) -> None:
    """Bound memory and files, and note every act that hostile input must not cause.

    Noted are: code below `root` that is imported or run, any unpickling, any process that is
    started, any connection, and whatever is written, made, moved or removed outside of `root`.
    """
    notes = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    inside = os.path.realpath(root)

    def note(event: str, what: Any) -> None:
        os.write(notes, f"{event} {what!r}\n".encode())

    def below(path: Any, follow: bool = True) -> bool:
        whole = os.path.abspath(os.fsdecode(path))
        folder, name = (whole, "") if follow else os.path.split(whole)
        return f"{os.path.join(os.path.realpath(folder), name)}{os.sep}".startswith(inside + os.sep)

    def allowed(path: Any) -> bool:
        return isinstance(path, int) or below(path) or os.fsdecode(path).startswith(("/dev/", "/proc/self/"))

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in ALWAYS or event == "socket.connect":
            note(event, arguments)
        elif event == "open":
            path, _, flags = arguments
            if path is not None and flags & WRITES and not allowed(path):
                note("open for writing", path)
        elif event == "exec":
            if below(arguments[0].co_filename):
                note(event, arguments[0].co_filename)
        elif event in CHANGES:
            for index, folder in CHANGES[event]:
                path = arguments[index]
                if arguments[folder] != -1 and not isinstance(path, int):
                    path = os.path.join(f"/proc/self/fd/{arguments[folder]}", os.fsdecode(path))
                if isinstance(path, int) or os.fsdecode(path).startswith("/proc"):
                    continue
                if not below(path, event == "os.chmod"):  # all others change a link, not what it leads to
                    note(event, path)

    sys.dont_write_bytecode = True  # Python's cache of what is imported from now on is no act of the input's
    sys.addaudithook(hook)
    _watch_unpickling(note)
    used = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_DATA, (used + MEMORY, used + MEMORY))
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE, FILE))


def _watch_unpickling(note: Callable[[str, Any], None]) -> None:
    """`torch.load` has an unpickler of its own, which raises no event."""
    import torch

    real = torch.load

    def load(file: Any, *args: Any, **options: Any) -> Any:
        pinned = sys._getframe(1).f_code.co_name == "_lite"  # bytes of a package, held against a known digest
        if not pinned:
            note("torch.load", file)
        return real(file, *args, **options)

    torch.load = load
