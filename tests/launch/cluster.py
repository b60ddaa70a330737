"""A real Slurm on this machine: munged, slurmctld and a slurmd for each of two sites, ended by their ids."""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from helpers import until

CONF = Path(__file__).with_name("slurm.conf")
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scontrol", "srun")


def why_not() -> str:
    """Why there can be no Slurm here; empty if there can."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=_path()) is None]
    if missing:
        return f"{', '.join(missing)} not installed (Debian: slurm-wlm and munge)"
    return "" if os.geteuid() == 0 else "slurmctld and slurmd of this test have to run as root"


@contextmanager
def slurm(folder: Path) -> Iterator[dict[str, str]]:
    """Partitions `a` and `b` with a node each, until the block ends.

    Yields:
        The variables that Slurm's commands need.
    """
    with ExitStack() as stack:
        for name in ("state", "log", "munge"):
            (folder / name).mkdir(parents=True)
        _munge(folder / "munge", stack)
        text = CONF.read_text().replace("@DIR@", str(folder)).replace("@HOST@", socket.gethostname())
        for number, port in enumerate(_ports(3)):
            text = text.replace(f"@PORT{number}@", str(port))
        (folder / "slurm.conf").write_text(text)
        variables = {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": _path()}
        environment = {**os.environ, **variables}
        for argv in (["slurmctld", "-D"], *(["slurmd", "-D", "-N", f"site-{s}"] for s in "ab")):
            _start(argv, folder / "log" / f"{argv[0]}{argv[-1]}.out", environment, stack)
        _until_idle(folder, environment)
        try:
            yield variables
        finally:
            subprocess.run(["scancel", "--user=root"], env=environment, check=False, capture_output=True)
            _until_empty(environment)


def _munge(folder: Path, stack: ExitStack) -> None:
    """A munged of our own: own key, own socket, so that one of the machine is left alone."""
    (folder / "key").write_bytes(os.urandom(128))
    (folder / "key").chmod(0o400)
    for parent in (folder, *folder.parents):  # munged refuses folders that others may not enter
        if parent.stat().st_uid == os.geteuid() and parent != Path("/"):
            parent.chmod(parent.stat().st_mode | 0o711)
    names = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    argv = ["munged", "--foreground", "--force", *(f"--{k}={folder / v}" for k, v in names.items())]
    _start(argv, folder / "out", {**os.environ, "PATH": _path()}, stack)
    until((folder / "socket").exists, (folder / "out").read_text, 20)


def _start(argv: list[str], log: Path, environment: dict[str, str], stack: ExitStack) -> None:
    with log.open("wb") as file:
        process = subprocess.Popen(argv, env=environment, stdout=file, stderr=subprocess.STDOUT)
    stack.callback(_end, process)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _until_idle(folder: Path, environment: dict[str, str]) -> None:
    deadline = time.monotonic() + 60
    while True:
        argv = ["sinfo", "--noheader", "--Node", "--format=%N %T"]
        answer = subprocess.run(argv, env=environment, capture_output=True, text=True, check=False)
        if set(answer.stdout.splitlines()) == {"site-a idle", "site-b idle"}:
            return
        logs = "\n".join(path.read_text()[-2000:] for path in sorted((folder / "log").iterdir()))
        assert time.monotonic() < deadline, f"{answer}\n{logs}"
        time.sleep(0.2)


def _until_empty(environment: dict[str, str]) -> None:
    """Wait until no job is left, so that no process outlives the test."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        answer = subprocess.run(["squeue", "--noheader"], env=environment, capture_output=True, check=False)
        if not answer.stdout.strip():
            return
        time.sleep(0.2)


def _ports(count: int) -> list[int]:
    with ExitStack() as stack:
        opened = [stack.enter_context(closing(socket.socket())) for _ in range(count)]
        for one in opened:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in opened]


def _path() -> str:
    """Debian puts the daemons where an ordinary user's PATH does not look."""
    return os.environ.get("PATH", "") + os.pathsep + os.pathsep.join(("/usr/sbin", "/usr/local/sbin"))
