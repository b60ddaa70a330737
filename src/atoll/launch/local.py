"""Islands as separate processes of this machine, as many at once as fit."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from atoll.base.console import duration, say
from atoll.base.errors import AtollError
from atoll.launch.job import Job

GRACE = 60.0  # seconds between SIGTERM and SIGKILL when the launch itself is stopped


class _Running:
    """A started job; a thread forwards its lines, so that the process never blocks on a full pipe."""

    def __init__(self, job: Job, gpu: int | None) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": str(job.cpus), "MKL_NUM_THREADS": str(job.cpus)}
        environment["PYTHONUNBUFFERED"] = "1"
        if gpu is not None:
            mine = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
            environment["CUDA_VISIBLE_DEVICES"] = mine[gpu] if mine else str(gpu)
        self.job, self.gpu = job, gpu
        self.process = subprocess.Popen(
            job.argv,
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
                say(f"  {line.rstrip()}")


def run(jobs: Sequence[Job], gpus: int = 0) -> None:
    """Run all jobs to their end, those first that others wait for, then the longest.

    One failure stops the rest in order.

    Args:
        jobs: commands; each exits with 0 when its work is done.
        gpus: GPUs to spread over, one job each; 0 runs on the CPU, as many at once as cores allow.

    Raises:
        AtollError: a job failed; names it and repeats its last lines.
    """
    awaited = {name for job in jobs for name in job.after}
    waiting = sorted(jobs, key=lambda job: (job.name not in awaited, -job.work))
    running: list[_Running] = []
    start = time.monotonic()
    in_main = threading.current_thread() is threading.main_thread()
    before = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)} if in_main else {}
    if in_main:
        signal.signal(signal.SIGTERM, _interrupt)
    try:
        while waiting or running:
            while (job := _next(waiting, running)) and (free := _room(job, running, gpus)) is not None:
                waiting.remove(job)
                running.append(_Running(job, free if gpus else None))
                say(f"started {job.name} (process {running[-1].process.pid})")
            time.sleep(0.2)
            for done in [r for r in running if r.process.poll() is not None]:
                done.thread.join()
                running.remove(done)
                if done.process.returncode != 0:
                    raise _failure(done)
    finally:
        for number in before:
            signal.signal(number, signal.SIG_IGN)  # a second signal must not leave islands without a parent
        _stop(running)
        for number, handler in before.items():
            signal.signal(number, handler)
    say(f"{len(jobs)} runs finished in {duration(time.monotonic() - start)}")


def _next(waiting: list[Job], running: list[_Running]) -> Job | None:
    """The first job that waits for no other one."""
    unfinished = {job.name for job in waiting} | {one.job.name for one in running}
    found = next((job for job in waiting if unfinished.isdisjoint(job.after)), None)
    assert found or running or not waiting, "jobs that wait for each other"
    return found


def _room(job: Job, running: list[_Running], gpus: int) -> int | None:
    """A slot for one more job: the number of a free GPU, or 0 on the CPU; None if there is none."""
    if gpus:
        free = set(range(gpus)) - {r.gpu for r in running if r.gpu is not None}
        return min(free) if free else None
    if not running:
        return 0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if sum(r.job.cpus for r in running) + job.cpus > cores:
        return None
    return 0 if sum(r.job.memory for r in running) + job.memory <= _memory() else None


def _memory() -> int:
    """Bytes of main memory, less a tenth for everything else."""
    return int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * 0.9)


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


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def command(*arguments: str | Path) -> tuple[str, ...]:
    """An `atoll` command of this installation."""
    return (sys.executable, "-m", "atoll", *map(str, arguments))
