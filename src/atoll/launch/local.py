"""Islands as separate processes of this machine, as many at once as fit."""

import os
import signal
import subprocess
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from atoll.base.console import say
from atoll.base.errors import AtollError
from atoll.base.text import duration
from atoll.base.threads import cores
from atoll.campaign.settings.launch import Placement
from atoll.launch.job import Job, Site

PYTHON, WAITS, ASSEMBLES, ARRAYS = None, True, False, False

GRACE = 60.0  # seconds between SIGTERM and SIGKILL when the launch itself is stopped


def gpus_of(place: Placement) -> int | None:
    """GPUs of a node."""
    return place.gpus


def check(jobs: Sequence[Job], site: Site) -> None:
    """Refuse jobs that this machine can never run."""
    _must_fit(jobs, _gpus())


def show(jobs: Sequence[Job], site: Site) -> str:
    """The commands as a person would type them."""
    return "\n".join(f"$ {job.typed()}" for job in jobs)


def submit(jobs: Sequence[Job], site: Site) -> None:
    """Run the jobs to their end."""
    run(jobs, _gpus())


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()


class _Running:
    """A started job; a thread forwards its lines, so that the process never blocks on a full pipe."""

    def __init__(self, job: Job, devices: set[int], gpus: int, said: "dict[str, _Running] | None") -> None:
        environment = {**os.environ, **job.environment}
        if gpus:
            mine = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
            names = [mine[number] if mine else str(number) for number in sorted(devices)]
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(names)
        self.job, self.devices, self.said = job, devices, said
        self.process = subprocess.Popen(
            job.local_argv(),
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self.tail: deque[str] = deque(maxlen=30)
        self.thread = threading.Thread(target=self._forward, daemon=True)
        self.thread.start()

    def _forward(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self.tail.append(line.rstrip())
                if self.said is None or self.said.setdefault(line, self) is self:
                    say(f"  {line.rstrip()}")


def run(jobs: Sequence[Job], gpus: int = 0) -> None:
    """Run all jobs to their end, those first that others need, then the longest.

    A job starts when none of those that it needs is left among `jobs`. One failure stops the rest in order.

    Args:
        jobs: commands; each exits with 0 when its work is done.
        gpus: GPUs to spread over; 0 runs on the CPU, as many at once as cores allow.

    Raises:
        AtollError: a job failed; names it and repeats its last lines. Or one asks for what is not here.
    """
    _must_fit(jobs, gpus)
    needed = {name for job in jobs for name in job.needs}
    waiting = deque(sorted(jobs, key=lambda job: (job.name not in needed, -job.work)))
    running: list[_Running] = []
    # Processes of one command do one work together: what they find alike is told by the first.
    said = {argv: dict[str, _Running]() for argv, n in Counter(job.argv for job in jobs).items() if n > 1}
    start = time.monotonic()
    with _noted() as signals:
        try:
            while waiting or running:
                if signals:
                    raise KeyboardInterrupt
                while (job := _ready(waiting, running)) and (free := _room(job, running, gpus)) is not None:
                    waiting.remove(job)
                    running.append(_Running(job, free, gpus, said.get(job.argv)))
                    say(f"started {job.name} (process {running[-1].process.pid})")
                time.sleep(0.2)
                _bury(running)
        finally:
            _stop(running)
    say(f"{len(jobs)} runs finished in {duration(time.monotonic() - start)}")


@contextmanager
def _noted() -> Iterator[list[int]]:
    """Signals that came so far. They raise nothing: one that came between the start of a process and its
    entry among those running would leave it without a parent, and so would a second one while all stop."""
    came: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield came
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        for number in before:
            signal.signal(number, lambda number, frame: came.append(number))
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _bury(running: list[_Running]) -> None:
    """Take out the processes that have ended; `AtollError` if one failed."""
    for done in [r for r in running if r.process.poll() is not None]:
        done.thread.join()
        running.remove(done)
        if done.process.returncode != 0:
            raise _failure(done)


def _must_fit(jobs: Sequence[Job], gpus: int) -> None:
    for job in jobs:
        if job.nodes > 1:
            raise AtollError(
                f"{job.name} asks for {job.nodes} nodes, here is one", "launch it on slurm or sky"
            )
        if (job.gpus or 0) > gpus:
            fix = "set launch.gpus to fewer, or launch it elsewhere (launch.on)"
            raise AtollError(f"{job.name} asks for {job.gpus} GPUs, this machine has {gpus}", fix)


def _ready(waiting: Iterable[Job], running: list[_Running]) -> Job | None:
    """The first job whose needs are all met."""
    waiting = list(waiting)
    left = {job.name for job in waiting} | {r.job.name for r in running}
    return next((job for job in waiting if not left.intersection(job.needs)), None)


def _room(job: Job, running: list[_Running], gpus: int) -> set[int] | None:
    """Numbers of the GPUs for one more job, empty on the CPU; None if there is no room."""
    wanted = min(1, gpus) if job.gpus is None else job.gpus
    free = sorted(set(range(gpus)) - {number for r in running for number in r.devices})
    if len(free) < wanted:
        return None
    if wanted or not running:
        return set(free[:wanted])
    if sum(r.job.cpus for r in running) + job.cpus > cores():
        return None
    memory = 0.9 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")  # less a tenth for the rest
    return set() if sum(r.job.memory for r in running) + job.memory <= memory else None


def _failure(done: _Running) -> AtollError:
    code = done.process.returncode
    last = next((line for line in reversed(done.tail) if line.strip()), "no output")
    return AtollError(
        f"{done.job.name} ended with code {code} ({last})", "correct it and launch again; finished work stays"
    )


def _stop(running: list[_Running]) -> None:
    """Tell every process to save and leave; end those that do not."""
    for one in running:
        one.process.terminate()
    deadline = time.monotonic() + GRACE
    for one in running:
        try:
            one.process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            one.process.kill()
            one.process.wait()
        one.thread.join(GRACE)  # its last lines
