"""A job is a command and what it needs; nothing is pickled."""

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from atoll.base.hashing import sha256
from atoll.campaign.settings.launch import Placement
from atoll.store.location import resolve


@dataclass(frozen=True)
class Job:
    """One command to run, as one process or, with torchrun in front, as several."""

    name: str  # for messages, unique
    argv: tuple[str, ...]  # its first part is a Python
    cpus: int = 1  # cores that it uses on a node
    memory: int = 0  # bytes it needs at most on a node, roughly; an estimate unless `place` asks for some
    work: float = 0.0  # how long it takes in relation to others; longer ones start first
    gpus: int | None = None  # of a node; None is one where this machine has any
    processes: int = 1  # of a node
    needs: tuple[str, ...] = ()  # names of jobs that have to finish first
    after_any: bool = False  # a queue starts it however those ended: it looks itself at what they made
    saves: bool = True  # a warning lets it save and leave; else it dies of it, and is queued again as well
    count: int = 1  # how many of it share one work; more than one only for launchers with `ARRAYS`
    env: Mapping[str, str] = field(default_factory=dict)
    place: Placement = field(default_factory=Placement)  # as it was asked for, with each launcher's options
    target: str = "local"  # the launcher that runs it

    @property
    def slug(self) -> str:
        """The name as a part of names of files and jobs."""
        return self.name.replace(" ", "-")

    def label(self, campaign: str) -> str:
        """Name for a queue: the run and a hash of the campaign's path or URL, so that it is found again."""
        # One run of a name is like another; of a stage's workers, only those of the same command.
        words = (resolve("", campaign), *(() if self.saves else self.argv))  # the same by way of a link
        return f"atoll-{sha256(chr(0).join(words).encode())[:8]}-{self.slug}"

    @property
    def environment(self) -> dict[str, str]:
        """Variables of its environment, with the threads of a process."""
        # Without a number of threads each process would take all cores, and slow down all the others.
        threads = str(max(1, self.cpus // self.processes))
        return {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "PYTHONUNBUFFERED": "1", **self.env}

    def local_argv(self) -> tuple[str, ...]:
        """The command on one node: with more than one process, torchrun on a free port."""
        before, after = self._parts()
        return (*before, *(("--standalone",) if self.processes > 1 else ()), *after)

    def shell(self, host: str = "", port: str = "") -> str:
        """The command for a shell; nodes meet at `host` and `port`, which are shell text as they are."""
        if self.place.nodes == 1:
            return shlex.join(self.local_argv())
        before, after = self._parts()
        meet = f'--rdzv-backend c10d --rdzv-id atoll --rdzv-endpoint "{host}:{port}"'
        return f"{shlex.join(before)} {meet} {shlex.join(after)}"

    def _parts(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        # In two: torchrun's options for where processes meet go in between.
        python, *rest = self.argv
        if self.place.nodes == self.processes == 1:
            return (python,), tuple(rest)
        # A torchrun of ours, whose exit code is that of the training: queues decide by it.
        spread = ("--nnodes", str(self.place.nodes), "--nproc-per-node", str(self.processes))
        return (python, "-m", "atoll.launch.torchrun", *spread), tuple(rest)


@dataclass(frozen=True)
class Site:
    """Where the jobs of a campaign read and write."""

    campaign: str  # its absolute path or URL
    prints: Path  # folder for what jobs print
    files: Path  # folder for files that a launcher writes for the user


class Launcher(Protocol):
    """What a module of this package offers to be a launcher; `atoll launch --on NAME` finds it by name.

    It may also have `check(jobs, site)`, which refuses jobs that it can never run before any is started, and
    `gpus_of(place)`, the GPUs of a node where `launch.gpus` alone does not say them.
    """

    PYTHON: str | None
    """Python on its machines; None is the one that launches."""
    WAITS: bool
    """Whether `submit` returns when the jobs are finished, and not when they are queued."""
    ASSEMBLES: bool
    """Whether the assembly can be a job of its own that waits for the others."""
    ARRAYS: bool
    """Whether several that share one work are one job (`Job.count`), and not as many jobs."""

    def show(self, jobs: Sequence[Job], site: Site) -> str:
        """What `submit` would do, as text to read; changes nothing."""

    def submit(self, jobs: Sequence[Job], site: Site) -> None:
        """Start or queue the jobs, each after those that it needs; those queued already are left alone."""


def command(*arguments: str | Path, python: str | None = None) -> tuple[str, ...]:
    """An `atoll` command, of this installation unless another Python is named."""
    return (python or sys.executable, "-m", "atoll", *map(str, arguments))
