"""The engine: a request gives one picture whatever shares its batch, and one failure is one request's."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from fastapi import Request
from PIL import Image

from atoll.base.errors import ConfigError
from atoll.model.expert import Expert
from atoll.model.generation import Generation, Residency
from atoll.model.model import Model
from atoll.model.sampler import Sampler
from atoll.serve.app import _fragment
from atoll.serve.engine import FAILED, READY, Drawn, Engine, Event, Failed, Job, Refused
from atoll.serve.metrics import Metrics
from atoll.serve.server import create_app
from atoll.serve.settings import ServeSettings
from helpers import Run, refused, until
from serve.process import PLACE

WAYS = [
    Generation(steps=3, guidance=2.0, routing="top-1", seed=1),
    Generation(steps=7, guidance=1.0, routing="full", seed=2),
    Generation(steps=5, guidance=3.0, routing="once null sample-1", seed=3, shift=3.0),
    Generation(steps=6, guidance=2.0, routing="sample-2", seed=4),
    Generation(steps=4, guidance=2.5, routing="top-2 every 2", seed=1),
    Generation(steps=5, guidance=1.5, routing="nucleus(0.9)", seed=5),
]


class Client:
    """Submits and listens."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.events = engine, dict[int, list[Event]]()

    def ask(self, way: Generation, label: str = "1", **more: object) -> Job:
        events: list[Event] = []
        job = Job("ensemble", (label,), way, events.append, **more)  # type: ignore[arg-type]
        self.events[id(job)] = events
        self.engine.submit(job)
        return job

    def of(self, job: Job) -> list[Event]:
        return self.events[id(job)]

    def images(self, job: Job) -> list[Image.Image]:
        until(lambda: not job.waiting)
        done = [event for event in self.of(job) if isinstance(event, Drawn) and event.index is None]
        return [event.image for event in sorted(done, key=lambda event: event.number)]

    def bytes(self, job: Job) -> list[bytes]:
        return [image.tobytes() for image in self.images(job)]

    def metric(self, name: str, **labels: str) -> float:
        return self.engine.metrics.registry.get_sample_value(name, labels) or 0.0


Serving = Callable[..., Client]


@pytest.fixture(scope="module")
def serving(folder: Path) -> Iterator[Serving]:
    """Starts an engine over the served model, and ends it with the module."""
    engines: list[Engine] = []

    def start(residency: Residency | None = None, **settings: object) -> Client:
        model = {"ensemble": lambda: Model.load(folder, residency=residency)}
        engine = Engine(model, ServeSettings(**{"queue": 10_000, **settings}), Metrics())  # type: ignore[arg-type]
        engines.append(engine)
        engine.start()
        until(lambda: engine.state not in ("loading", "warming"))
        assert engine.state == READY, engine.error
        return Client(engine)

    yield start
    for engine in engines:
        engine.drain(0)


@pytest.fixture(scope="module")
def client(serving: Serving) -> Client:
    """Of an engine that all requests share."""
    return serving()


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    return Model.load(folder)


@pytest.fixture(scope="module")
def expected(model: Model) -> list[list[bytes]]:
    """What the model itself draws."""
    return [[image.tobytes() for image in model(["1"], 2, way).images] for way in WAYS]


@pytest.mark.parametrize("residency", [None, Residency(experts=1), Residency(experts=1, prefetch=False)])
def test_a_request_is_the_same_picture_alone_in_any_batch_and_from_the_model(
    residency: Residency | None, serving: Serving, expected: list[list[bytes]]
) -> None:
    client = serving(residency)
    alone = [client.bytes(client.ask(way, count=2)) for way in WAYS]
    jobs = []
    for way in WAYS:
        jobs.append(client.ask(way, count=2))
        time.sleep(0.01)  # so that they stand at different steps
    together = [client.bytes(job) for job in jobs]
    client.engine.drain(0)
    with pytest.raises(Refused, match="draining"):
        client.ask(WAYS[0])
    assert alone == expected and together == expected
    assert len({image for images in expected for image in images}) == 2 * len(WAYS)


def test_rows_of_several_requests_share_steps_and_runs(client: Client) -> None:
    rows, steps = (client.metric(f"atoll_batch_rows_{name}") for name in ("sum", "count"))
    jobs = [client.ask(way.with_(steps=20), count=2) for way in WAYS]
    for job in jobs:
        client.images(job)
    # Counted after the last picture.
    until(lambda: client.metric("atoll_batch_rows_sum") - rows == 20 * 2 * len(WAYS))
    assert client.metric("atoll_batch_rows_count") - steps < 2 * 20
    assert client.metric("atoll_images_waiting") == 0


def test_what_a_picture_tells_of_its_routing(client: Client, model: Model) -> None:
    way = WAYS[0].with_(steps=5)
    job = client.ask(way, count=2)
    client.images(job)
    trace = model(["1"], 2, way).routing
    assert trace is not None
    for event in client.of(job):
        assert isinstance(event, Drawn) and event.routing is not None
        assert [entry["step"] for entry in event.routing] == list(range(5))
        for entry, weights in zip(event.routing, trace.weights, strict=True):
            assert entry["experts"] == {str(int(weights[event.number].argmax())): 1.0}
            assert sum(entry["probabilities"]) == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize(("steps", "shown"), [(7, [0, 1, 2]), (2, [0]), (1, [])])
def test_partial_pictures_come_before_the_whole(steps: int, shown: list[int], client: Client) -> None:
    job = client.ask(WAYS[1].with_(steps=steps), partial=3)
    client.images(job)
    assert [event.index for event in client.of(job)] == [*shown, None]  # type: ignore[union-attr]


def test_only_the_guilty_request_fails(
    client: Client, monkeypatch: pytest.MonkeyPatch, expected: list[list[bytes]]
) -> None:
    """Whatever network it is, one row that cannot be evaluated fails its whole batch, and then alone."""
    evaluate = Expert.velocity

    def velocity(self: Expert, x_t: torch.Tensor, t: torch.Tensor, cond: object) -> torch.Tensor:
        if bool((cond.labels == 0).any()) and len(x_t) and bool((t < 0.5).any()):  # type: ignore[attr-defined]
            raise RuntimeError("a kernel fell over")
        return evaluate(self, x_t, t, cond)  # type: ignore[arg-type]

    monkeypatch.setattr(Expert, "velocity", velocity)
    good = [client.ask(WAYS[1]) for _ in range(3)]
    bad = client.ask(WAYS[1], "0")
    assert all(client.bytes(job) == expected[1][:1] for job in good)
    until(lambda: client.of(bad))
    (failure,) = client.of(bad)
    assert isinstance(failure, Failed) and failure.repeats and "a kernel fell over" in failure.message


@pytest.mark.parametrize(("of", "what"), [(Expert, "velocity"), (Model, "conditions"), (Model, "pictures")])
def test_an_engine_whose_device_is_lost_ends(
    serving: Serving, monkeypatch: pytest.MonkeyPatch, of: type, what: str
) -> None:
    """It would fail all requests for ever, and be called ready."""
    client = serving()
    monkeypatch.setattr(of, what, lambda *_: 1 / 0)
    monkeypatch.setattr(torch, "zeros", lambda *_, **more: 1 / 0)
    job = client.ask(WAYS[1])
    until(lambda: client.engine.state == FAILED and not job.waiting)
    assert [(event.code, event.repeats) for event in client.of(job)] == [("server_stopped", False)]  # type: ignore[union-attr]


def test_out_of_memory_halves_the_batch(
    serving: Serving, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluate = Expert.velocity

    def velocity(self: Expert, x_t: torch.Tensor, t: torch.Tensor, cond: object) -> torch.Tensor:
        if len(x_t) > 4:
            raise torch.OutOfMemoryError("out of memory")
        return evaluate(self, x_t, t, cond)  # type: ignore[arg-type]

    twelve = [image.tobytes() for image in model(["1"], 12, WAYS[1]).images]
    monkeypatch.setattr(Expert, "velocity", velocity)
    client = serving(batch=12)
    assert client.bytes(client.ask(WAYS[1], count=12)) == twelve and client.engine._batch == 3  # of 12, 6


def test_more_than_may_wait_is_refused_before_anything_is_computed(serving: Serving) -> None:
    client = serving(queue=4)
    own = client.engine.opened["ensemble"].generation
    slow = own.with_(steps=4 * own.steps)
    with pytest.raises(ConfigError, match="more than this server ever accepts"):
        client.ask(slow, count=2)
    job = client.ask(slow)
    with pytest.raises(Refused) as refused:
        client.ask(own)
    assert refused.value.code == "queue_full" and refused.value.after >= 1
    client.images(job)
    assert client.images(client.ask(own))  # there is room again


def test_who_leaves_frees_its_rows_and_who_is_late_is_told(client: Client) -> None:
    steps = client.metric("atoll_batch_rows_count")
    left = client.ask(WAYS[1].with_(steps=5_000), partial=1)
    until(lambda: client.metric("atoll_batch_rows_count") > steps)
    left.cancelled = True
    until(lambda: not left.waiting)
    assert not client.of(left)
    late = client.ask(WAYS[1].with_(steps=5_000), deadline=time.monotonic() + 0.2)
    bad = client.ask(WAYS[0], "no label")
    assert client.images(client.ask(WAYS[0]))
    for job, code in ((late, "deadline_exceeded"), (bad, "invalid_request")):
        until(lambda job=job: client.of(job))
        (failure,) = client.of(job)
        assert isinstance(failure, Failed) and failure.code == code
    assert client.metric("atoll_images_waiting") == 0


def test_who_leaves_in_the_last_step_leaves_no_request_behind(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def leaving(sampler: Sampler) -> None:
        sampler.advance()
        for row in sampler.rows:
            row.owner.job.cancelled = row.step == row.generation.steps

    monkeypatch.setattr("atoll.serve.engine._step", leaving)
    left = client.ask(WAYS[1])
    until(lambda: not left.waiting)
    assert client.metric("atoll_images_waiting") == 0 and not client.of(left)


def test_without_keys_only_its_own_pages_and_programs_are_answered(client: Client) -> None:
    """A web page can make its visitor's browser ask, or point a name of its own at this server."""
    here, names = "http://127.0.0.1:8000", ServeSettings(hosts=("images.example.org",))
    app = create_app(client.engine, names)

    async def ask(headers: dict[str, str], path: str = "/v1/models") -> int:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=here) as browser:
            post = path == PLACE
            body = b'{"prompt": "1", "steps": 1}' if post else None
            answer = await browser.request("POST" if post else "GET", path, headers=headers, content=body)
            assert answer.status_code == 200 or "message" in answer.json()["error"]
            return answer.status_code

    json_type = {"Content-Type": "application/json"}
    for path in ("/", "/v1/models", PLACE):
        for host in ("127.0.0.1:8000", "[::1]:8000", "LOCALHOST", "images.example.org", socket.gethostname()):
            for scheme in ("http", "https"):
                own = {**json_type, "Host": host, "Origin": f"{scheme}://{host}"}
                assert asyncio.run(ask(own, path)) == 200
        for foreign in (
            {"Host": "rebound.example.com:8000"},
            {"Host": "images.example.org.example.com"},
            {"Host": "["},
            {"Host": ""},
            {"Origin": "http://example.com"},
            {"Origin": "http://127.0.0.1:8001"},
            {"Origin": "null"},
        ):
            assert asyncio.run(ask({**json_type, **foreign}, path)) == 403
    for plain in ({}, {"Content-Type": "text/plain"}, {"Content-Type": "application/x-www-form-urlencoded"}):
        assert asyncio.run(ask(plain, PLACE)) == 415
    assert client.metric("atoll_rejected_total", reason="origin") == 21


def test_pages_that_wait_for_a_slow_store_hold_one_thread() -> None:
    """The others compress pictures."""
    found = threading.Event()
    answer: Callable[..., Any] = _fragment(lambda: str(found.wait(60)), 60)

    async def ask() -> None:
        pages = [asyncio.ensure_future(answer(Request({"type": "http", "headers": []}))) for _ in range(64)]
        await asyncio.sleep(0.1)
        await asyncio.wait_for(asyncio.to_thread(found.set), 30)
        assert {page.body for page in await asyncio.gather(*pages)} == {b"True"}

    asyncio.run(ask())


def test_rows_of_experts_that_are_not_on_the_device_take_turns(serving: Serving, model: Model) -> None:
    """One expert at a time: an expert is brought for several steps, and nobody waits for all of another's."""
    ways = [WAYS[0].with_(steps=24, routing=f"once without {one},{two}") for one, two in ("01", "02", "12")]
    drawn = [[image.tobytes() for image in model(["1"], 2, way).images] for way in ways]
    client = serving(Residency(experts=1, prefetch=False))
    before = client.metric("atoll_expert_swaps_total")
    jobs = [client.ask(way, count=2) for way in ways]
    assert [client.bytes(job) for job in jobs] == drawn
    bank = client.engine.opened["ensemble"].bank.experts
    until(lambda: client.metric("atoll_expert_swaps_total") == bank.loads)  # counted after the last picture
    swaps = client.metric("atoll_expert_swaps_total") - before
    assert 3 <= swaps <= 3 * (1 + 24 / 8) + 3  # and not 3 at each of 24 steps
    (size,) = {expert.module.layout.nbytes for expert in bank._experts.values()}
    assert client.metric("atoll_expert_moved_bytes_total") == (swaps + before) * size
    assert sum(len(client.of(job)) for job in jobs) == 6
    long = client.ask(WAYS[0].with_(steps=2_000, routing="once without 0,1"))
    until(lambda: long.started)
    assert client.images(client.ask(WAYS[0].with_(steps=9, routing="once without 1,2"))) and long.waiting
    long.cancelled = True
    until(lambda: not long.waiting)
    assert client.metric("atoll_cancelled_total", where="step") == 1


def test_a_server_is_sized_by_drawing(folder: Path, tmp_path: Path, run: Run) -> None:
    how = ("plan", folder, "--serve", "--set", "batch=6")
    found = json.loads(run(*how, "--json").out)
    assert [row["experts"] for row in found] == [1, 2, 3]
    weights = [row["weights"] for row in found]
    assert weights == sorted(weights) and weights[2] * 2 == weights[0] * 3  # one place more is brought into
    assert found[0]["swaps"] > 0 and found[2]["swaps"] == 0
    for row in found:
        assert row["peak"] > row["weights"] and row["rows"] > row["pictures"] > 0
    assert "experts" in run(*how).out.splitlines()[1]
    refused(run("plan", tmp_path, "--serve"), str(tmp_path))
    refused(run("plan", folder, "--serve", "--set", "batch=0"), "batch")
    refused(run("plan", folder, "--serve", "--gpu", "h100"), "--serve measures this machine: leave --gpu out")
