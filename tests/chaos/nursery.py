"""Processes that run `atoll`, forked from one that has imported everything: a start takes 0.1 s.

Run as a program, this file is that one process: it reads requests as lines of JSON and forks for each.
The forked processes are real ones, with process ids and signals of their own. Before the command they
may be given a fault (`faults.py`).
"""

import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

ENDED = "the process that forks ended"
Faults = Mapping[str, list[Any]]
"""Names of functions in `faults.py` and their arguments."""


class Child:
    """A process that runs the command."""

    def __init__(self, nursery: "Nursery", pid: int, out: Path) -> None:
        self.nursery, self.pid, self.out = nursery, pid, out
        self.code: int | None = None

    def wait(self, seconds: float = 120.0) -> int:
        """How it ended: the exit code, or minus the signal; fails if it does not end in time."""
        if self.code is None:
            self.code = self.nursery.ask({"wait": self.pid, "seconds": seconds})
        assert self.code is not None, f"process {self.pid} did not end in {seconds} s: {self.said()}"
        return self.code

    def running(self) -> bool:
        if self.code is None:
            self.code = self.nursery.ask({"wait": self.pid, "seconds": 0})
        return self.code is None

    def send(self, number: signal.Signals) -> None:
        """A signal, if it still runs; what is not waited for keeps its process id."""
        if self.code is None:
            os.kill(self.pid, number)

    def kill(self) -> bool:
        """SIGKILL; whether that is what ended it."""
        self.send(signal.SIGKILL)
        return self.wait(30) == -signal.SIGKILL

    def said(self) -> str:
        return self.out.read_text()

    def errors(self) -> list[str]:
        """Lines of error; a traceback is none."""
        said = self.said()
        assert "Traceback" not in said, said
        return [line for line in said.splitlines() if line.startswith("error: ")]


class Nursery:
    """The process that forks, seen from the tests."""

    def __init__(self, process: subprocess.Popen[str], folder: Path) -> None:
        self.process, self.folder = process, folder
        self.children: list[Child] = []

    def ask(self, request: Mapping[str, Any]) -> Any:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        assert answer, ENDED
        return json.loads(answer)

    def start(
        self, *argv: str | Path, faults: Faults | None = None, env: Mapping[str, str] | None = None
    ) -> Child:
        """Start the command as a process of its own."""
        out = self.folder / f"{len(self.children):05d}.txt"
        request = {"argv": list(map(str, argv)), "out": str(out), "faults": faults or {}, "env": env or {}}
        child = Child(self, self.ask(request), out)
        self.children.append(child)
        return child

    def train(self, folder: str | Path, island: int, **options: Any) -> Child:
        """Start the training of an expert; it waits for whoever holds the run."""
        return self.start("train", "expert", folder, "--expert", str(island), "--wait", **options)

    def end(self) -> None:
        for child in self.children:
            if child.running():
                child.kill()


@contextmanager
def nursery(folder: Path, environment: Mapping[str, str], *modules: str) -> Iterator[Nursery]:
    """Start the process that forks, with more modules imported, and end it with all that it started."""
    process = subprocess.Popen(
        [sys.executable, __file__, *modules],
        env=dict(environment),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == '"ready"\n', ENDED
        made = Nursery(process, folder)
        yield made
        made.end()
    finally:
        process.communicate(timeout=30)  # it ends with its input


def until(what: Any, child: Child, seconds: float = 60.0) -> None:
    """Wait until a condition holds; fails if the process ends before."""
    deadline = time.monotonic() + seconds
    while not what():
        if not child.running() or time.monotonic() > deadline:
            assert what(), f"ended with {child.code}: {child.said()}"
            return
        time.sleep(0.002)


# The process that forks.


def _serve() -> None:
    _import()
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        answer = _wait(**request) if "wait" in request else _fork(request)
        print(json.dumps(answer), flush=True)


def _import() -> None:
    """Everything that training imports, and no more: threads and locks do not survive a fork."""
    import diffusers
    import torch._dynamo  # the first optimizer would import it
    from diffusers.models.transformers import dit_transformer_2d  # noqa: F401

    assert diffusers.DiTTransformer2DModel is not None
    for name in sys.argv[1:]:
        import_module(name)
    torch.set_num_threads(1)
    gc.freeze()  # else the first collection of every child copies all that was imported


def _wait(wait: int, seconds: float) -> int | None:
    deadline = time.monotonic() + seconds
    while True:
        pid, status = os.waitpid(wait, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() >= deadline:
            return None
        time.sleep(0.002)


def _fork(request: Mapping[str, Any]) -> int:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = _command(request)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    return pid


def _command(request: Mapping[str, Any]) -> int:
    """What a fresh interpreter would do: `python -m atoll ARGV`."""
    os.setsid()
    out = os.open(request["out"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.environ.update(request["env"])
    tempfile.tempdir = None  # found anew: imports may have asked for it before there was a TMPDIR

    import faults

    from atoll.cli import main as cli
    from atoll.store import store

    store._PROCESS = os.getpid()  # the one that forked never touched a store: obstore's threads are ours
    for name, arguments in request["faults"].items():
        getattr(faults, name)(*arguments)
    sys.argv = ["atoll", *request["argv"]]
    try:
        cli.main()
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


if __name__ == "__main__":
    _serve()
