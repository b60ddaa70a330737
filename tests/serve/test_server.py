"""`atoll serve` as a process, driven by the stock client of OpenAI."""

import asyncio
import io
import re
import shutil
import signal
import socket
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import uvicorn
from PIL import Image
from uvicorn.server import ServerState

import atoll
from atoll.campaign.folder import Campaign
from atoll.model.model import Model
from atoll.serve.server import _Connection
from helpers import command, flip, refused, until
from serve.conftest import pixels
from serve.process import KEY, PLACE, Server

HEADERS = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(f"# ours\nanother-key-of-some-length\n{KEY}\n")
    served = Server(folder, "--keys", str(keys), "--set", "queue=400", "--set", "kept=4")
    yield served
    assert served.stop() == 0, served.said


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return server.client()


def drawn(client: openai.OpenAI, **request: object) -> list[bytes]:
    return [pixels(picture.b64_json) for picture in client.images.generate(prompt="1", **request).data]  # type: ignore[call-overload]


def test_the_client_draws_what_the_model_draws(client: openai.OpenAI, folder: Path) -> None:
    how = {"seed": 3, "steps": 5, "guidance": 3.0, "routing": "top-1"}
    answer = client.images.generate(prompt="1", n=2, extra_body=how)
    expected = Model.load(folder)(["1"], 2, Campaign.open(folder).config.sampling, **how).images
    assert answer.data is not None and [picture.number for picture in answer.data] == [0, 1]  # type: ignore[attr-defined]
    for picture, image in zip(answer.data, expected, strict=True):
        assert pixels(str(picture.b64_json)) == image.convert("RGB").tobytes()
        assert picture.seed == 3 and picture.routing["strategy"] == "top-1"  # type: ignore[attr-defined]
    assert answer.size == "x".join(map(str, expected[0].size))


def test_models_are_listed_and_name_their_strategy(client: openai.OpenAI) -> None:
    names = [model.id for model in client.models.list()]
    assert names[0] == "ensemble" and "ensemble:top-1" in names
    answer = client.images.generate(prompt="1", model="ensemble:top-1", extra_body={"steps": 2})
    assert answer.data is not None and answer.data[0].routing["strategy"] == "top-1"  # type: ignore[attr-defined]
    found = client.models.retrieve("ensemble:full")
    assert found.id == "ensemble:full" and found.atoll["clusters"] == {"0": "top words digits"}  # type: ignore[attr-defined]
    refusals = {"topp-1": "there is no routing", "top-9": "at most 3", "oracle": "known clusters"}
    for wrong, words in refusals.items():
        with pytest.raises(openai.BadRequestError, match=words):
            client.models.retrieve(f"ensemble:{wrong}")


def test_every_model_draws_with_the_steps_and_guidance_of_the_campaign(
    client: openai.OpenAI, folder: Path
) -> None:
    """A comparison side by side is fair, and is what `atoll.load` draws."""
    shown = [model.atoll for model in client.models.list() if model.id in ("ensemble", "monolith")]  # type: ignore[attr-defined]
    assert [(about["steps"], about["guidance"]) for about in shown] == [(3, 2.0)] * 2
    picture = client.images.generate(prompt="1", model="monolith", extra_body={"seed": 5}).data[0]  # type: ignore[index]
    assert (picture.steps, picture.guidance) == (3, 2.0)  # type: ignore[attr-defined]
    expected = atoll.load(folder, "monolith")(["1"], seed=5).images[0]
    assert pixels(str(picture.b64_json)) == expected.convert("RGB").tobytes()


@pytest.mark.parametrize("kind", ["png", "jpeg", "webp"])
def test_formats_and_urls(kind: str, client: openai.OpenAI, server: Server) -> None:
    more = {"output_format": kind, "response_format": "url", "extra_body": {"steps": 2}}
    url = client.images.generate(prompt="1", **more).data[0].url  # type: ignore[call-overload]
    assert url.startswith(server.address) and httpx.get(url).status_code == 401
    got = httpx.get(url, headers=HEADERS)
    assert got.headers["content-type"] == f"image/{kind}"
    assert Image.open(io.BytesIO(got.content)).format == kind.upper()


def test_streams_bring_partial_pictures_and_the_whole(client: openai.OpenAI) -> None:
    how = {"seed": 3, "steps": 9}
    events = list(client.images.generate(prompt="1", stream=True, partial_images=2, extra_body=how))
    names = [event.type.removeprefix("image_generation.") for event in events]
    assert names == ["partial_image", "partial_image", "completed"]
    assert [event.partial_image_index for event in events[:2]] == [0, 1]  # type: ignore[union-attr]
    first, last = pixels(events[0].b64_json), pixels(events[-1].b64_json)
    assert [last] == drawn(client, extra_body=how) and first != last
    with pytest.raises(openai.APIError, match="no class label"):
        list(client.images.generate(prompt="a text", stream=True))


@pytest.mark.parametrize(
    ("request_", "code", "param"),
    [
        ({"extra_body": {"stepz": 3}}, "unknown_parameter", "stepz"),
        ({"extra_body": {"steps": 0}}, "invalid_value", "steps"),
        ({"extra_body": {"steps": 100_000}}, "invalid_value", "steps"),
        ({"extra_body": {"routing": "topp-1"}}, "invalid_value", "routing"),
        ({"extra_body": {"routing": "once(1e-320)"}}, "invalid_value", "routing"),
        ({"extra_body": {"routing": "oracle"}}, "invalid_value", "routing"),
        ({"extra_body": {"routing": "top-9"}}, "invalid_value", "routing"),
        ({"extra_body": {"negative": "ugly"}}, "invalid_request", None),
        ({"model": "gpt-image-1"}, "model_not_found", "model"),
        ({"model": "ensemble:topp"}, "invalid_value", "routing"),
        ({"model": "ensemble:" + "full null " * 1000}, "model_not_found", "model"),
        ({"n": 11}, "invalid_value", "n"),
        ({"n": 5, "response_format": "url"}, "invalid_value", "response_format"),
        ({"size": "1024x1024"}, "invalid_size", "size"),
        ({"prompt": 3}, "invalid_value", "prompt"),
        ({"partial_images": 2}, "invalid_value", "partial_images"),
        ({"output_format": "gif"}, "invalid_value", "output_format"),
        ({"prompt": "1" * 5_000}, "invalid_request", None),
    ],
)
def test_wrong_requests_are_told_once(
    request_: dict[str, object], code: str, param: str | None, client: openai.OpenAI
) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        client.images.generate(**{"prompt": "1", **request_})  # type: ignore[call-overload]
    error = caught.value
    assert (error.code, error.param) == (code, param), error.body
    assert error.status_code == (404 if code == "model_not_found" else 400)
    assert error.response.headers["x-should-retry"] == "false"


def test_bodies_that_are_none(server: Server) -> None:
    for content in (b"", b"{", b"[]", b"[" * 100_000, b"\xff\xfe", b'{"seed": NaN}', b" " * 300_000):
        answer = httpx.post(f"{server.address}{PLACE}", content=content, headers=HEADERS)
        assert answer.status_code == (413 if len(content) > 200_000 else 400)
        assert answer.json()["error"]["type"] == "invalid_request_error"
    assert httpx.get(f"{server.address}/nothing", headers=HEADERS).status_code == 404


def test_what_is_not_there_says_so(server: Server, client: openai.OpenAI) -> None:
    answer = httpx.get(f"{server.address}{PLACE}", headers=HEADERS)
    assert answer.status_code == 405 and answer.json()["error"]["code"] == "method_not_allowed"
    assert answer.json()["error"]["message"].endswith("takes POST")
    with pytest.raises(openai.NotFoundError, match="/v1/images/edits: not implemented"):
        client.images.edit(image=b"x", prompt="1")
    described = httpx.get(f"{server.address}/openapi.json").json()["paths"][PLACE]["post"]["requestBody"]
    assert "routing" in described["content"]["application/json"]["schema"]["properties"]


def test_a_request_is_one_line_of_the_log(server: Server, client: openai.OpenAI) -> None:
    """Without prompt, query and key, and no path can begin a line of its own."""
    client.images.generate(prompt="1", n=2, model="monolith", extra_query={"secret": "1"})
    httpx.get(f"{server.address}/a%0Aready?secret=1", headers=HEADERS)
    httpx.get(f"{server.address}/health")
    httpx.get(f"{server.address}/version")
    server.wait_for("GET /version 200")
    lines = [re.sub(r"[\d.]+ s$", "", line) for line in server.said]
    after = lines[lines.index(f"POST {PLACE} 200, monolith, 2 images, ") :]
    assert after[1:3] == ["GET /a%0Aready 404, ", "GET /version 200, "]
    assert not [line for line in lines if "secret" in line or KEY in line or "/health" in line]


def test_keys_and_what_is_open_without(server: Server) -> None:
    assert httpx.get(f"{server.address}/health").json() == {"status": "ok"}
    assert (head := httpx.head(f"{server.address}/health")).status_code == 200 and not head.content
    assert httpx.get(f"{server.address}/ready").json() == {"status": "ready"}
    for key in ("wrong", KEY + "x", KEY[:-1]):
        answer = httpx.get(f"{server.address}/metrics", headers={"Authorization": f"Bearer {key}"})
        assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
    text = httpx.get(f"{server.address}/metrics", headers=HEADERS).text
    assert 'atoll_rejected_total{reason="key"}' in text and "atoll_denoise_step_seconds_count" in text


def test_a_full_queue_says_when_to_come_again(server: Server) -> None:
    """The stock client then waits and tries again by itself."""

    async def ask() -> tuple[list[object], object]:
        async with openai.AsyncOpenAI(base_url=f"{server.address}/v1", api_key=KEY, max_retries=0) as client:
            how = {"prompt": "1", "extra_body": {"steps": 40, "seed": 1}, "n": 10}
            requests = (client.images.generate(**how) for _ in range(12))  # type: ignore[call-overload]
            answers = await asyncio.gather(*requests, return_exceptions=True)
            patient = client.with_options(max_retries=5)
            return list(answers), await patient.images.generate(prompt="1", extra_body={"steps": 2})

    answers, last = asyncio.run(ask())
    full = [error for error in answers if isinstance(error, openai.RateLimitError)]
    assert full and len(full) < 12 and last.data  # type: ignore[attr-defined]
    for error in full:
        assert error.code == "queue_full" and int(error.response.headers["Retry-After"]) >= 1
        assert "x-should-retry" not in error.response.headers


def test_a_client_that_leaves_frees_its_place(server: Server) -> None:
    body = {"prompt": "1", "steps": 100, "n": 10, "routing": "full"}
    with pytest.raises(httpx.TimeoutException):
        httpx.post(f"{server.address}{PLACE}", json=body, headers=HEADERS, timeout=0.15)
    server.wait_for(f"POST {PLACE} 499")  # its answer ends too, which would else wait for ever
    asked = partial(httpx.get, f"{server.address}/metrics", headers=HEADERS)
    until(lambda: "atoll_images_waiting 0.0" in asked().text)
    left = re.findall(r"^atoll_cancelled_total{where=\"(?:queue|step)\"} (\S+)", asked().text, re.MULTILINE)
    assert sum(map(float, left)) >= 1


def test_told_to_leave_it_finishes_and_goes(folder: Path, client: openai.OpenAI) -> None:
    """And another process draws the same picture."""
    how = {"steps": 200, "seed": 4}
    server, found = Server(folder, "--set", "queue=2000"), list[bytes]()
    other = server.client()
    asking = threading.Thread(target=lambda: found.extend(drawn(other, extra_body=how)))
    asking.start()
    threading.Event().wait(0.4)
    server.process.send_signal(signal.SIGTERM)
    asking.join(30)
    assert server.stop() == 0
    assert "drained" in server.said and found == drawn(client, extra_body=how)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_told_to_leave_while_it_loads_it_says_one_line(number: signal.Signals, folder: Path) -> None:
    server = Server(folder, ready="serving")
    server.process.send_signal(number)
    assert server.stop() == 0
    assert server.said[1:] == ["left before the models were loaded"]


def test_a_bad_start_is_one_line(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def told(*words: str, of: Path = folder, sets: Sequence[str] = ("port=0",), keys: str = "") -> None:
        argv = [part for one in sets for part in ("--set", one)]
        argv += ["--keys", str(tmp_path / keys)] if keys else []
        refused(command(capsys, "serve", of, *argv), *words)

    told("nothing to serve: name an export, or run 'atoll assemble' first", of=tmp_path)
    told("absent", of=tmp_path / "absent")
    told("batch", sets=["bach=3"])
    told("cannot listen", sets=["host=no.such.host.invalid"])
    refused(command(capsys, "serve", folder, "--port", "70000"), "'port'", "65535")
    refused(command(capsys, "serve", folder, "--host", "no.such.host.invalid"), "cannot listen")
    told("cannot read", keys="absent")
    (tmp_path / "short").write_text("abc\n")
    told("16 characters", keys="short")
    told("residency.bytes", sets=["port=0", "residency.bytes=10"])
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        told("cannot listen", sets=[f"port={taken.getsockname()[1]}"])
    other = Path(shutil.copytree(folder, tmp_path / "other"))
    flip(next((other / "ensemble/experts/1").glob("*.safetensors")))
    told("experts/1", of=other)


@pytest.mark.parametrize("answered", [True, False], ids=["after its answer", "before"])
def test_a_body_that_breaks_ends_its_connection_alone(server: Server, answered: bool) -> None:
    host, port = server.address.removeprefix("http://").split(":")
    head = f"POST {PLACE} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    said = len(server.said)
    with socket.create_connection((host, int(port)), timeout=10) as broken:
        if answered:
            broken.sendall(head)
            assert broken.recv(65_536).startswith(b"HTTP/1.1 401")
            broken.sendall(b"zz\r\n")
        else:
            broken.sendall(head + b"zz\r\n")
            assert broken.recv(65_536).startswith(b"HTTP/1.1 400")
        while broken.recv(65_536):
            pass
    assert httpx.get(f"{server.address}/health").status_code == 200
    assert not [line for line in server.said[said:] if "Traceback" in line or "Error" in line]


def test_half_a_request_and_an_answer_that_nobody_reads_end_and_who_waits_is_answered() -> None:
    async def answer(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(1)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": bytes(2**25)})

    async def ask(sent: bytes) -> bytes:
        config, state = uvicorn.Config(answer, log_config=None), ServerState()
        config.load()
        impatient = type("Impatient", (_Connection,), {"patience": 0.2})
        made = partial(impatient, config=config, server_state=state, app_state={})
        async with await asyncio.get_running_loop().create_server(made, "127.0.0.1", 0) as server:
            with socket.create_connection(server.sockets[0].getsockname()) as client:
                client.sendall(sent)
                await asyncio.sleep(0.3)
                while state.connections:
                    await asyncio.sleep(0.05)
                return client.recv(12)

    head = b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n"
    for sent, answered in ((head[:5], b""), (head, b""), (head + bytes(9), b"HTTP/1.1 200")):
        assert asyncio.run(asyncio.wait_for(ask(sent), 60)) == answered
