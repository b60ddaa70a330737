"""Nodes of Ray on this machine, on loopback, until the input ends.

    python benchmarks/nodes.py [CORES_OF_A_NODE ...]

The output is one line, their address. They are stopped by their ids: other clusters of the machine stay.
"""

import sys

from ray.cluster_utils import Cluster


def main() -> None:
    """Start the nodes, say where they are, and stop them."""
    cluster = Cluster()
    try:
        # Each has a loopback address of its own; Ray replaces 127.0.0.1 by one that others can reach.
        for number, cpus in enumerate(sys.argv[1:] or ["1", "1"], start=2):
            add(cluster, f"127.0.0.{number}", int(cpus))
        print(cluster.address, flush=True)
        sys.stdin.read()
    finally:
        cluster.shutdown()


def add(cluster: Cluster, where: str, cpus: int) -> None:
    """Start a node; Ray gives its own processes 15 seconds for that, which a busy machine does not have."""
    for left in (3, 2, 1, 0):
        try:
            cluster.add_node(num_cpus=cpus, node_ip_address=where, include_dashboard=False)
            return
        except Exception:  # Ray raises no narrower one
            if not left:
                raise


if __name__ == "__main__":
    main()
