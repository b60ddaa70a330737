"""The student as a stage: planned, launched after the experts, seen by status, sampled and compared."""

import json
import shutil
from pathlib import Path

import pytest

from atoll.campaign.folder import Campaign
from atoll.campaign.runs import RunPlan
from atoll.campaign.status import Observer
from atoll.launch.submit import plan_jobs
from atoll.store.store import Store
from helpers import Run, merged, partitioned, refused, write_campaign

CHANGES = {"student": {"stock": False, "reuse": 2, "train": {"validations": 1}}}


def test_the_student_waits_for_what_it_learns_from(copy: Path) -> None:
    jobs = {one.name: one for one in plan_jobs(Campaign.open(copy))}
    assert list(jobs) == ["expert 0", "expert 1", "router", "monolith", "student"]
    assert jobs["student"].needs == ("expert 0", "expert 1")
    assert jobs["student"].argv[-3:] == ("train", "student", str(copy))
    parameters = RunPlan.read(Store.open(copy), "student/island.json").parameters
    more = jobs["student"].memory - jobs["monolith"].memory  # teachers, and answers of 20 of its 40 steps
    assert more == 4 * (2 * parameters + 20 * 4 * 8 * 8)
    (copy / "islands/0/expert").mkdir()
    (copy / "islands/0/expert/card.json").write_text("{}")
    jobs = {one.name: one for one in plan_jobs(Campaign.open(copy))}
    assert jobs["student"].needs == ("expert 1",)


def test_a_routed_student_waits_for_the_router_too(tmp_path: Path) -> None:
    campaign = partitioned(tmp_path / "c", {"student": {"stock": False, "teacher": "routed"}})
    jobs = {one.name: one for one in plan_jobs(campaign, "slurm")}
    assert jobs["student"].needs == ("expert 0", "expert 1", "router")
    assert "student" not in jobs["assemble"].needs  # the ensemble does without


def test_status_and_plan_show_it(copy: Path, run: Run) -> None:
    (student,) = [run for run in Observer(Campaign.open(copy)).read().runs if run.role == "student"]
    assert student.state == "waiting" and student.steps == 40 and student.batch == 4
    plan = json.loads(run("plan", copy, "--json").out)
    monolith = plan["monolith"]["train_flops"]
    assert plan["student"]["train_flops"] / monolith == pytest.approx(0.295, abs=0.005)
    assert plan["student"]["memory"]["beside"] == 2 * 4 * plan["student"]["parameters"]
    assert plan["total"]["train_flops"] == pytest.approx(monolith, rel=0.1)
    text = run("plan", copy).out
    assert "student, after them" in text and "the monolith and the student too" in text
    assert max(map(len, text.splitlines())) <= 100
    small = run("plan", copy, "--set", "student.residency.experts=1", "--json")
    assert json.loads(small.out)["student"]["memory"]["beside"] == 2 * 4 * plan["student"]["parameters"]
    kept = ["--set", "student.residency.experts=1", "--set", "student.residency.prefetch=false"]
    alone = json.loads(run("plan", copy, *kept, "--json").out)
    assert alone["student"]["memory"]["beside"] == 4 * plan["student"]["parameters"]


def test_a_student_is_added_to_a_campaign_that_began_without_one(tmp_path: Path, run: Run) -> None:
    folder = tmp_path / "c"
    before = partitioned(folder)
    refused(run("train", "student", folder), "has no student", "student: {}")
    frozen = (folder / "campaign.json").read_bytes()
    answer = run("partition", folder, "--set", "student={stock: false, step_share: 0.5}")
    assert answer.code == 0 and "student: 20 steps of 4" in answer.out, answer
    assert (folder / "campaign.json").read_bytes() == frozen
    campaign = Campaign.open(folder)  # which knows it now, without being told again
    assert campaign.config.student is not None and campaign.config.student.step_share == 0.5
    made, monolith = (RunPlan.read(before.store, f"{role}/island.json") for role in ("student", "monolith"))
    assert (made.rows, made.shape) == (monolith.rows, monolith.shape)
    files = [before.store.get_json(f"{role}/data/manifest.json") for role in ("student", "monolith")]
    assert files[0]["shards"] == files[1]["shards"]
    refused(run("train", "student", folder), "these are not published: 0, 1")
    for setting in ("student.step_share=0.25", "student.train.lr=0.5"):
        refused(run("train", "student", folder, "--set", setting), setting[:-5], "started with", "student/")


def test_what_was_set_of_a_student_goes_with_its_folder(tmp_path: Path) -> None:
    folder = write_campaign(tmp_path / "c", {"student": {"stock": False}})
    campaign = Campaign.open(folder, ["student.guidance=2", "seed=4"])
    campaign.freeze()
    campaign.freeze_student()
    assert Campaign.open(folder).overrides == ("seed=4", "student.guidance=2")
    shutil.rmtree(folder / "student")
    assert Campaign.open(write_campaign(folder)).config.student is None


@pytest.mark.slow
def test_the_whole_way_with_a_student(tmp_path: Path, run: Run) -> None:
    """Launched, sampled, compared, reported."""
    changes = merged(CHANGES, {"compare": {"strategies": ["top-1"], "samples": 12}})
    folder = write_campaign(tmp_path / "c", changes)
    answer = run("launch", folder)
    assert answer.code == 0 and (folder / "student/expert/card.json").exists(), answer
    out = tmp_path / "student.png"
    refused(run("sample", folder, "5", "--model", "student", "--out", out), "no class label")
    answer = run("sample", folder, "1", "--model", "student", "--out", out)
    assert answer.code == 0 and answer.out.rstrip().endswith("student") and out.exists(), answer
    assert run("compare", folder).code == 0
    found = json.loads((folder / "reports/compare.json").read_text())
    assert [row["name"] for row in found["rows"]] == ["monolith", "student", "top-1"]
    monolith, student = found["train_flops"]["monolith"], found["train_flops"]["student"]
    assert student / monolith == pytest.approx(0.295, abs=0.005)
    card = json.loads((folder / "student/expert/card.json").read_text())
    assert found["parts"]["student"] == card["weights_sha256"]
    assert found["rows"][1]["gflops_per_step"] == pytest.approx(card["forward_flops"] / 1e9)
    assert (folder / "reports/compare/student/00.png").exists()
    assert run("compare", folder).out.startswith("compare: finished already")
    assert run("report", folder).code == 0
    status = Observer(Campaign.open(folder)).read()
    assert status.finished and len(status.runs) == 5
