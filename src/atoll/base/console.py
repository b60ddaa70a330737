"""What a person sees while a stage runs: plain lines, and a progress bar with speed and time left."""

import sys
import time

from atoll.base.text import duration


def say(message: str) -> None:
    """One line, at once, and in one piece whatever other threads say."""
    # With its newline in one write: print makes two, and another thread's line would come between them.
    print(f"{message}\n", end="", flush=True)


class Progress:
    """A bar on a terminal, a line now and then elsewhere."""

    def __init__(self, name: str, total: int, done: int = 0, unit: str = "rows", every: float = 15.0) -> None:
        self.name, self.total, self.first, self.unit = name, total, done, unit
        self.every = 0.2 if sys.stdout.isatty() else every
        self.start = self._last = time.monotonic()
        self._shown = False

    def __call__(self, done: int, total: int | None = None, note: str = "") -> None:
        """Report that `done` units are finished."""
        self.total = total or self.total
        now = time.monotonic()
        finished = done >= self.total
        if now - self._last < self.every and not (finished and self._shown):
            return
        self._last, self._shown = now, True
        speed = (done - self.first) / max(now - self.start, 1e-9)
        left = duration((self.total - done) / speed) if speed > 0 else "?"
        full = int(20 * min(done, self.total) / max(self.total, 1))
        bar = "█" * full + "·" * (20 - full)
        text = f"{self.name}: {bar} {done:,}/{self.total:,} {self.unit}, {speed:,.0f}/s, {left} left"
        text += f"  {note}" if note else ""
        if sys.stdout.isatty():
            print("\r\x1b[2K" + text, end="\n" if finished else "", flush=True)
        else:
            say(text)
