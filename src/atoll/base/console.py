"""Messages and progress. They go to the logger `atoll`, and the command line shows them on the console.

Elsewhere Python's own rules hold: unless a program asks for level INFO, only warnings reach standard error.
"""

import logging
import sys
import time
from contextlib import suppress
from io import TextIOWrapper
from typing import Any

from atoll.base.text import duration, printable

LOG = logging.getLogger("atoll")


def say(message: str) -> None:
    """Log one line, at level INFO, or WARNING if it begins with that word."""
    LOG.log(logging.WARNING if message.lstrip().startswith("warning") else logging.INFO, message)


class _Console(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        # With its newline in one write: print makes two, and another process's line would come between them.
        text = "".join(f"{printable(line)}\n" for line in record.getMessage().split("\n"))
        try:
            print(text, end="", flush=True)
        except OSError as error:  # a full disk, a terminal that is gone: no training ends for a message
            if isinstance(error, BrokenPipeError):  # of a launch that was killed: its runs end with it
                raise


def show_messages() -> None:
    """Print messages on standard output from now on, as every command does."""
    if not _printed():
        LOG.addHandler(_Console())
    if isinstance(sys.stdout, TextIOWrapper):  # a terminal that may lack letters of a caption
        sys.stdout.reconfigure(errors="replace")
    LOG.setLevel(logging.INFO)
    LOG.propagate = False  # a handler of the root logger would show each line again


def _printed() -> bool:
    return any(isinstance(handler, _Console) for handler in LOG.handlers)


class Progress:
    """A bar on a terminal or in a notebook, a message now and then elsewhere."""

    def __init__(self, name: str, total: int, done: int = 0, unit: str = "rows", every: float = 15.0) -> None:
        self.name, self.total, self.first, self.unit = name, total, done, unit
        self._terminal = _printed() and sys.stdout.isatty()
        self.every = 0.2 if self._terminal else every
        self.start = self._last = time.monotonic()
        self._shown = False
        self._bar: Any = None

    def __call__(self, done: int, total: int | None = None, note: str = "") -> None:
        """Report that `done` units are finished."""
        self.total = total or self.total
        now, finished = time.monotonic(), done >= self.total
        if self._bar is None and not finished and not _printed() and "ipykernel" in sys.modules:
            with suppress(ImportError):
                from tqdm.auto import tqdm

                self._bar = tqdm(total=self.total, initial=self.first, desc=self.name, unit=f" {self.unit}")
        if self._bar is not None:
            self._bar.total = self.total
            self._bar.set_postfix_str(note, refresh=False)
            self._bar.update(done - self._bar.n)
            if finished:
                self._bar.close()
            return
        # What ends with its first report needs none.
        if not self._shown if finished else now - self._last < self.every:
            return
        self._last, self._shown = now, True
        speed = (done - self.first) / max(now - self.start, 1e-9)
        left = duration((self.total - done) / speed) if speed > 0 else "?"
        rate = f"{speed:,.0f}/s" if speed >= 10 else f"{speed:.2g}/s"
        rate = f"{duration(1 / speed)} each" if 0 < speed < 1 else rate
        full = int(20 * min(done, self.total) / max(self.total, 1))
        bar = "█" * full + "·" * (20 - full)
        text = f"{self.name}: {bar} {done:,}/{self.total:,} {self.unit}, {rate}, {left} left"
        text += f"  {note}" if note else ""
        if self._terminal:
            print("\r\x1b[2K" + printable(text), end="\n" if finished else "", flush=True)
        else:
            say(text)
