"""An S3 endpoint that fails now and then: a proxy before moto that delays, refuses and hangs up."""

import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from s3 import S3, Proxy, proxied

FAULTS = ("delay", "503", "503 after", "hang up", "hang up after", "half")
"""Wait; refuse; do it and say that it failed; close without an answer, or after doing it; half an answer."""


class Weather:
    """Which requests fail: a seeded share of them, and no key more than twice in a row."""

    def __init__(self, seed: int, share: float) -> None:
        self.chance, self.share = random.Random(seed), share
        self.seen: Counter[str] = Counter()
        self._row: Counter[str] = Counter()
        self._lock = threading.Lock()

    def fault(self, request: str) -> str:
        with self._lock:
            self.seen["requests"] += 1
            if self.chance.random() >= self.share or self._row[request] >= 2:
                self._row[request] = 0
                return ""
            self._row[request] += 1
            found = FAULTS[sum(self.seen[fault] for fault in FAULTS) % len(FAULTS)]  # each of them in turn
            self.seen[found] += 1
            return found


@contextmanager
def throttled(s3: S3, rate: float) -> Iterator[tuple[S3, list[str]]]:
    """The endpoint behind a line of so many bytes a second, and the requests that came: method and path."""
    seen: list[str] = []

    class Throttled(Proxy):
        endpoint = s3.url

        def forward(self) -> None:
            seen.append(f"{self.command} {self.path}")
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            status, headers, content = self.ask(body)
            time.sleep((len(body) + len(content)) / rate)
            self.answer(status, headers, content)

    with proxied(Throttled) as behind:
        yield behind, seen


@contextmanager
def stormy(s3: S3, weather: Weather) -> Iterator[S3]:
    """The endpoint behind a proxy in bad weather."""

    class Stormy(Proxy):
        endpoint = s3.url

        def forward(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            fault = weather.fault(f"{self.command} {self.path}")
            if fault == "delay":
                time.sleep(weather.chance.uniform(0.05, 0.4))
            if fault == "hang up":
                return self.hang_up()
            if fault == "503":
                return self.answer(503, {}, b"")
            status, headers, content = self.ask(body)
            if fault == "hang up after":
                return self.hang_up()
            if fault == "503 after":
                return self.answer(503, {}, b"")
            self.answer(status, headers, content, half=fault == "half")
            return self.hang_up() if fault == "half" else None

        def hang_up(self) -> None:
            self.close_connection = True
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_RDWR)

    with proxied(Stormy) as behind:
        yield behind
