"""The next step's data, made in a thread while this step runs."""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from atoll.base.errors import DataError
from atoll.base.preemption import leak_thread

POLL = 0.2  # seconds between looks at whether the run was told to leave
PATIENCE = 5.0  # seconds that a run which ends waits for the batch in hand


class Prefetcher:
    """Makes the batches of steps in order, one step ahead; a step waits `limit` seconds for its data."""

    def __init__(self, make: Callable[[int], list[Any]], begin: int, batch: int, limit: float) -> None:
        self.make, self.begin, self.batch, self.limit = make, begin, batch, limit
        # One step ahead and no more: a batch of latents may be gigabytes, and data that lag behind lag
        # anyway.
        self._made: queue.Queue[list[Any] | BaseException] = queue.Queue(maxsize=1)
        self._stopped = threading.Event()
        # A daemon: one that hangs in a dead file system must not keep the process from leaving.
        self._thread = threading.Thread(target=self._run, daemon=True, name="data")

    def __enter__(self) -> "Prefetcher":
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stopped.set()
        self._thread.join(PATIENCE)
        if self._thread.is_alive():
            leak_thread(self._thread)

    def next(self, stop_requested: Sequence[object]) -> list[Any] | None:
        """The next step's batches; None if the run is told to leave before they are there."""
        deadline = time.monotonic() + self.limit
        while True:
            try:
                batch = self._made.get(timeout=min(POLL, self.limit))
            except queue.Empty:
                if stop_requested:
                    return None
                if time.monotonic() > deadline:
                    raise DataError(
                        f"the data of the step at sample {self.begin:,} did not come within {self.limit:g} s",
                        "the store or disk hangs: mend it and run the same command again",
                    ) from None
                continue
            if isinstance(batch, BaseException):
                raise batch
            self.begin += self.batch
            return batch

    def _run(self) -> None:
        # Here, since the number is the thread's own: a second team of OpenMP threads would spin beside that
        # of the step, on the same cores.
        torch.set_num_threads(1)
        begin = self.begin
        while not self._stopped.is_set():
            batch: list[Any] | BaseException
            try:
                batch = self.make(begin)
            except BaseException as error:  # `next` raises it: an exception in a thread would be lost
                batch = error
            while not self._stopped.is_set():
                try:
                    self._made.put(batch, timeout=POLL)
                    break
                except queue.Full:
                    continue
            if isinstance(batch, BaseException):
                return
            begin += self.batch
