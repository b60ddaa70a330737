"""SkyPilot's own parser reads what is written for it, in an environment of its own: it pins click."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from atoll.campaign.settings.launch import Placement, SkyConfig
from atoll.launch import sky
from atoll.launch.job import Job, Site, command

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

URL = "s3://bucket/a campaign; with 'quotes'"
CODE = Placement(sky=SkyConfig(workdir="."))
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "atoll-tests" / "sky"

PARSE = """
import json, sys
import sky
for path in sys.argv[1:]:
    task = sky.Task.from_yaml(path)
    [resources] = task.resources
    print(json.dumps({
        "name": task.name, "nodes": task.num_nodes, "run": task.run, "setup": task.setup,
        "envs": dict(task.envs), "file_mounts": task.file_mounts or {}, "workdir": task.workdir,
        "spot": resources.use_spot, "recovery": resources.job_recovery, "gpus": resources.accelerators,
        "cloud": str(resources.cloud), "region": resources.region, "cpus": resources.cpus,
        "memory": resources.memory, "image": resources.image_id, "disk": resources.disk_size,
    }))
"""


@pytest.fixture(scope="module")
def python() -> Path:
    """A Python with SkyPilot, made once and kept."""
    found = CACHE / "bin" / "python"
    ready = CACHE / "ready"
    if not ready.exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(CACHE)], check=True)
        argv = [str(found), "-m", "pip", "--disable-pip-version-check", "install", "-qq", "skypilot>=0.10"]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"skypilot cannot be installed: {done.stderr.strip().splitlines()[-1:]}")
        ready.touch()
    return found


def printed(home: Path, *argv: str | Path) -> str:
    """What a program of SkyPilot's prints, with a home of its own."""
    environment = {"PATH": os.environ["PATH"], "HOME": str(home), "KEY": "k"}
    environment |= {"SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
    done = subprocess.run(argv, env=environment, cwd=home, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def parsed(python: Path, home: Path, *paths: Path) -> list[dict[str, object]]:
    lines = printed(home, python, "-c", PARSE, *paths).splitlines()
    return [json.loads(line) for line in lines if line.startswith("{")]


def test_skypilot_reads_every_job_as_it_is_meant(python: Path, tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    place = {"cloud": "aws", "region": "us-east-1", "image": "docker:me/atoll:1", "disk": 500}
    full = SkyConfig(accelerators="H100:8", workdir=str(tmp_path / "code"), secrets=("KEY",), **place)  # type: ignore[arg-type]
    on_demand = SkyConfig(setup=(), use_spot=False, cloud="kubernetes")
    argv = command("train", "expert", URL, "--expert", "0", "--wait", python="python")
    asked = Placement(nodes=2, memory_gb=100, sky=full)
    jobs = [
        Job("expert 0", argv, 64, gpus=8, processes=8, memory=10**11, place=asked),
        Job("router", command("train", "router", URL, "--wait", python="python"), cpus=2, gpus=0, place=CODE),
        Job("monolith", argv, gpus=0, place=Placement(sky=on_demand), env={"A": "x: {y}"}),
    ]
    sky.submit(jobs, Site(URL, tmp_path, tmp_path / "launch"))
    paths = [tmp_path / "launch" / f"{job.slug}.yaml" for job in jobs]
    island, router, monolith = parsed(python, tmp_path, *paths)

    assert island["name"] == jobs[0].label(URL) and island["nodes"] == 2
    assert island["gpus"] == {"H100": 8} and island["spot"] is True
    assert (island["cloud"], island["region"]) == ("AWS", "us-east-1")
    assert (island["cpus"], island["memory"], island["disk"]) == ("64+", "100+", 500)
    recovery = island["recovery"]
    assert isinstance(recovery, dict)
    assert recovery["recover_on_exit_codes"] == [75] and recovery["max_restarts_on_errors"] == 3
    assert island["workdir"] == str(tmp_path / "code") and "docker:me/atoll:1" in str(island["image"])
    assert island["file_mounts"] == {} and island["setup"] == "set -e\npip install .\n"
    assert shlex.split(str(island["run"]))[-6:] == ["train", "expert", URL, "--expert", "0", "--wait"]

    assert router["gpus"] is None and router["spot"] is True and router["cpus"] == "2+"
    assert shlex.split(str(router["run"]))[-4:] == ["train", "router", URL, "--wait"]
    assert monolith["spot"] is False and monolith["cloud"] == "Kubernetes"
    assert monolith["envs"] == {**jobs[2].environment}


def test_skypilot_has_the_options_that_the_script_uses(python: Path, tmp_path: Path) -> None:
    """The commands of the script, asked for their help: nothing is launched."""
    asked = SkyConfig(setup=(), secrets=("K",))
    text = sky.files([Job("router", ("x",), gpus=0, place=Placement(sky=asked))], URL)[sky.SCRIPT]
    used = {"launch": ["--name", "--detach-run", "--yes", "--secret"], "queue": ["--skip-finished"]}
    assert all(option in text for options in used.values() for option in options)
    for verb, options in {**used, "logs": ["--name"]}.items():
        said = printed(tmp_path, python.with_name("sky"), "jobs", verb, "--help")
        assert [option for option in options if option not in said] == []
