"""Cores of this machine, counted without torch."""

import os


def cores() -> int:
    """Cores that this process is bound to, by `taskset`, a container's cpuset or Slurm; else all."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
