"""A real Ray cluster on this machine, in a network of its own that holds nothing but its loopback."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from helpers import ROOT, until

PORT = 6379
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "atoll-tests" / "ray"
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
# Ray gives up an agent that takes 15 seconds to start, so Python has to keep what it compiles of it.
if os.environ.get("PYTHONDONTWRITEBYTECODE"):
    QUIET |= {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(CACHE)}


def why_not() -> str:
    """Why there can be no such cluster here; empty if there can."""
    if None in [shutil.which(program) for program in ("unshare", "nsenter", "ip")]:
        return "unshare, nsenter and ip are not installed"
    tried = subprocess.run(["unshare", "--net", "true"], check=False, capture_output=True)
    return "a network of its own is not allowed here" if tried.returncode else ""


class Cluster:
    """Nodes as processes of this one, and what runs beside them."""

    def __init__(self, inside: list[str], folder: Path) -> None:
        self.inside, self.folder = inside, folder  # `inside` comes before a command that joins the network
        self.nodes: dict[str, subprocess.Popen[bytes]] = {}

    def add(self, name: str, cpus: int = 1, before: tuple[str, ...] = (), **variables: str) -> None:
        """Start a node with the custom resource `name`, the first one as the head; it has joined then."""
        argv = [*self.inside, *before, sys.executable, "-m", "ray.scripts.scripts", "start", "--block"]
        argv += ["--node-ip-address", "127.0.0.1", "--disable-usage-stats", "--include-log-monitor", "false"]
        argv += ["--num-cpus", str(cpus), "--num-gpus", "0", "--object-store-memory", "80000000"]
        argv += ["--resources", json.dumps({name: 1})]
        if self.nodes:
            argv += ["--address", f"127.0.0.1:{PORT}"]
        else:
            argv += ["--head", "--port", str(PORT), "--include-dashboard", "false"]
            argv += ["--temp-dir", str(self.folder)]
        environment = {**os.environ, **QUIET, **variables}
        log = self.folder / f"{name}.log"
        with log.open("wb") as file:
            self.nodes[name] = subprocess.Popen(argv, env=environment, stdout=file, stderr=subprocess.STDOUT)
        until(lambda: "will now block" in log.read_text(), lambda: log.read_text()[-3000:])

    def remove(self, name: str) -> None:
        """End a node and all of its processes."""
        node = self.nodes.pop(name)
        node.terminate()
        node.wait(60)

    def lose(self, name: str) -> None:
        """A machine that is gone at once, with all that runs on it."""
        node = self.nodes.pop(name)
        for process in (*psutil.Process(node.pid).children(recursive=True), node):
            process.kill()
        node.wait(60)

    def start(self, log: Path, *words: str | Path) -> subprocess.Popen[bytes]:
        """An `atoll` command beside the cluster, which prints to a file."""
        argv = [*self.inside, sys.executable, "-m", "atoll", *map(str, words)]
        with log.open("wb") as file:
            return subprocess.Popen(argv, env={**os.environ, **QUIET}, stdout=file, stderr=subprocess.STDOUT)


@contextmanager
def ray() -> Iterator[Cluster]:
    """A network and the folder of a cluster without nodes, until the block ends."""
    folder = Path(tempfile.mkdtemp(prefix="ray", dir="/tmp"))  # sockets' paths have to be short
    argv = ["unshare", "--net", "sh", "-c", "ip link set lo up && echo up && exec sleep infinity"]
    network = subprocess.Popen(argv, stdout=subprocess.PIPE)
    assert network.stdout is not None and network.stdout.readline() == b"up\n"
    cluster = Cluster(["nsenter", f"--net=/proc/{network.pid}/ns/net"], folder)
    try:
        yield cluster
    finally:
        for name in reversed([*cluster.nodes]):
            cluster.remove(name)
        network.send_signal(signal.SIGKILL)
        network.communicate()
        shutil.rmtree(folder, ignore_errors=True)
