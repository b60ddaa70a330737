"""From a campaign's settings to jobs and targets, and what a dry run shows and leaves alone."""

import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from atoll.base.text import duration
from atoll.campaign.folder import Campaign
from atoll.campaign.runs import RunPlan
from atoll.data.contents import audit
from atoll.launch import sky
from atoll.launch.submit import data_jobs, plan_jobs
from atoll.store.lease import Heartbeat
from helpers import Run, partitioned, refused, write_campaign

MIXED: dict[str, Any] = {
    "on": "slurm",
    "env": {"A": "1"},
    "slurm": {"partition": "gpu"},
    "islands": {0: {"gpus": 4, "memory_gb": 2.5, "cpus": 16}, 1: {"on": "local", "processes": 2}},
    "monolith": {"nodes": 2, "gpus": 8},
}


def opened(folder: Path, launch: dict[str, Any], **more: Any) -> Campaign:
    return Campaign.open(write_campaign(folder, {"launch": launch, **more}))


def everything(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_islands_have_targets_and_gpus_of_their_own(tmp_path: Path) -> None:
    campaign = opened(tmp_path / "c", MIXED, train={"threads": 3})
    placed = {one.name: one for one in plan_jobs(campaign)}
    targets = {"expert 0": "slurm", "expert 1": "local", "router": "slurm", "monolith": "slurm"}
    assert {name: one.target for name, one in placed.items()} == targets
    zero, one, monolith = (placed[name] for name in ("expert 0", "expert 1", "monolith"))
    assert (zero.gpus, zero.processes, zero.cpus, zero.memory) == (4, 4, 16, 2_500_000_000)
    assert (one.gpus, one.processes, one.cpus) == (None, 2, 6)
    assert (monolith.place.nodes, monolith.processes) == (2, 8)
    assert zero.env == {"A": "1"} and zero.place.slurm.partition == "gpu"
    root = campaign.store.location
    assert zero.argv == (sys.executable, "-m", "atoll", "train", "expert", root, "--expert", "0", "--wait")
    assert one.argv == (sys.executable, "-m", "atoll", "train", "expert", root, "--expert", "1")


def test_the_assembly_is_a_job_where_all_its_parts_are_slurms(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    *_, last = plan_jobs(opened(tmp_path / "c", {"gpus": 2, "slurm": {"partition": "gpu"}}), "slurm")
    assert last.name == "assemble" and last.needs == ("expert 0", "expert 1", "router")
    assert (last.gpus, last.processes, last.place.slurm.partition) == (0, 1, "gpu")
    (tmp_path / "a.pem").touch()
    monkeypatch.chdir(tmp_path)  # a key's path means there what it means here
    sets = ["quarantine=[1]", "launch.gpus=1", "trusted=[a.pem]"]
    *_, last = plan_jobs(Campaign.open(tmp_path / "c", sets), "slurm")
    assert last.argv[-4:] == ("--set", "quarantine=[1]", "--set", f"trusted=[{tmp_path / 'a.pem'}]")
    for launch, on in ((MIXED, None), ({}, "local"), ({}, "sky")):
        assert "assemble" not in {one.name for one in plan_jobs(opened(tmp_path / "d", launch), on)}  # type: ignore[arg-type]


def test_skypilots_nodes_have_a_python_and_as_many_processes_as_gpus(tmp_path: Path) -> None:
    campaign = opened(
        tmp_path / "c", {"sky": {"accelerators": "H100:8", "setup": []}, "router": {"python": "/opt/python"}}
    )
    jobs = {one.name: one for one in plan_jobs(campaign, "sky")}
    assert jobs["expert 0"].argv[0] == "python" and jobs["expert 0"].processes == 8
    assert jobs["router"].argv[0] == "/opt/python"
    assert len(sky.files(list(jobs.values()), "s3://bucket/c")) == len(jobs) + 1
    bare = plan_jobs(opened(tmp_path / "d", {"sky": {"setup": []}}), "sky")
    made = yaml.safe_load(sky.files(bare, "s3://bucket/c")["router.yaml"])
    assert "accelerators" not in made["resources"] and bare[0].processes == 1
    launch = {"sky": {"accelerators": "H100:8", "setup": []}, "data": {"workers": 2}}
    making = data_jobs(opened(tmp_path / "e", launch), "sky")  # one process each, and no GPU is asked for
    assert sky.files(making, "s3://bucket/c") and {job.processes for job in making} == {1}


@pytest.mark.parametrize("partition", [False, True])
def test_a_dry_run_shows_all_and_changes_nothing(partition: bool, tmp_path: Path, run: Run) -> None:
    """Neither Slurm nor SkyPilot has to be installed for it."""
    folder = tmp_path / "a campaign; it's"
    write_campaign(folder, {"launch": MIXED})
    if partition:
        store = partitioned(folder, {"launch": MIXED}).store
        store.put_json("monolith/run/heartbeat.json", Heartbeat(holder="x", speed=2.0).to_json())
        plan = RunPlan.read(store, "monolith/island.json")
        time = f", about {duration(plan.steps * plan.batch / 2)} at the speed measured so far"
    before = everything(tmp_path)
    answer = run("launch", folder, "--dry-run")
    assert answer.code == 0, answer
    assert everything(tmp_path) == before
    assert f"# training: 4 runs, 4 at once{time if partition else '; atoll plan'}" in answer.out
    assert ("# first, on this machine" in answer.out) != partition
    assert answer.out.count("#!/bin/bash") == 3 and "#SBATCH --gres=gpu:4" in answer.out
    typed = [shlex.split(line[2:]) for line in answer.out.splitlines() if line.startswith("$ ")]
    assert typed[-1][-4:] == ["expert", str(folder), "--expert", "1"] and "--nproc-per-node" in typed[-1]
    assert f"# when expert 0, router are finished: atoll assemble {shlex.quote(str(folder))}" in answer.out


def test_a_run_waits_for_what_trains_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    """Needs across targets: no queue knows the other, so the launch says what to do."""
    from atoll.launch import submit
    from atoll.launch.job import Job

    jobs = [
        Job("seed", ("x",), target="slurm"),
        Job("expert 0", ("x",), needs=("seed",), target="slurm"),
        Job("expert 1", ("x",), needs=("seed",)),
        Job("router", ("x",)),
    ]
    monkeypatch.setattr(submit, "plan_jobs", lambda *_: jobs)
    answer = run("launch", write_campaign(tmp_path / "c"), "--dry-run")
    assert "expert 1: waits for seed, which trains elsewhere; launch again" in answer.out
    assert answer.out.count("$ sbatch") == 2 and answer.out.count("$ OMP_NUM_THREADS=1") == 1  # the router
    assert "# when expert 0, expert 1 are finished" in answer.out.replace("seed, ", "")


def test_the_data_set_is_made_by_jobs_where_they_are_asked_for(tmp_path: Path, run: Run) -> None:
    """Each is told what the launch was told; all runs come after the partition, which comes after them."""
    launch = {"data": {"workers": 2, "slurm": {"partition": "cpu"}}, "gpus": 4}
    folder = write_campaign(tmp_path / "c", {"launch": launch})
    campaign = Campaign.open(folder, ["seed=7", "launch.gpus=2"])
    *making, cut = data_jobs(campaign, "slurm")
    root = campaign.store.location
    steps = {"ingest": "ingest", "ingest end": "ingest", "columns": "prepare", "columns end": "prepare"}
    assert [(job.name, job.argv[1:]) for job in making] == [
        (name, ("-m", "atoll", "data", stage, root, "--set", "seed=7")) for name, stage in steps.items()
    ]
    assert [(job.count, job.after_any) for job in making] == 2 * [(2, False), (1, True)]
    assert [job.needs for job in (*making, cut)] == [(), *((name,) for name in steps)]
    assert {(job.gpus, job.processes, job.place.slurm.partition, job.saves) for job in making} == {
        (None, 1, "cpu", False)
    }
    assert cut.name == "partition" and not cut.after_any  # without a complete data set no run starts
    first, second, end, *_ = data_jobs(campaign, "sky")
    assert [(job.name, job.count, job.env) for job in (first, second, end)] == [
        ("ingest 1", 1, {"ATOLL_PART": "1/2"}),
        ("ingest 2", 1, {"ATOLL_PART": "2/2"}),
        ("ingest end", 1, {}),
    ]
    assert end.needs == ("ingest 1", "ingest 2") and end.after_any
    before = everything(tmp_path)
    answer = run("launch", folder, "--on", "slurm", "--dry-run")
    assert answer.code == 0 and everything(tmp_path) == before and "# first" not in answer.out
    needs = "--dependency=afterok:JOB_OF_partition"
    assert answer.out.count("--array=1-2") == answer.out.count("--dependency=afterany:JOB_OF_") == 2
    assert answer.out.count("#!/bin/bash") == 10 and answer.out.count(needs) == 4  # experts, router, monolith
    assert answer.out.count('ATOLL_PART="$SLURM_ARRAY_TASK_ID/$SLURM_ARRAY_TASK_COUNT"') == 2
    local = run("launch", folder, "--dry-run")
    assert local.code == 0 and "# first, on this machine" in local.out
    partitioned(folder, {"launch": launch})
    assert data_jobs(Campaign.open(folder), "slurm") == []


def test_what_can_never_run_is_refused_before_the_data_are_made(tmp_path: Path, run: Run) -> None:
    folder = write_campaign(tmp_path / "c")
    refused(run("launch", folder, "--set", "launch.gpus=64"), "asks for 64 GPUs", "launch.on")
    refused(run("launch", folder, "--set", "data.vae=nowhere"), "cannot load the VAE 'nowhere'")
    assert not (folder / "data").exists()


@pytest.mark.slow
def test_workers_of_this_machine_make_the_data_set(tmp_path: Path, run: Run) -> None:
    folder = write_campaign(tmp_path / "c")
    done = run("data", "prepare", folder, "--workers", "2")
    assert done.code == 0 and "2 runs finished" in done.out, done
    dataset = Campaign.open(folder).dataset()
    assert dataset.has_column("latents") and audit(dataset) == []
    answer = run("data", "encode", folder, "--workers", "2", "--set", "data.vae=nowhere")
    refused(answer, "cannot load the VAE 'nowhere'")


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        (["launch.islands.7.on=slurm"], ["launch.islands.7", "0 to 1"]),
        (["launch.island.0.on=slurm"], ["did you mean 'islands'"]),
        (["launch.on=cloud"], ["launch.on"]),
        (["launch.router.nodes=2"], ["router asks for 2 nodes"]),
        (["launch.on=slurm", "launch.islands.1.gpus=17"], ["expert 1 asks for 17 processes", "16 samples"]),
        (["launch.router.on=sky"], ["SkyPilot's nodes cannot see", "s3://"]),
        (["launch.on=slurm"], ["squeue is not installed here", "--dry-run"]),
    ],
)
def test_mistakes_are_one_line(
    sets: list[str], words: list[str], made: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(made))
    refused(run("launch", made, *(part for s in sets for part in ("--set", s))), *words)


def test_a_network_that_is_large_for_cpus_is_not_left_to_them_in_silence(tmp_path: Path, run: Run) -> None:
    large = {"network": {"family": "dit", "size": "S", "depth": None, "heads": None, "head_width": None}}
    launch = {"data": {"workers": 1}, "slurm": {"partition": "gpu"}, "sky": {"workdir": "."}}
    folder = write_campaign(tmp_path / "c", {**large, "launch": launch})

    def warned(*argv: str) -> list[str]:
        return [line for line in run("launch", folder, "--dry-run", *argv).out.splitlines() if "CPUs" in line]

    (slurm,) = warned("--on", "slurm")
    assert slurm.startswith(
        "warning: ingest (8 in all) would compute on CPUs: set launch.gpus and launch.data.gpus"
    )
    (data,) = warned("--on", "slurm", "--set", "launch.gpus=1")
    assert data.startswith("warning: ingest (4 in all)")
    assert warned("--on", "slurm", "--set", "launch.gpus=1", "--set", "launch.data.gpus=1") == []
    assert warned("--on", "slurm", "--set", "network.size=nano") == []
    (here,) = warned()  # the tests' machine shows no GPU
    assert "launch where a GPU is" in here


def test_text_states_that_fill_disks_are_told_before_they_are_made(tmp_path: Path, run: Run) -> None:
    text: dict[str, Any] = {"text_encoder": "google/t5-v1_1-xxl", "text_length": 120}
    settings = {"condition": "text", "network.family": "pixart", "budget.samples": "1020000"}
    settings |= {f"data.{name}": str(value) for name, value in text.items()}
    sets = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    states = "warning: text states may take up to 1 TB: encode in training, data.precompute_text=false"
    assert states in run("new", tmp_path / "c", "--recipe", "cpu", *sets).out
    rows = ("--set", "network.depth=1", "--set", "network.size=nano", "--rows")
    assert states in run("plan", tmp_path / "c", *rows, "1020000").out
    assert states not in run("plan", tmp_path / "c", *rows, "1010000").out
    assert states in run("launch", tmp_path / "c", "--dry-run").out
    for fewer in ("data.precompute_text=false", "budget.samples=1010000", "data.text_encoder=minilm"):
        said = run("new", tmp_path / fewer, "--recipe", "cpu", *sets, "--set", fewer)
        assert said.code == 0 and "text states" not in said.out


def test_launch_settings_may_change_after_the_start(made: Path) -> None:
    again = Campaign.open(made, ["launch.on=slurm"])
    assert again.config.launch.on == "slurm"
    assert "launch" not in again.store.get_json("campaign.json")["config"]
