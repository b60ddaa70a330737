"""Nodes of Ray on this machine, on loopback, until the input ends.

    python tests/launch/ray_nodes.py CORES_OF_A_NODE ...

The output is one line, their address. They are stopped by their ids: other clusters of the machine stay.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DISABLE_IMPORT_WARNING": "1", "OMP_NUM_THREADS": "1"}


@contextmanager
def nodes(*cores: int, environment: Mapping[str, str]) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Nodes with so many cores, of this environment: their address, and the process that holds them."""
    argv = [sys.executable, __file__, *map(str, cores)]
    how = {"env": {**environment, **QUIET}, "stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    parent = subprocess.Popen(argv, **how)  # type: ignore[call-overload]
    try:
        address = parent.stdout.readline().strip()
        assert address, "the nodes of Ray did not start; see what they printed"
        yield address, parent
    finally:
        parent.communicate()


def main() -> None:
    """Start the nodes, say where they are, and stop them."""
    with tempfile.TemporaryDirectory() as less:
        # Ray gives a node 15 seconds to start. Without its dashboard's web server it takes few; Ray leaves
        # that out where this package is missing, for which it looks once, when it is imported.
        Path(less, "aiohttp_cors.py").write_text("raise ModuleNotFoundError('left out')\n")
        sys.path.insert(0, less)
        os.environ["PYTHONPATH"] = os.pathsep.join([less, *filter(None, [os.environ.get("PYTHONPATH")])])
        from ray.cluster_utils import Cluster

        cluster = Cluster()
        try:
            # Each has a loopback address of its own; Ray replaces 127.0.0.1 by one that others can reach.
            for number, cpus in enumerate(sys.argv[1:], start=2):
                own = f"127.0.0.{number}"
                cluster.add_node(num_cpus=int(cpus), node_ip_address=own, include_dashboard=False)
            print(cluster.address, flush=True)
            sys.stdin.read()
        finally:
            cluster.shutdown()


if __name__ == "__main__":
    main()
