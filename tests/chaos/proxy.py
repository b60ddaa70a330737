"""An S3 endpoint that fails now and then: a proxy before moto that delays, refuses and hangs up."""

import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from s3 import S3

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
            found = self.chance.choice(FAULTS)
            self.seen[found] += 1
            return found


@contextmanager
def stormy(s3: S3, weather: Weather) -> Iterator[S3]:
    """The endpoint behind a proxy in bad weather."""

    class Proxy(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

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
            return self.answer(status, headers, content, half=fault == "half")

        def ask(self, body: bytes) -> tuple[int, Any, bytes]:
            headers = {k: v for k, v in self.headers.items() if k.lower() != "connection"}
            with closing(HTTPConnection(s3.url.removeprefix("http://"), timeout=30)) as behind:
                behind.request(self.command, self.path, body, headers)
                answer = behind.getresponse()
                return answer.status, answer.headers, answer.read()

        def answer(self, status: int, headers: Any, content: bytes, half: bool = False) -> None:
            self.send_response(status)
            for name, value in headers.items():
                if name.lower() not in (
                    "connection",
                    "transfer-encoding",
                    "server",
                    "date",
                    "content-length",
                ):
                    self.send_header(name, value)
            length = headers.get("Content-Length", len(content)) if self.command == "HEAD" else len(content)
            self.send_header("Content-Length", str(length))
            self.end_headers()
            self.wfile.write(content[: len(content) // 2] if half else content)
            if half:
                self.hang_up()

        def hang_up(self) -> None:
            self.close_connection = True
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_RDWR)

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = forward

        def log_message(self, *_: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: object) -> None:
            """A client that is killed leaves its connection open: that is what this is about."""

    server = Server(("127.0.0.1", 0), Proxy)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield S3(f"http://127.0.0.1:{server.server_address[1]}", {})
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
