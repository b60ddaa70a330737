"""Requests by the thousand, right, wrong, cancelled and broken, to a server that is killed and drained."""

import asyncio
import json
import random
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from atoll.campaign.folder import Campaign
from atoll.model.model import Model
from serve.conftest import pixels
from serve.process import KEY, PLACE, Server, free_port

pytestmark = pytest.mark.slow
COUNT, CLIENTS = 3000, 24
KILL, DRAIN = COUNT // 3, 2 * COUNT // 3
"""Requests after which the server is killed, and told to leave."""
GROWTH = 60_000 * (COUNT - DRAIN) * 4 // 5
"""Bytes by which a server's memory may differ between a fifth of its requests and the last."""
HEADERS = {"Authorization": f"Bearer {KEY}"}
ROUTINGS = ("top-1", "top-2", "full", "once", "once null sample-1", "sample-2", "full without 1")

WRONG_VALUES: dict[str, list[Any]] = {
    "prompt": [5, None, ["1"], "x" * 32_001, "no label", "9999", ""],
    "n": [0, -1, 11, 1.5, "2", 10**30, True],
    "size": ["64x64", "", 32],
    "steps": [0, 251, "ten", -3],
    "guidance": [-1.0, float("nan"), float("inf"), 1e7, "2"],
    "seed": [-1, 2**63, 1.5, [1]],
    "routing": ["best", "oracle", "top-0", "top-9", "once without 0,1,2", "once without 7", "x" * 201, 1],
    "model": ["gpt-image-1", "ensemble:best of all", "student"],
    "response_format": ["png"],
    "output_format": ["gif"],
    "output_compression": [101],
    "stream": ["yes"],
    "partial_images": [2],
    "sed": [4],
    "shift": [0.0],
    "negative": ["another class"],
    "background": ["transparent"],
    "\ud800": [1],
}
WRONG = [{name: value} for name, values in WRONG_VALUES.items() for value in values]
WRONG += [{"stream": True, "partial_images": 4}, {"stream": True, "response_format": "url"}]
NOT_FOUND = ("gpt-image-1", "student")
JSON = {"Content-Type": "application/json"}
BODIES = [b"", b"null", b"[]", b'"1"', b'{"prompt": "1"', b'{"prompt": "1"} {}', b"\xff\xfe\x00"]
BODIES += [b"[" * 100_000, b'{"n": ' + b"1" * 5_000 + b"}", b'{"prompt": "' + b"x" * 300_000 + b'"}']
BROKEN = [
    b"GET",
    b"\x16\x03\x01\x02\x00\x01\x00",
    f"POST {PLACE} HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{{".encode(),
    f"POST {PLACE} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n".encode(),
    f"POST {PLACE} HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n".encode(),
    b"GET / HTTP/1.1\r\n" + b"x: " + b"y" * 70_000 + b"\r\n\r\n",
]


class Soak:
    """Clients, the server that they ask, and what came of it."""

    def __init__(self, folder: Path, keys: Path) -> None:
        self.folder, self.keys, self.port = folder, keys, free_port()
        self.random, self.counts, self.faults = random.Random(5), Counter[str](), list[str]()
        self.sent, self.life, self.leaving = 0, 0, False
        self.memory: list[tuple[int, int]] = []
        self.expected: list[tuple[dict[str, Any], list[bytes]]] = []
        self.server = self.start()

    def start(self) -> Server:
        return Server(self.folder, "--port", str(self.port), "--set", "queue=12", "--keys", str(self.keys))

    def draw(self) -> None:
        """What the model itself draws for the right requests."""
        model, default = Model.load(self.folder), Campaign.open(self.folder).config.sampling
        for number in range(60):
            how = {
                "seed": self.random.randrange(50),
                "steps": self.random.randint(1, 7),
                "guidance": self.random.choice((1.0, 2.0, 3.5)),
                "routing": self.random.choice(ROUTINGS),
            }
            count, label = self.random.choice((1, 1, 1, 2, 4)), str(number % 2)
            images = model([label], count, default, **how).images
            body = {"prompt": label, "n": count, **how}
            self.expected.append((body, [image.convert("RGB").tobytes() for image in images]))

    async def go(self) -> None:
        """All requests, by clients that each wait for their answers."""
        await asyncio.gather(*(self.client() for _ in range(CLIENTS)))

    async def client(self) -> None:
        address = f"http://127.0.0.1:{self.port}"
        async with httpx.AsyncClient(base_url=address, headers=HEADERS, timeout=60) as client:
            while self.sent < COUNT:
                self.sent += 1
                if self.sent in (KILL, DRAIN):
                    await self.replace(signal.SIGKILL if self.sent == KILL else signal.SIGTERM)
                if self.sent in (DRAIN + (COUNT - DRAIN) // 5, COUNT):
                    self.memory.append((self.life, resident(self.server.process.pid)))
                act = self.random.choices(
                    (self.right, self.stream, self.wrong, self.cancelled, self.broken, self.no_key),
                    (70, 7, 10, 10, 2, 1),
                )[0]
                try:
                    await act(client)
                except Exception as error:
                    self.faults.append(f"{act.__name__}: {type(error).__name__} {error}")

    async def replace(self, signum: signal.Signals) -> None:
        """End the server and start it again."""
        self.leaving, old = True, self.server
        old.process.send_signal(signum)
        code = await asyncio.to_thread(old.process.wait, 60)
        wanted = -signum if signum == signal.SIGKILL else 0
        if code != wanted or (signum == signal.SIGTERM and "drained" not in "".join(old.said)):
            self.faults.append(f"told to leave by {signum.name}, it ended with {code}: {old.said[-3:]}")
        old.stop()
        self.check_said(old)
        self.server = await asyncio.to_thread(self.start)
        self.leaving, self.life = False, self.life + 1

    def check_said(self, server: Server) -> None:
        if any("Traceback" in line or "error" in line.lower() for line in server.said):
            self.faults.append("\n".join(server.said))

    async def until_answered(self, ask: Callable[[], Any]) -> Any:
        """Again, as long as the server is full or away."""
        for _ in range(3000):
            life = self.life
            try:
                answer = await ask()
            except httpx.TransportError:
                if not self.leaving and life == self.life:
                    raise
                self.counts["away"] += 1
                await asyncio.sleep(0.05)
                continue
            if answer.status_code not in (429, 503):
                return answer
            assert int(answer.headers["retry-after"]) >= 1
            assert answer.status_code == 429 or self.leaving or life != self.life, answer.text
            self.counts[f"{answer.status_code}"] += 1
            await asyncio.sleep(0.05)
        raise AssertionError("refused for ever")

    async def right(self, client: httpx.AsyncClient) -> None:
        body, images = self.random.choice(self.expected)
        answer = await self.until_answered(lambda: client.post(PLACE, json=body))
        assert answer.status_code == 200, answer.text
        assert [pixels(one["b64_json"]) for one in answer.json()["data"]] == images, body
        self.counts["right"] += 1

    async def stream(self, client: httpx.AsyncClient) -> None:
        body, images = self.random.choice(self.expected)
        more = {**body, "stream": True, "partial_images": 2}
        answer = await self.until_answered(lambda: client.post(PLACE, json=more))
        events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
        done = {one["number"]: one for one in events if one.get("type") == "image_generation.completed"}
        if len(done) < len(images) and (self.leaving or '"server_stopped"' in answer.text):
            self.counts["cut"] += 1
            return
        assert [pixels(done[n]["b64_json"]) for n in range(len(images))] == images, body
        self.counts["streamed"] += 1

    async def wrong(self, client: httpx.AsyncClient) -> None:
        number = self.random.randrange(len(WRONG) + len(BODIES))
        if number < len(WRONG):
            content = json.dumps({"prompt": "1", "steps": 2, **WRONG[number]}).encode()
            status = 404 if WRONG[number].get("model") in NOT_FOUND else 400
        else:
            content = BODIES[number - len(WRONG)]
            status = 413 if len(content) > 200_000 else 400
        answer = await self.until_answered(lambda: client.post(PLACE, content=content, headers=JSON))
        error = answer.json()["error"]
        told = error["message"] and error["code"]
        assert answer.status_code == status and told, (content[:80], answer.text)
        assert answer.headers["x-should-retry"] == "false"
        self.counts["wrong"] += 1
        self.counts[f"wrong {number}"] += 1

    async def cancelled(self, client: httpx.AsyncClient) -> None:
        """The client hangs up at some moment."""
        body, _ = self.random.choice(self.expected)
        try:
            longer = {**body, "steps": 100}
            await asyncio.wait_for(client.post(PLACE, json=longer), self.random.uniform(0.001, 0.3))
        except (TimeoutError, httpx.TransportError):
            pass
        self.counts["cancelled"] += 1

    async def broken(self, client: httpx.AsyncClient) -> None:
        """A connection that breaks in the middle of what is no HTTP."""
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", self.port)
            writer.write(self.random.choice(BROKEN))
            await asyncio.sleep(self.random.uniform(0, 0.05))
            writer.transport.abort()
        except OSError:
            assert self.leaving
        self.counts["broken"] += 1

    async def no_key(self, client: httpx.AsyncClient) -> None:
        body, _ = self.random.choice(self.expected)
        key = self.random.choice(("", "Bearer", f"Bearer {KEY}x", f"Basic {KEY}", KEY, "Bearer " + "é" * 50))
        headers = {"Authorization": key.encode()}
        answer = await self.until_answered(lambda: client.post(PLACE, json=body, headers=headers))
        assert answer.status_code == 401, answer.text
        self.counts["no key"] += 1


def resident(pid: int) -> int:
    """Bytes of memory of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))


def test_every_request_is_answered_or_refused_and_no_picture_is_anothers(
    folder: Path, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"{KEY}\n")
    soak = Soak(folder, keys)
    try:
        soak.draw()
        asyncio.run(soak.go())
        left = httpx.get(f"http://127.0.0.1:{soak.port}/metrics", headers=HEADERS).text
    finally:
        soak.server.stop()
    soak.check_said(soak.server)
    print(soak.counts, soak.memory)
    assert not soak.faults, (len(soak.faults), soak.faults[:5])
    assert soak.life == 2 and soak.counts["right"] > COUNT / 2
    assert sum(name.startswith("wrong ") for name in soak.counts) >= 40
    assert soak.counts["cancelled"] > COUNT / 20 and soak.counts["429"] > 0 and soak.counts["away"] > 0
    assert "atoll_images_waiting 0.0" in left and 'code="internal_error"' not in left
    assert "atoll_failed_batches_total 0.0" in left
    (_, early), (_, late) = soak.memory
    assert late - early < GROWTH, (early, late)
