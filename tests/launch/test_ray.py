"""A real Ray cluster of two nodes: what is killed goes on, and ends with the bits of an undisturbed run."""

import os
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from atoll.campaign.folder import Campaign
from atoll.curate.aesthetics.scale import Scale
from atoll.curate.aesthetics.scorer import Scorer
from atoll.launch.submit import plan_jobs
from chaos.campaigns import kinds
from chaos.sweep import content, differences
from helpers import Run, assembled, partitioned, refused, same_bits, until, write_campaign
from launch import ray_cluster
from launch.ray_cluster import Cluster


def with_a_cluster(test: Callable[..., None]) -> Callable[..., None]:
    """Marks of a test that needs more than a dry run."""
    missing = pytest.mark.skipif(bool(ray_cluster.why_not()), reason=ray_cluster.why_not() or "Ray is there")
    return pytest.mark.slow(pytest.mark.timeout(1800)(missing(test)))


# Runs of some seconds that save their state often, each expert on a node of its own.
OFTEN = {"checkpoint_every_s": 0.0, "previews": 0, "validations": 2}
CHANGES: dict[str, Any] = {
    "budget": {"samples": 6000},
    "train": OFTEN,
    "router": {"share": 0.1, "train": {**OFTEN, "batch": 8}},
    "launch": {
        "on": "ray",
        "ray": {"address": f"127.0.0.1:{ray_cluster.PORT}"},
        "islands": {k: {"ray": {"resources": {f"island_{'ab'[k]}": 1}}} for k in range(2)},
        "monolith": {"nodes": 2, "env": {"GLOO_SOCKET_IFNAME": "lo"}},
    },
}


class Launch:
    """A command beside the cluster, and what it has printed so far."""

    def __init__(self, cluster: Cluster, log: Path, *words: str | Path) -> None:
        self.process, self.log = cluster.start(log, *words), log

    def text(self) -> str:
        return self.log.read_text()

    def wait_for(self, pattern: str) -> str:
        """The last group of what a regular expression matches, when it is printed."""
        until(lambda: re.search(pattern, self.text(), re.M) or self.process.poll() is not None, self.text)
        found = re.findall(pattern, self.text(), re.M)
        assert found, self.text()
        return str(found[-1])

    def end(self) -> tuple[int, str]:
        return self.process.wait(600), self.text()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with ray_cluster.ray() as started:
        started.add("island_a", cpus=2)
        started.add("island_b", cpus=2)
        yield started


@pytest.fixture
def launch(cluster: Cluster, tmp_path: Path) -> Iterator[Callable[..., Launch]]:
    begun: list[Launch] = []

    def start(*words: str | Path) -> Launch:
        begun.append(Launch(cluster, tmp_path / f"launch-{len(begun)}.out", *words))
        return begun[-1]

    yield start
    for command in begun:
        command.process.kill()
        command.process.wait()


def test_what_a_run_asks_of_ray(tmp_path: Path, run: Run) -> None:
    """Shown without a cluster. A run waits for the lease of the one that it replaces."""
    folder = write_campaign(tmp_path / "c", {**CHANGES, "train": {"threads": 3}})
    jobs = {job.name: job for job in plan_jobs(Campaign.open(folder))}
    assert jobs["expert 0"].argv[-1] == "--wait" and "assemble" not in jobs
    answer = run("launch", folder, "--dry-run")
    assert answer.code == 0 and "# expert 0 on 1 node of Ray, with CPU 3, island_a 1" in answer.out, answer
    assert "# monolith on 2 nodes of Ray, with CPU 3\n" in answer.out
    assert '--rdzv-endpoint "$ATOLL_HOST:$ATOLL_PORT"' in answer.out
    assert "# training: 4 runs, 4 at once; atoll plan" in answer.out


def test_without_a_cluster_the_line_comes_soon(tmp_path: Path, run: Run) -> None:
    folder = write_campaign(tmp_path / "c", CHANGES)
    partitioned(folder, CHANGES)
    refused(run("launch", folder, "--address", "127.0.0.1:1"), "no Ray cluster at 127.0.0.1:1", "ray start")
    two = ("--set", "launch.router.ray.address=10.0.0.1:6379")
    both = "launch.ray.address is 10.0.0.1:6379 and 127.0.0.1"
    refused(run("launch", folder, *two), both, "name one cluster")


@with_a_cluster
def test_a_campaign_whose_actors_and_launch_are_killed(
    cluster: Cluster, launch: Callable[..., Launch], tmp_path: Path
) -> None:
    reference, folder = assembled(tmp_path / "reference", CHANGES), tmp_path / 'it\'s; a "$HOME" #1'
    partitioned(folder, CHANGES)
    first = launch("launch", folder)
    actor = first.wait_for(r"^expert 0: runs on 127\.0\.0\.1 \(process (\d+)\)")
    until(lambda: kinds(folder / "islands/0", "commit"), first.text)
    os.kill(int(actor), signal.SIGKILL)
    assert first.wait_for(r"^expert 0: runs again on 127\.0\.0\.1 \(process (\d+)\)") != actor
    first.process.kill()
    first.process.wait()
    second = launch("launch", folder)
    second.wait_for("^(expert 0|expert 1|router|monolith): is there already")
    code, text = second.end()
    assert code == 0 and "left at step" not in text, text
    for run in ("islands/0", "islands/1", "router"):
        assert same_bits(folder / run, reference / run), run
    weights = [path.relative_to(folder) for path in (folder / "ensemble").rglob("*.safetensors")]
    assert len(weights) == 3
    assert all((folder / path).read_bytes() == (reference / path).read_bytes() for path in weights)
    assert (folder / "monolith/expert/card.json").exists()  # of two processes on two nodes


@with_a_cluster
def test_a_data_set_whose_workers_are_killed(launch: Callable[..., Launch], tmp_path: Path) -> None:
    partitioned(tmp_path / "serial")
    folder = write_campaign(tmp_path / "c", {"launch": CHANGES["launch"]})
    work = launch("data", "prepare", folder, "--workers", "3", "--on", "ray")
    os.kill(int(work.wait_for(r"^data ingest 2: runs on \S+ \(process (\d+)\)")), signal.SIGKILL)
    os.kill(int(work.wait_for(r"^data prepare 1: runs on \S+ \(process (\d+)\)")), signal.SIGKILL)
    code, text = work.end()
    assert code == 0, text
    assert launch("partition", folder).end()[0] == 0
    for made in ("data", "partition"):
        assert differences(content(folder / made), content(tmp_path / "serial" / made)) == []


@with_a_cluster
def test_pictures_are_tagged_and_scored_by_workers(
    launch: Callable[..., Launch], tmp_path: Path, run: Run
) -> None:
    serial, folder, words = tmp_path / "serial", tmp_path / "c", tmp_path / "words.txt"
    partitioned(serial, {"launch": CHANGES["launch"]})
    words.write_text("sans\nserif\n")
    assert run("concepts", "index", serial, "--vocabulary", words).code == 0
    shutil.copytree(serial, folder)
    scale = Scale.parse({"dimensions": [{"name": "All"}]}, "the test")
    Scorer(scale, "efficientnet-lite0@32").save(str(tmp_path / "scorer"), {})
    for group, command, *options in (
        ("concepts", "tag", "labels"),
        ("aesthetics", "score", "--scorer", tmp_path / "scorer"),
    ):
        assert run(group, command, serial, *options).code == 0
        code, text = launch(group, command, folder, *options, "--workers", "2", "--on", "ray").end()
        assert code == 0 and len(re.findall(r" [12]: runs on 127\.0\.0\.1", text)) == 2, text
    made = content(folder / "data")
    assert differences(made, content(serial / "data")) == []
    assert {path.split("/")[1] for path in made if path.startswith("columns/")} >= {"aesthetics"}


@with_a_cluster
def test_nodes_that_cannot_run_it_are_named(
    cluster: Cluster, launch: Callable[..., Launch], tmp_path: Path
) -> None:
    """A resource that no node has; another Atoll; a node that does not see the campaign; one that leaves."""
    folder = tmp_path / "c"
    partitioned(folder, CHANGES)

    def placed(resource: str) -> tuple[str, str]:
        return "--set", f'launch.islands.1.ray.resources={{"{resource}": 1}}'

    def refused_launch(*words: str) -> str:
        code, text = launch("launch", folder, *words).end()
        assert code == 2 and "Traceback" not in text, text
        return [line for line in text.splitlines() if line.startswith("error: ")][-1]

    line = refused_launch(*placed("island_z"))
    assert "expert 1 asks for island_z 1, which no node of the cluster has" in line

    # Nodes whose Atoll is older, and which see an empty folder in place of the campaign.
    old = tmp_path / "old"
    shutil.copytree(ray_cluster.ROOT / "src" / "atoll", old / "atoll")
    (old / "atoll-0.0.1.dist-info").mkdir()
    (old / "atoll-0.0.1.dist-info" / "METADATA").write_text("Name: atoll\nVersion: 0.0.1\n")
    cluster.add("old", PYTHONPATH=str(old))
    line = refused_launch(*placed("old"))
    assert "expert 1 ended with code 2 on 127.0.0.1" in line and "the node has Atoll 0.0.1" in line
    hidden = ("unshare", "--mount", "sh", "-c", f'mount -t tmpfs none {folder} && exec "$@"', "sh")
    cluster.add("blind", before=hidden)
    line = refused_launch(*placed("blind"))
    assert "expert 1 ended with code 2 on 127.0.0.1" in line and str(folder) in line

    # The run of a node that leaves waits for what that had; without that wish it goes on elsewhere.
    cluster.add("gone")
    left = launch("launch", folder, *placed("gone"))
    until(lambda: kinds(folder / "islands/1", "commit"), left.text)
    cluster.lose("gone")
    code, text = left.end()
    assert code == 2 and "expert 1 asks for gone 1, which no node of the cluster has any more" in text, text
    code, text = launch("launch", folder).end()
    assert code == 0 and "resumed at step" in text, text
