"""Nodes of Ray on this machine, on loopback, until the input ends.

    python tests/launch/ray_nodes.py [CORES_OF_A_NODE ...]

The output is one line, their address. They are stopped by their ids: other clusters of the machine stay.
"""

import os
import sys
import tempfile
from pathlib import Path


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
            for number, cpus in enumerate(sys.argv[1:] or ["1", "1"], start=2):
                where = f"127.0.0.{number}"
                cluster.add_node(num_cpus=int(cpus), node_ip_address=where, include_dashboard=False)
            print(cluster.address, flush=True)
            sys.stdin.read()
        finally:
            cluster.shutdown()


if __name__ == "__main__":
    main()
