"""The files of deploy/: nginx before real servers, and what the others say against what the server takes."""

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest
import yaml

from atoll.campaign.folder import Campaign
from atoll.model.model import Model
from atoll.serve.settings import ServeSettings
from helpers import ROOT
from serve.conftest import pixels
from serve.process import KEY, PLACE, Server, free_port

DEPLOY = ROOT / "deploy"
NGINX = shutil.which("nginx", path="/usr/sbin:/usr/bin:/usr/local/sbin:/usr/local/bin")


@pytest.fixture
def behind(folder: Path, tmp_path: Path) -> Iterator[tuple[str, list[Server]]]:
    """The address of nginx, and the two servers behind it."""
    if NGINX is None:
        pytest.skip("nginx is not installed (Debian: nginx-light)")
    servers = [Server(folder, "--set", "queue=1000") for _ in range(2)]
    port = free_port()
    own = (DEPLOY / "nginx.conf").read_text().replace("127.0.0.1:8080", f"127.0.0.1:{port}")
    for number, server in enumerate(servers):
        own = own.replace(f"127.0.0.1:{8000 + number}", server.address.removeprefix("http://"))
    (tmp_path / "own.conf").write_text(own)
    (tmp_path / "nginx.conf").write_text(
        f"daemon off; pid {tmp_path}/pid; error_log {tmp_path}/error.log; worker_processes 1;\n"
        f"events {{}}\nhttp {{ access_log off;\n"
        f"client_body_temp_path {tmp_path}/b; proxy_temp_path {tmp_path}/p;\n"
        f"fastcgi_temp_path {tmp_path}/f; uwsgi_temp_path {tmp_path}/u; scgi_temp_path {tmp_path}/s;\n"
        f"include {tmp_path}/own.conf; }}\n"
    )
    places = ["-p", tmp_path, "-c", tmp_path / "nginx.conf", "-e", tmp_path / "error.log"]
    process = subprocess.Popen([NGINX, *map(str, places)], stderr=subprocess.PIPE)
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(100):
            assert process.poll() is None, process.communicate()
            try:
                httpx.get(f"{address}/health")
                break
            except httpx.TransportError:
                time.sleep(0.05)
        yield address, servers
    finally:
        process.terminate()
        process.communicate(timeout=10)
        for server in servers:
            server.stop()


@pytest.mark.slow
def test_streams_pass_nginx_as_they_come_and_a_server_can_leave(
    behind: tuple[str, list[Server]], folder: Path
) -> None:
    address, servers = behind
    how = {"seed": 5, "steps": 6, "routing": "top-1"}
    expected = Model.load(folder)(["1"], 1, Campaign.open(folder).config.sampling, **how).images[0]
    with openai.OpenAI(base_url=f"{address}/v1", api_key="any", max_retries=0) as client:
        seen = [time.monotonic()]
        long = {"seed": 1, "steps": 250, "routing": "top-1"}
        for _ in client.images.generate(prompt="1", stream=True, partial_images=3, extra_body=long):
            seen.append(time.monotonic())
        # Held back, the first would come with the last.
        assert len(seen) == 5 and seen[1] - seen[0] < 0.7 * (seen[4] - seen[0])
        done, failed = list[bytes](), list[Exception]()

        def ask() -> None:
            try:
                answer = client.images.generate(prompt="1", extra_body=how)
                assert answer.data is not None and answer.data[0].b64_json is not None
                done.append(pixels(answer.data[0].b64_json))
            except Exception as error:
                failed.append(error)

        threads = [threading.Thread(target=ask) for _ in range(24)]
        for number, thread in enumerate(threads):
            thread.start()
            if number == 8:
                assert servers[0].stop() == 0
        for thread in threads:
            thread.join(60)
    # A server that is full is not a dead one: nginx passes its answer on, and has none of its own.
    heavy = {"json": {"prompt": "1", "n": 10, "steps": 250}, "timeout": 60}
    with ThreadPoolExecutor(8) as pool:
        answers = [*pool.map(lambda _: httpx.post(f"{address}{PLACE}", **heavy), range(8))]
    assert {answer.status_code for answer in answers} == {200, 429}
    assert not failed and len(done) == 24 and len({*done}) == 1
    assert done[0] == expected.convert("RGB").tobytes()


def test_kubernetes_asks_for_what_the_server_has() -> None:
    deployment, service = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    pod = deployment["spec"]["template"]
    labels = pod["metadata"]["labels"]
    assert service["spec"]["selector"] == deployment["spec"]["selector"]["matchLabels"] == labels
    (container,) = pod["spec"]["containers"]
    args = container["args"]
    settings = ServeSettings.of([args[n + 1] for n, word in enumerate(args) if word == "--set"])
    assert container["ports"][0]["containerPort"] == settings.port
    assert pod["spec"]["terminationGracePeriodSeconds"] > settings.drain + 10
    mounts = {one["mountPath"] for one in container["volumeMounts"]}
    assert args[0] in mounts and str(Path(args[args.index("--keys") + 1]).parent) in mounts
    mounted, volumes = (
        {one["name"] for one in group} for group in (container["volumeMounts"], pod["spec"]["volumes"])
    )
    assert mounted == volumes
    assert container["livenessProbe"]["httpGet"]["path"] == "/health"
    assert container["readinessProbe"]["httpGet"]["path"] == "/ready"


@pytest.mark.parametrize("version", ["1.25", "1.37"])
def test_kubernetes_knows_every_field(version: str) -> None:
    """By the schema that its release publishes, in which an unknown field is an error."""
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    deployment, service = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    for resource in (deployment, service):
        assert validate.validate(resource, version, strict=True) == version
    deployment["spec"]["template"]["spec"]["terminationGraceSeconds"] = 75
    with pytest.raises(validate.ValidationError, match="terminationGraceSeconds"):
        validate.validate(deployment, version, strict=True)


# systemd's restrictions by its own means: mounts of a namespace, another user, and no way back.
RESTRICTED = """
mount --make-rprivate /
mount -t tmpfs -o mode=755 tmpfs /srv
mkdir -p /srv/atoll/model /srv/credentials
mount --bind "$MODEL" /srv/atoll/model
cp "$KEYS" /srv/credentials/keys
chown -R 65534 /srv/credentials
mount -t tmpfs -o mode=1777 tmpfs /tmp
mount -o remount,bind,ro /
mount -o remount,ro /srv
exec setpriv --reuid=65534 --regid=65534 --clear-groups --no-new-privs "$@"
"""


def unit() -> dict[str, str]:
    """Keys of the unit; of one that stands there twice the last."""
    lines = (DEPLOY / "atoll.service").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if re.match(r"\w+=", line))


def restricted(folder: Path, keys: Path, *command: str) -> subprocess.Popen[str]:
    """A command as the unit has it run: another user, a file system to read, credentials, its environment."""
    own = dict(pair.split("=") for pair in unit()["Environment"].split())
    own |= {"MODEL": str(folder), "KEYS": str(keys), "CREDENTIALS_DIRECTORY": "/srv/credentials"}
    child = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT / "src"), "PYTHONUNBUFFERED": "1", **own}
    argv = ["unshare", "--mount", "sh", "-ec", RESTRICTED, "sh", *command]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(argv, env=child, cwd="/", **pipes)  # type: ignore[call-overload, no-any-return]


def exec_start() -> list[str]:
    """The command line of the unit, of this installation, on a free port and with room for a long queue."""
    line = unit()["ExecStart"].replace("${CREDENTIALS_DIRECTORY}", "/srv/credentials")
    return [sys.executable, "-m", "atoll", *line.split()[1:], "--port", "0", "--set", "queue=5000"]


@pytest.mark.slow
def test_what_the_unit_starts_serves_drains_and_leaves_as_systemd_expects(
    folder: Path, tmp_path: Path
) -> None:
    """As the unit restricts it. SIGTERM is answered once all is done; only then its code is 0."""
    keys = tmp_path / "keys"
    keys.write_text(f"{KEY}\n")
    tried = restricted(folder, keys, sys.executable, "-c", "import atoll.cli.main")
    if message := tried.communicate(timeout=120)[1]:
        pytest.skip(f"no namespace, or another user cannot run this Python: {message.splitlines()[-1]}")
    server = Server(folder, process=restricted(folder, keys, *exec_start()))
    answers = list[int]()

    def ask() -> None:
        body = {"prompt": "1", "steps": 100, "n": 2, "routing": "full"}
        head = {"Authorization": f"Bearer {KEY}"}
        answer = httpx.post(f"{server.address}{PLACE}", json=body, headers=head, timeout=100)
        answers.append(answer.status_code)

    try:
        assert httpx.get(f"{server.address}/v1/models").status_code == 401
        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        with httpx.Client(headers={"Authorization": f"Bearer {KEY}"}) as client:
            while "atoll_images_waiting 6.0" not in client.get(f"{server.address}/metrics").text:
                assert not answers, "a request was answered before all had come"
                time.sleep(0.01)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(int(unit()["TimeoutStopSec"])) == 0
        for thread in threads:
            thread.join(10)
        assert answers == [200, 200, 200] and "drained" in server.said
    finally:
        server.stop()
    # A server that dies is started again; one whose path is wrong is not.
    assert unit()["Restart"] == "on-failure"
    wrong = restricted(folder, keys, *(w.replace("/srv/atoll/model", "/srv/no") for w in exec_start()))
    said = wrong.communicate(timeout=120)[1]
    assert str(wrong.returncode) == unit()["RestartPreventExitStatus"] and said.startswith("error: "), said


def test_systemd_takes_the_unit_and_gives_time_to_drain(tmp_path: Path) -> None:
    program, *words = unit()["ExecStart"].split()
    assert int(unit()["TimeoutStopSec"]) > ServeSettings.of([words[words.index("--set") + 1]]).drain + 10
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not installed")
    text = (DEPLOY / "atoll.service").read_text()
    (tmp_path / "atoll.service").write_text(text.replace(program, sys.executable))
    done = subprocess.run([analyze, "verify", tmp_path / "atoll.service"], capture_output=True, text=True)
    assert done.returncode == 0 and "atoll" not in done.stderr, done.stderr
