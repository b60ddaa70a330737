"""A server as a process of its own."""

import re
import signal
import socket
import subprocess
import threading
from pathlib import Path

import openai

from helpers import start, until

KEY = "a-key-of-twenty-four-characters"
PLACE = "/v1/images/generations"


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


class Server:
    """A process, its address and what it said."""

    def __init__(
        self,
        folder: Path,
        *argv: str,
        command: str = "serve",
        ready: str = "ready",
        process: subprocess.Popen[str] | None = None,
    ) -> None:
        self.process = process or start(command, folder, "--port", "0", *argv)
        self.said: list[str] = []
        self.clients: list[openai.OpenAI] = []
        self._last, self._ready = ready, threading.Event()
        self._readers = [
            threading.Thread(target=self._read, args=(stream,), daemon=True)
            for stream in (self.process.stdout, self.process.stderr)
        ]
        for reader in self._readers:
            reader.start()
        assert self._ready.wait(90), self.said
        self.address = next(m.group() for line in self.said if (m := re.search(r"http://\S+", line)))

    def _read(self, stream: object) -> None:
        for line in stream:  # type: ignore[attr-defined]
            self.said.append(line.rstrip())
            if self._last in line:
                self._ready.set()

    def wait_for(self, words: str) -> None:
        """Until it said a line that holds these words."""
        until(lambda: any(words in line for line in self.said), lambda: self.said, 60)

    def client(self, **more: object) -> openai.OpenAI:
        self.clients.append(openai.OpenAI(base_url=f"{self.address}/v1", api_key=KEY, **more))  # type: ignore[arg-type]
        return self.clients[-1]

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        for client in self.clients:
            client.close()
        try:
            return self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        finally:
            for reader in self._readers:
                reader.join(5)
            for stream in (self.process.stdout, self.process.stderr):
                assert stream is not None
                stream.close()
