"""A job is a command and what it needs; nothing is pickled."""

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from atoll.base.hashing import sha256
from atoll.campaign.settings.launch import Placement, SkyConfig, SlurmConfig


@dataclass(frozen=True)
class Job:
    """One command to run, as one process or, with torchrun in front, as several.

    Attributes:
        name: for messages, unique.
        argv: the command, its first part a Python.
        cpus: cores that it uses on a node.
        memory: bytes it needs at most on a node, roughly; an estimate unless `memory_asked`.
        work: how long it takes in relation to others; longer ones start first.
        gpus: GPUs of a node; None is one where this machine has any.
        processes: processes of a node.
        nodes: nodes.
        needs: names of jobs that have to finish first.
        after_any: whether a queue starts it however those ended, because it looks itself at what they made.
        saves: whether a warning lets it save and leave; else it dies of it, and is queued again all the same.
        count: how many of it share one work; more than one only for launchers with `ARRAYS`.
        env: variables of its environment.
        memory_asked: whether the user set `memory`.
        slurm: what only Slurm asks for.
        sky: what only SkyPilot asks for.
        options: what only a launcher of the user's own asks for.
        target: the launcher that runs it.
    """

    name: str
    argv: tuple[str, ...]
    cpus: int = 1
    memory: int = 0
    work: float = 0.0
    gpus: int | None = None
    processes: int = 1
    nodes: int = 1
    needs: tuple[str, ...] = ()
    after_any: bool = False
    saves: bool = True
    count: int = 1
    env: Mapping[str, str] = field(default_factory=dict)
    memory_asked: bool = False
    slurm: SlurmConfig = field(default_factory=SlurmConfig)
    sky: SkyConfig = field(default_factory=SkyConfig)
    options: Mapping[str, str] = field(default_factory=dict)
    target: str = "local"

    @property
    def slug(self) -> str:
        """The name as a part of names of files and jobs."""
        return self.name.replace(" ", "-")

    def label(self, campaign: str) -> str:
        """Name for a queue: the run and a hash of the campaign's path or URL, so that it is found again."""
        return f"atoll-{sha256(campaign.encode())[:8]}-{self.slug}"

    @property
    def environment(self) -> dict[str, str]:
        """Variables of its environment, with the threads of a process."""
        threads = str(max(1, self.cpus // self.processes))
        return {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "PYTHONUNBUFFERED": "1", **self.env}

    def local_argv(self) -> tuple[str, ...]:
        """The command on one node: with more than one process, torchrun on a free port."""
        before, after = self._parts()
        return (*before, *(("--standalone",) if self.processes > 1 else ()), *after)

    def typed(self) -> str:
        """The command on one node as a person would type it, with its variables."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join((*variables, shlex.join(self.local_argv())))

    def shell(self, host: str = "", port: str = "") -> str:
        """The command for a shell.

        Args:
            host: where the processes of several nodes meet, as shell text that needs no quotes.
            port: the port there, as such a text.
        """
        before, after = self._parts()
        if self.nodes == 1:
            return shlex.join(self.local_argv())
        meet = f'--rdzv-backend c10d --rdzv-id atoll --rdzv-endpoint "{host}:{port}"'
        return f"{shlex.join(before)} {meet} {shlex.join(after)}"

    def _parts(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        # In two: torchrun's options for where processes meet go in between.
        python, *rest = self.argv
        if self.nodes == self.processes == 1:
            return (python,), tuple(rest)
        spread = ("--nnodes", str(self.nodes), "--nproc-per-node", str(self.processes))
        return (python, "-m", "atoll.launch.torchrun", *spread), tuple(rest)


@dataclass(frozen=True)
class Site:
    """Where the jobs of a campaign read and write.

    Attributes:
        campaign: its absolute path or URL.
        prints: folder for what jobs print.
        files: folder for files that a launcher writes for the user.
    """

    campaign: str
    prints: Path
    files: Path


class Launcher(Protocol):
    """What a module of this package offers to be a launcher; `atoll launch --on NAME` finds it by name."""

    PYTHON: str | None
    """Python on its machines; None is the one that launches."""
    WAITS: bool
    """Whether `submit` returns when the jobs are finished, and not when they are queued."""
    ASSEMBLES: bool
    """Whether the assembly can be a job of its own that waits for the others."""
    ARRAYS: bool
    """Whether several that share one work are one job (`Job.count`), and not as many jobs."""

    def gpus_of(self, place: Placement) -> int | None:
        """GPUs of a node, as the settings ask for them."""

    def check(self, jobs: Sequence[Job], site: Site) -> None:
        """Refuse jobs that it can never run, before anything is started anywhere."""

    def show(self, jobs: Sequence[Job], site: Site) -> str:
        """What `submit` would do, as text to read; changes nothing."""

    def submit(self, jobs: Sequence[Job], site: Site) -> None:
        """Start or queue the jobs, each after those that it needs; those queued already are left alone."""


def command(*arguments: str | Path, python: str | None = None) -> tuple[str, ...]:
    """An `atoll` command, of this installation unless another Python is named."""
    return (python or sys.executable, "-m", "atoll", *map(str, arguments))
