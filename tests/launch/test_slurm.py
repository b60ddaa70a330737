"""A real Slurm with two sites: runs that are warned, requeued and cancelled end with the right bits."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from atoll.campaign.folder import Campaign
from atoll.campaign.settings.launch import Placement, SlurmConfig
from atoll.launch import slurm
from atoll.launch.job import Job, Site
from atoll.train.run import train_run
from chaos.campaigns import kinds
from chaos.sweep import content, differences
from helpers import assembled, command, partitioned, refused, same_bits, write_campaign
from launch import cluster

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(cluster.why_not()), reason=cluster.why_not() or "Slurm is there"),
]

# Runs of some seconds that save their state often.
OFTEN = {"checkpoint_every_s": 0.0, "previews": 0, "validations": 2}
CHANGES: dict[str, Any] = {
    "budget": {"samples": 6000},
    "train": OFTEN,
    "router": {"share": 0.1, "train": {**OFTEN, "batch": 8}},
    "launch": {
        "islands": {0: {"slurm": {"partition": "a"}}, 1: {"slurm": {"partition": "b"}}},
        "router": {"slurm": {"partition": "b"}},
    },
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with cluster.slurm(tmp_path_factory.mktemp("slurm") / "c") as found, patch.dict(os.environ, found):
        yield


def call(*argv: str, check: bool = True) -> str:
    return subprocess.run(argv, check=check, capture_output=True, text=True).stdout.strip()


def state(number: str) -> str:
    """Of a job, as squeue tells it; empty when it is gone."""
    return call("squeue", "--noheader", "--format=%T", f"--jobs={number}", check=False)


def until(true: Callable[[], object], what: str, seconds: float = 120, log: Path = Path(os.devnull)) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"{what}\n{call('squeue', '--long')}\n{log.read_text()}"
        time.sleep(0.05)


def at_once(number: str, run: Path) -> None:
    """Let a requeued job start soon: Slurm holds it for two minutes, in case that the node is at fault.

    Not within the second of the requeue: nodes take its credential for the one that was revoked.
    """
    until(lambda: state(number) == "PENDING", f"job {number} is not requeued")
    assert not (run / "expert/card.json").exists(), "it finished before it was told to leave"
    call("scontrol", "update", f"JobId={number}", "StartTime=now+2")


def submitted(out: str) -> dict[str, str]:
    return dict(re.findall(r"^(.+): submitted as job (\d+)", out, re.M))


def test_a_campaign_on_two_partitions_ends_with_the_bits_of_an_undisturbed_one(
    site: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reference = assembled(tmp_path / "reference", CHANGES)
    train_run(Campaign.open(reference), "monolith")
    # A name that a shell, sbatch's own reader and its file name patterns would all take apart.
    folder = tmp_path / 'it\'s; a "$HOME" %j #1'
    partitioned(folder, CHANGES)

    first = command(capsys, "launch", folder, "--on", "slurm")
    jobs = submitted(first.out)
    assert first.code == 0 and {*jobs} == {"expert 0", "expert 1", "router", "monolith", "assemble"}, first
    again = command(capsys, "launch", folder, "--on", "slurm")
    assert submitted(again.out) == {} and again.out.count("queued already as job") == 5, again

    # In the middle of training, one is requeued from outside; the other one's script is warned, as it is
    # before the time limit, and requeues itself.
    tell = {
        "islands/0": ["scontrol", "requeue", jobs["expert 0"]],
        "islands/1": ["scancel", "--batch", "--signal=USR1", jobs["expert 1"]],
    }
    told: list[str] = []
    while len(told) < len(tell):
        until(lambda: any(kinds(folder / run, "commit") for run in tell if run not in told), "nothing trains")
        begun = next(run for run in tell if run not in told and kinds(folder / run, "commit"))
        call(*tell[begun])
        told.append(begun)
    for run in told:
        at_once(tell[run][-1], folder / run)
    # Cancelled: it must not come back.
    until(lambda: kinds(folder / "monolith", "commit"), "the monolith does not train")
    call("scancel", jobs["monolith"])
    until(lambda: not call("squeue", "--noheader"), "jobs are left", 240)

    prints = {
        name: (folder / "launch" / f"{name}.out").read_text() for name in ("expert-0", "expert-1", "monolith")
    }
    for name in ("expert-0", "expert-1"):
        assert "left at step" in prints[name] and "resumed at step" in prints[name], prints[name]
    assert "queued again to go on" in prints["expert-1"] and "queued again" not in prints["expert-0"]
    assert "left at step" in prints["monolith"] and "queued again" not in prints["monolith"]
    for run in ("islands/0", "islands/1", "router"):
        assert same_bits(folder / run, reference / run), run
    weights = [path.relative_to(folder) for path in (folder / "ensemble").rglob("*.safetensors")]
    assert len(weights) == 3
    assert all((folder / path).read_bytes() == (reference / path).read_bytes() for path in weights)

    # What was cancelled is all that another launch submits, and it goes on where it left.
    assert {*submitted(command(capsys, "launch", folder, "--on", "slurm").out)} == {"monolith"}
    until(lambda: not call("squeue", "--noheader"), "jobs are left")
    assert same_bits(folder / "monolith", reference / "monolith")


def test_arrays_make_the_data_set_though_one_task_is_cancelled_and_one_requeued(
    site: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the cancelled task would have written the next job writes, and it is cut."""
    partitioned(tmp_path / "serial")
    data = {"workers": 2, "slurm": {"partition": "both", "lines": []}}
    setup = 'while [ -n "$SLURM_ARRAY_TASK_ID" ] && [ ! -e go ]; do sleep 0.1; done'
    data["slurm"]["setup"] = [f"cd {tmp_path}", setup]  # type: ignore[index]
    folder = write_campaign(tmp_path / "c", {"launch": {"slurm": {"lines": ["--hold"]}, "data": data}})
    cut = folder / "launch" / "partition.out"
    jobs = submitted(command(capsys, "launch", folder, "--on", "slurm").out)
    array = jobs["ingest"]
    until(lambda: state(f"{array}_1") == state(f"{array}_2") == "RUNNING", "no worker starts")
    # The last task has the number of the whole array; requeued is this task alone.
    call("scontrol", "requeue", f"{array}_2")
    at_once(f"{array}_2", folder / "islands/0")
    assert state(f"{array}_1") == "RUNNING"
    again = command(capsys, "launch", folder, "--on", "slurm").out
    assert submitted(again) == {} and f"ingest: queued already as job {array}" in again
    call("scancel", f"{array}_1")
    until(lambda: not state(f"{array}_1"), "a task that is cancelled stays")
    assert state(f"{array}_2") and state(jobs["ingest end"]) == state(jobs["partition"]) == "PENDING"
    (tmp_path / "go").touch()
    until(lambda: not state(jobs["partition"]), "the data set is not cut", log=cut)
    assert cut.read_text().count("clusters of") == 1, cut.read_text()
    for made in ("data", "partition"):
        assert differences(content(folder / made), content(tmp_path / "serial" / made)) == []
    data_jobs = {"ingest", "ingest end", "columns", "columns end", "partition"}
    call("scancel", *(number for name, number in jobs.items() if name not in data_jobs))


def test_what_sbatch_refuses_is_one_line_that_names_what_is_submitted(
    site: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = {
        "launch": {"slurm": {"lines": ["--hold"]}, "islands": {1: {"slurm": {"partition": "nowhere"}}}}
    }
    folder = tmp_path / "c"
    partitioned(folder, changes)
    answer = command(capsys, "launch", folder, "--on", "slurm")
    number = submitted(answer.out)["expert 0"]
    line = refused(answer, "expert 1", "nvalid partition", f"expert 0 (job {number})", "launch again")
    assert state(number) == "PENDING" and "router" not in line
    call("scancel", number)
    until(lambda: not state(number), "the job stays")


def test_an_assembly_whose_island_failed_does_not_wait_for_ever(site: None, tmp_path: Path) -> None:
    folder = write_campaign(tmp_path / "c")
    jobs = [
        Job("expert 0", (sys.executable, "-c", "raise SystemExit(2)")),
        Job("assemble", (sys.executable, "-c", "print('no')"), needs=("expert 0",)),
    ]
    slurm.submit(jobs, Site(str(folder), folder / "launch", folder))
    until(lambda: not call("squeue", "--noheader"), "jobs are left")
    assert not (folder / "launch" / "assemble.out").exists()


RANKS = """
import os, signal, time, torch, torch.distributed as dist
from atoll.base.preemption import exit_process
told = []
signal.signal(signal.SIGTERM, lambda *_: told.append(1))
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
print(f"rank {rank} of {world}, restart {os.environ.get('SLURM_RESTART_COUNT', 0)}", flush=True)
total = torch.ones(1)
dist.all_reduce(total)
assert total == world
while os.environ.get("SLURM_RESTART_COUNT") is None:  # the second time it finishes
    leave = torch.tensor([len(told)])
    dist.all_reduce(leave, op=dist.ReduceOp.MAX)
    if leave:
        print(f"rank {rank} leaves", flush=True)
        exit_process(75)
    time.sleep(0.1)
print(f"rank {rank} finished", flush=True)
exit_process(0)
"""


def test_two_nodes_meet_are_warned_together_and_come_back(
    site: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "ranks.py"
    program.write_text(RANKS)
    asked = SlurmConfig(partition="both", hours=0.5)
    job = Job("expert 0", (sys.executable, str(program)), place=Placement(nodes=2, slurm=asked))
    slurm.submit([job], Site(str(tmp_path), tmp_path / "launch", tmp_path))
    number = submitted(capsys.readouterr().out)["expert 0"]
    output = tmp_path / "launch" / "expert-0.out"
    until(lambda: output.exists() and output.read_text().count("of 2, restart 0") == 2, "no ranks meet")
    call("scancel", "--batch", "--signal=USR1", number)
    at_once(number, tmp_path)
    until(lambda: not state(number), "the job stays", log=output)
    text = output.read_text()
    assert text.count(" leaves\n") == 2 and "queued again to go on" in text, text
    assert text.count("of 2, restart 1") == 2 and text.count(" finished\n") == 2, text
