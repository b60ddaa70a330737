"""deploy/ray_serve.py on two nodes of Ray: one dies under load, and some come and go with a queue."""

import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import psutil
import pytest
import yaml

from atoll.campaign.folder import Campaign
from atoll.model.model import Model
from helpers import ROOT, environment, until
from launch.ray_nodes import QUIET, nodes
from serve.conftest import pixels
from serve.process import PLACE, free_port

pytest.importorskip("ray.serve")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
ASKED = {"gpus": 0, "least": 2, "most": 3, "batch": 4, "queue": 1000, "upscale_s": 1, "downscale_s": 4}


class Replicas:
    """An address, and the processes behind it."""

    def __init__(self, address: str, nodes: psutil.Process) -> None:
        self.address, self.nodes = address, nodes

    def now(self) -> set[int]:
        """Ids of the processes of replicas; no cluster but ours is looked at."""
        found = set()
        for process in self.nodes.children(recursive=True):
            try:
                # Ray names a process after its actor, `ray::ServeReplica:...`, once that is made.
                if process.cmdline()[:1] and process.cmdline()[0].startswith("ray::ServeReplica"):
                    found.add(process.pid)
            except (psutil.NoSuchProcess, psutil.ZombieProcess):
                pass
        return found


@pytest.fixture(scope="module")
def behind(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replicas]:
    """Two nodes with three cores, and two replicas on them."""
    own, port = tmp_path_factory.mktemp("ray"), free_port()
    # Ray gives its proxy 5 seconds to start, which a busy machine does not have.
    patient = {f"RAY_SERVE_PROXY_{check}_CHECK_TIMEOUT_S": "60" for check in ("READY", "HEALTH")}
    child = {**environment(), **QUIET, **patient, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    app = {"name": "atoll", "route_prefix": "/", "import_path": "deploy.ray_serve:replicas"}
    app |= {"args": {"model": str(folder), **ASKED}}  # type: ignore[dict-item]
    listen = {"proxy_location": "HeadOnly", "http_options": {"host": "127.0.0.1", "port": port}}
    (own / "serve.yaml").write_text(yaml.safe_dump({**listen, "applications": [app]}))
    with (own / "serve.out").open("wb") as log, nodes(2, 1, environment=child) as (cluster, parent):
        runs = list[subprocess.Popen[bytes]]()
        try:
            serve = [Path(sys.executable).with_name("serve"), "run", "--address", cluster, own / "serve.yaml"]
            replicas = Replicas(f"http://127.0.0.1:{port}", psutil.Process(parent.pid))

            def ready() -> bool:
                # It gives up after a minute, in which a busy machine has no proxy, but leaves that to start.
                if not runs or runs[-1].poll() is not None:
                    assert len(runs) < 4, (own / "serve.out").read_text()
                    runs.append(subprocess.Popen(serve, env=child, stdout=log, stderr=log))
                try:
                    return httpx.get(f"{replicas.address}/ready").status_code == 200
                except httpx.TransportError:
                    return False

            until(ready, (own / "serve.out").read_text, 400)
            yield replicas
        finally:
            for run in runs[-1:]:  # it only watches; the application ends with the nodes
                run.kill()
                run.wait()


def test_a_replica_that_is_killed_under_load_loses_no_request(behind: Replicas, folder: Path) -> None:
    """A stock client gets every image; without its retries some get a status, and none waits for ever."""
    how = {"steps": 6, "routing": "top-1"}
    model, generation = Model.load(folder), Campaign.open(folder).config.sampling
    expected = [
        model(["1"], 1, generation, seed=n, **how).images[0].convert("RGB").tobytes() for n in range(3)
    ]
    done, failed, lock = Counter[str](), list[Exception](), threading.Lock()
    before = behind.now()
    assert len(before) == 2
    victim = min(before)
    killed = threading.Event()

    def ask(client: openai.OpenAI, kind: str) -> None:
        for number in range(20):
            seed = number % len(expected)
            try:
                answer = client.images.generate(prompt="1", extra_body={**how, "seed": seed})
                assert answer.data is not None and answer.data[0].b64_json is not None
                assert pixels(answer.data[0].b64_json) == expected[seed]
                result = "answered"
            except openai.APIStatusError as error:
                result = str(error.status_code)
            except Exception as error:
                failed.append(error)
                return
            with lock:
                done[f"{kind} {result}"] += 1
                if done.total() == 30:
                    os.kill(victim, signal.SIGKILL)
                    killed.set()

    clients = {
        "stock": openai.OpenAI(base_url=f"{behind.address}/v1", api_key="any", timeout=120),
        "once": openai.OpenAI(base_url=f"{behind.address}/v1", api_key="any", timeout=120, max_retries=0),
    }
    threads = [threading.Thread(target=ask, args=(clients[kind], kind)) for kind in (*clients, *clients) * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    for client in clients.values():
        client.close()
    print(dict(done))
    assert killed.is_set() and not failed and done.total() == 160
    assert done["stock answered"] == 80, done
    assert {key for key in done if key.startswith("once")} <= {"once answered", "once 500", "once 503"}, done
    until(lambda: len(behind.now() - {victim}) == 2, lambda: "no replica took the place of the one that died")


def test_replicas_come_with_a_queue_and_go_after_it(behind: Replicas) -> None:
    until(lambda: len(behind.now()) == 2, lambda: f"two replicas, and not {behind.now()}")
    enough, answers, failed = threading.Event(), list[int](), list[Exception]()
    body = {"prompt": "1", "steps": 100, "routing": "full"}

    def ask() -> None:
        with httpx.Client(timeout=120) as client:
            while not enough.is_set():
                try:
                    answers.append(client.post(f"{behind.address}{PLACE}", json=body).status_code)
                except Exception as error:
                    failed.append(error)
                    return

    threads = [threading.Thread(target=ask) for _ in range(24)]
    for thread in threads:
        thread.start()
    try:
        until(lambda: len(behind.now()) == 3, lambda: "no third replica came")
    finally:
        enough.set()
        for thread in threads:
            thread.join(180)
    assert not failed and {*answers} == {200}, Counter(answers)
    until(lambda: len(behind.now()) == 2, lambda: "the third replica does not leave")
