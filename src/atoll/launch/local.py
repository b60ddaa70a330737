"""Islands as separate processes of this machine, as many at once as fit."""

import os
import shlex
import subprocess
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence

from atoll.base.console import say
from atoll.base.cores import cores
from atoll.base.errors import AtollError
from atoll.base.preemption import catch_signals
from atoll.base.text import duration
from atoll.launch.job import Job, Site

PYTHON, WAITS, ASSEMBLES, ARRAYS = None, True, False, False
DEVICES = "CUDA_VISIBLE_DEVICES"
GRACE = 60.0
"""Seconds between SIGTERM and SIGKILL when the launch itself is stopped."""


def check(jobs: Sequence[Job], site: Site) -> None:
    """Refuse jobs that this machine can never run."""
    _must_fit(jobs, visible_gpus())


def show(jobs: Sequence[Job], site: Site) -> str:
    """The commands as a person would type them."""
    typed = []
    for job in jobs:
        variables = [f"{name}={shlex.quote(value)}" for name, value in job.environment.items()]
        typed.append(" ".join(("$", *variables, shlex.join(job.local_argv()))))
    return "\n".join(typed)


def submit(jobs: Sequence[Job], site: Site) -> None:
    """Run the jobs to their end."""
    run(jobs, visible_gpus())


def visible_gpus() -> int:
    """GPUs of this machine that torch sees."""
    import torch

    return torch.cuda.device_count()


def device_name(number: int) -> str:
    """The name of a GPU for a child, where a queue gave this process some of them."""
    visible = [name for name in os.environ.get(DEVICES, "").split(",") if name]
    return visible[number] if visible else str(number)


def at_once(jobs: Sequence[Job]) -> int:
    """How many of these jobs run side by side on this machine."""
    placed, gpus = list[tuple[Job, set[int]]](), visible_gpus()
    for job in jobs:
        if (devices := _room(job, placed, gpus)) is None:
            break
        placed.append((job, devices))
    return len(placed)


class _Running:
    """A started job."""

    def __init__(self, job: Job, devices: set[int], gpus: int, printed: "dict[str, _Running] | None") -> None:
        environment = {**os.environ, **job.environment}
        if gpus and (devices or DEVICES not in job.env):  # workers share GPUs that they are told
            environment[DEVICES] = ",".join(map(device_name, sorted(devices)))
        self.job, self.devices, self.printed = job, devices, printed
        self.process = subprocess.Popen(
            job.local_argv(),
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C in the terminal is ours to pass on, once
        )
        # A thread forwards its lines, so that the process never blocks on a full pipe.
        self.tail: deque[str] = deque(maxlen=30)
        self.thread = threading.Thread(target=self._forward, daemon=True)
        self.thread.start()

    def _forward(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self.tail.append(line.rstrip())
                if self.printed is None or self.printed.setdefault(line, self) is self:
                    say(f"  {line.rstrip()}")


def run(jobs: Sequence[Job], gpus: int = 0) -> None:
    """Run all jobs to their end, on that many GPUs or, with 0, on the CPU: as many at once as fit.

    A job starts when none of those that it needs is left among `jobs`. One failure stops the rest in order.
    `AtollError` names the job that failed and its last line, or one that asks for what is not here.
    """
    _must_fit(jobs, gpus)
    # Those first that others need, then the longest: what starts last decides when all have ended.
    needed = {name for job in jobs for name in job.needs}
    waiting = deque(sorted(jobs, key=lambda job: (job.name not in needed, -job.work)))
    running: list[_Running] = []
    # Processes of one command do one work together: what they print alike is shown of the first only.
    printed = {argv: dict[str, _Running]() for argv, n in Counter(job.argv for job in jobs).items() if n > 1}
    start = time.monotonic()
    # Signals raise nothing: one that came between the start of a process and its entry among those running
    # would leave it without a parent, and so would a second one while all stop.
    with catch_signals() as signals:
        try:
            while waiting or running:
                if signals:
                    raise KeyboardInterrupt
                while True:
                    left = {job.name for job in waiting} | {other.job.name for other in running}
                    # Only the first one is tried: smaller ones could keep a large one waiting for ever.
                    job = next((job for job in waiting if not left.intersection(job.needs)), None)
                    placed = [(other.job, other.devices) for other in running]
                    free = None if job is None else _room(job, placed, gpus)
                    if job is None or free is None:
                        break
                    waiting.remove(job)
                    running.append(_Running(job, free, gpus, printed.get(job.argv)))
                    say(f"started {job.name} (process {running[-1].process.pid})")
                # To poll needs no handler for the signals of children, which the caller may have its own of.
                time.sleep(0.2)
                for ended in [other for other in running if other.process.poll() is not None]:
                    # Its last line, which the error quotes, may still lie in the pipe.
                    ended.thread.join()
                    running.remove(ended)
                    if (code := ended.process.returncode) != 0:
                        last = next((line for line in reversed(ended.tail) if line.strip()), "no output")
                        fix = "correct it and launch again; finished work stays"
                        raise AtollError(f"{ended.job.name} ended with code {code} ({last})", fix)
        finally:
            _stop(running)
    say(f"{len(jobs)} runs finished in {duration(time.monotonic() - start)}")


def _must_fit(jobs: Sequence[Job], gpus: int) -> None:
    for job in jobs:
        if job.place.nodes > 1:
            what = f"{job.name} asks for {job.place.nodes} nodes, here is one"
            raise AtollError(what, "launch it on slurm, ray or sky")
        if (job.gpus or 0) > gpus:
            fix = "set launch.gpus to fewer, or launch it elsewhere (launch.on)"
            raise AtollError(f"{job.name} asks for {job.gpus} GPUs, this machine has {gpus}", fix)
        if gpus and job.gpus is None and job.processes > 1:
            raise AtollError(f"{job.name}: {job.processes} processes would share a GPU", "set launch.gpus")
        if gpus and job.gpus != 0 and DEVICES in job.env:
            fix = f"set {DEVICES} of atoll launch itself, or launch.gpus=0"
            raise AtollError(f"{job.name}: launch.env sets {DEVICES}, which this launch deals out", fix)


def _room(job: Job, placed: list[tuple[Job, set[int]]], gpus: int) -> set[int] | None:
    """Numbers of the GPUs for one more job, empty on the CPU; None if there is no room."""
    wanted = min(1, gpus) if job.gpus is None else job.gpus
    free = sorted(set(range(gpus)) - {number for _, devices in placed for number in devices})
    if len(free) < wanted:
        return None
    # Alone a job always has room: one that is larger than the machine would wait for ever.
    if wanted or not placed:
        return set(free[:wanted])
    if sum(other.cpus for other, _ in placed) + job.cpus > cores():
        return None
    memory = 0.9 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")  # less a tenth for the rest
    return set() if sum(other.memory for other, _ in placed) + job.memory <= memory else None


def _stop(running: list[_Running]) -> None:
    """Tell every process to save and leave; end those that do not."""
    for started in running:
        started.process.terminate()
    deadline = time.monotonic() + GRACE  # for all together: they save side by side
    for started in running:
        try:
            started.process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            started.process.kill()
            started.process.wait()
        started.thread.join(GRACE)  # its last lines
