"""A job is a command and what it needs; nothing is pickled."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Job:
    """One process to run.

    Attributes:
        name: for messages, unique.
        argv: the command.
        cpus: threads it uses.
        memory: bytes it needs at most, roughly.
        work: how long it takes in relation to others; longer ones start first.
        after: names of jobs that must have finished before; names that are not launched do not count.
    """

    name: str
    argv: tuple[str, ...]
    cpus: int = 1
    memory: int = 0
    work: float = 0.0
    after: tuple[str, ...] = ()
