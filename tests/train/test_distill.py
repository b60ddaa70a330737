"""The student: who teaches it what, and that its training is as exact as any."""

import json
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from atoll.base.condition import Condition
from atoll.base.errors import ConfigError, PartitionError, StoreError
from atoll.base.preemption import Interrupted
from atoll.campaign.assemble import assemble
from atoll.campaign.folder import Campaign
from atoll.campaign.measured import MeasuredPoint
from atoll.campaign.partition import make_islands
from atoll.campaign.runs import Recipe, RunPlan
from atoll.campaign.settings.train import StudentConfig, TrainConfig
from atoll.data.dataset import DataSet
from atoll.flow.settings import ObjectiveConfig, Prediction, shift_at
from atoll.measure.comparison import compare
from atoll.model.bank import Bank
from atoll.model.checkpoint import Checkpoint
from atoll.model.generation import Generation
from atoll.model.model import Model
from atoll.model.routing import Routing
from atoll.model.sampler import Row, Sampler, times
from atoll.networks.families import family, initialise
from atoll.store.store import Store
from atoll.train.distill import DistillTask, Teacher
from atoll.train.loop import train
from atoll.train.rows import Batch, TrainingRows
from atoll.train.run import train_run
from helpers import WEIGHTS, Run, assembled, command, metrics, partitioned, refused, same_bits, write_campaign
from helpers_networks import CLASSES, Logits, conditions, expert, noise, router
from keys import key_pair
from nursery import Nursery

STUDENT = {"stock": False, "step_share": 0.2}
FOUR = {"steps": 4, "guidance": 1.0, "shift": 1.0}
"""How a student of four steps is sampled, by its card."""


@dataclass
class Constant:
    """An expert whose velocity is a number everywhere."""

    value: float
    seen: list[Condition] = field(default_factory=list)

    def velocity(self, x_t: torch.Tensor, t: torch.Tensor, cond: Condition) -> torch.Tensor:
        self.seen.append(cond)
        return torch.full_like(x_t, self.value)


def teacher_of(
    experts: list[Any], router: Any = None, routing: str = "oracle", few: int | None = None, **how: Any
) -> Teacher:
    """A teacher of class labels, by the samples' own clusters unless it is told otherwise."""
    generation = Generation(routing=Routing.named(routing), **{"steps": 24, "guidance": 1.0, **how})
    return Teacher(Bank(experts, router), generation, Condition(labels=torch.tensor([2])), few)


def velocity(teacher: Teacher, batch: Batch) -> torch.Tensor:
    """What it teaches at the times of a batch."""
    return teacher.teach(batch)[2]


def drawn(t: torch.Tensor, clusters: torch.Tensor) -> Batch:
    """A batch of noise at these times."""
    count, places = len(t), tuple((3, n) for n in range(len(t)))
    x0, eps = noise(count, CLASSES, 1), noise(count, CLASSES)
    return Batch(x0, conditions(count, CLASSES), eps, t, clusters, places)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A campaign with a student to be trained; its experts and router are finished."""
    folder = tmp_path_factory.mktemp("made") / "campaign"
    campaign = partitioned(folder, {"student": STUDENT, "budget": {"samples": 640}})
    for island in range(2):
        train_run(campaign, "expert", island)
    train_run(campaign, "router")
    return folder


def task_of(
    folder: Path, teacher: Teacher, clusters: torch.Tensor | None = None, **changes: Any
) -> DistillTask:
    """The student's task on the data of a partitioned campaign."""
    campaign = Campaign.open(folder)
    plan = RunPlan.read(campaign.store, "student/island.json")
    plan = plan.model_copy(update={key: changes[key] for key in ("steps", "batch") if key in changes})
    dataset, shape = DataSet.open(campaign.store, "student/data"), plan.shape
    settings = campaign.config.network
    network = family(settings.family).build(settings, shape)
    initialise(network, 0)
    recipe = Recipe(
        objective=ObjectiveConfig(condition_dropout=changes.get("dropout", 0.0)),
        train=changes.get("train", campaign.config.train),
        network=settings.model_dump(),
        plan=plan,
    )
    rows = TrainingRows.of(dataset, "class", recipe, clusters=True)
    if clusters is not None:
        rows = replace(rows, clusters=clusters)
    student = {key: changes[key] for key in ("data_weight", "reuse") if key in changes}
    return DistillTask(network, rows, teacher, StudentConfig(**student))


# The teacher.


def test_the_teacher_of_a_row_is_the_expert_of_its_cluster(made: Path) -> None:
    """`test_draws.py` holds clusters against the islands' own data sets."""
    task = task_of(made, teacher_of([Constant(0.0), Constant(1.0)]))
    batch = task.batch(range(60))
    assert batch.clusters is not None and set(batch.clusters.tolist()) == {0, 1}
    v = velocity(task.teacher, batch)
    assert torch.equal(v, batch.clusters.float()[:, None, None, None].expand_as(v))


def test_a_teacher_sees_the_condition_that_the_student_sees(made: Path) -> None:
    one, two = Constant(0.0), Constant(1.0)
    task = task_of(made, teacher_of([one, two]), dropout=0.5)
    batch = task.batch(range(40))
    assert batch.cond.labels is not None and batch.clusters is not None
    assert 8 < int((batch.cond.labels == 2).sum()) < 32
    task.step(batch)
    for number, expert_ in enumerate((one, two)):
        (seen,) = expert_.seen  # each runs once
        assert seen.labels is not None
        assert torch.equal(seen.labels, batch.cond.labels[batch.clusters == number])


def test_the_loss_is_that_against_the_teacher_mixed_with_that_against_the_data(made: Path) -> None:
    """The drawn network gives 0 everywhere, so both losses are known."""
    losses = []
    for weight in (0.0, 0.25):
        task = task_of(made, teacher_of([Constant(1.0), Constant(3.0)]), data_weight=weight)
        batch = task.batch(range(30))
        assert batch.clusters is not None
        losses.append(task.step(batch)[0].detach())
    teacher = (1.0 + 8.0 * batch.clusters).mean()
    data = (batch.eps - batch.x0).square().mean()
    assert torch.allclose(losses[0], teacher)
    assert torch.allclose(losses[1], 0.75 * teacher + 0.25 * data)


def test_steps_that_share_an_answer_ask_once_and_again_after_a_resume(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("atoll.campaign.settings.train.ANSWERS", 16)
    asked, teach = list[Any](), Teacher.teach
    monkeypatch.setattr(Teacher, "teach", lambda *args: asked.append(args[1].positions) or teach(*args))
    teacher = teacher_of([Checkpoint(Store.open(made), f"islands/{k}/expert").expert() for k in (0, 1)])

    def losses(steps: range) -> list[list[float]]:
        task = task_of(made, teacher, batch=3, steps=56, reuse=3)
        parts = [(range(3 * n, 3 * n + 1), range(3 * n + 1, 3 * n + 3)) for n in steps]
        return [[float(task.step(task.batch(part))[0].detach()) for part in both] for both in parts]

    whole = losses(range(56))
    assert len(asked) == len(set(asked)) == 2 * (10 + 10)  # two rounds of ten batches, in two parts each
    assert whole[:10] == whole[10:20] == whole[20:30] and whole[30:40] == whole[40:50] != whole[:10]
    assert whole[50:] == whole[40:46] and len({loss for pair in whole for loss in pair}) == len(asked)
    assert losses(range(18, 33)) == whole[18:33]


@pytest.mark.parametrize("prediction", ["v", "eps", "x0"])
def test_experts_of_any_prediction_teach_their_velocity(prediction: Prediction) -> None:
    experts = [expert(n, CLASSES, prediction, "vp-cosine") for n in range(2)]
    batch = drawn(torch.linspace(0.1, 0.9, 5), torch.tensor([0, 1, 1, 0, 1]))
    x_t, t, v = teacher_of(experts).teach(batch)
    assert batch.clusters is not None
    for row, number in enumerate(batch.clusters.tolist()):
        part = slice(row, row + 1)
        alone = experts[number].velocity(x_t[part], t[part], batch.cond.select(part))
        assert torch.allclose(v[part], alone, atol=1e-5)


def test_a_routed_teacher_is_the_ensemble_as_it_is_sampled() -> None:
    experts: list[Any] = [expert(n, CLASSES) for n in range(3)]
    asked = Logits(router(7, 3, CLASSES))
    ensemble = Bank(experts, asked)
    nobody = torch.zeros(6, dtype=torch.long)
    batch = drawn(torch.linspace(0.1, 1.0, 6), nobody)

    def taught_by(name: str) -> torch.Tensor:
        return velocity(teacher_of(experts, asked, name), batch)

    def own(clusters: torch.Tensor) -> torch.Tensor:
        return velocity(teacher_of(experts), replace(batch, clusters=clusters))

    x_t, t, v = teacher_of(experts, asked, "full").teach(batch)
    assert torch.allclose(v, ensemble.velocity(x_t, t, batch.cond), atol=1e-6)
    likeliest = asked.logits(x_t, t, batch.cond).argmax(1)
    assert torch.equal(taught_by("top-1"), own(likeliest))
    assert len(set(likeliest.tolist())) > 1
    each, once = torch.stack([own(nobody + k) for k in range(3)]), taught_by("once")
    assert ((each - once).abs().flatten(2).amax(2) < 1e-5).any(0).all()  # one expert for every sample


@pytest.mark.parametrize("routing", ["top-1", "once null sample-1", "full"])
def test_a_student_of_few_steps_learns_where_the_sampler_of_many_leads(routing: str) -> None:
    """A network that gave what is taught would draw the teacher's picture: from noise, step by step."""
    experts: list[Any] = [expert(n, CLASSES) for n in range(3)]
    how: dict[str, Any] = {"steps": 12, "guidance": 2.5, "shift": 2.0}
    teacher = teacher_of(experts, Logits(router(7, 3, CLASSES)), routing, few=4, **how)
    batch = drawn(torch.full((6,), 0.99), torch.zeros(6, dtype=torch.long))
    rows = [Row(teacher.generation, place) for place in batch.positions]
    sampler = Sampler(teacher.bank, batch.cond, teacher.null, rows, batch.eps)
    x, grid = batch.eps, times(4, 2.0)
    for number in range(4):
        # Data and noise that are alike meet in the same state at every time.
        at = replace(batch, t=torch.full((6,), 0.99 - number / 4), x0=x, eps=x)
        before, after = grid[number], grid[number + 1]
        x_t, t, v = teacher.teach(at)
        assert torch.allclose(x_t, x, atol=1e-5) and torch.allclose(t, torch.full((6,), before))
        if number and routing.startswith("once"):
            return  # it draws once for each state, and a sampler once for each picture
        x = x + (after - before) * v
        for _ in range(3):
            sampler.advance()
        assert torch.allclose(x, sampler.x, atol=1e-4)


# Training.


@pytest.mark.slow
def test_with_exact_teachers_the_loss_falls_to_nothing(made: Path, tmp_path: Path) -> None:
    """Clusters are classes here, so the condition tells all: the student can be as good as its teachers."""
    dataset = DataSet.open(Store.open(made), "student/data")
    task = task_of(
        made,
        teacher_of([Constant(-0.7), Constant(0.4)]),
        dataset.labels,
        steps=600,
        batch=16,
        train=TrainConfig(lr=3e-3, lr_schedule="cosine", log_every=1, validations=1, previews=0),
    )
    train(task, Store.open(tmp_path / "run", create=True), "student")
    lines = metrics(tmp_path / "run")
    losses = [line["loss"] for line in lines if "loss" in line]
    assert losses[0] == pytest.approx(0.33, abs=0.1) and max(losses[-20:]) < 1e-3
    checked = next(line for line in lines if "teacher_loss" in line)
    assert checked["teacher_loss"] < 0.02  # of the averaged weights
    assert checked["validation_loss"] > 0.5  # the data are nothing like that


def replace_expert(folder: Path, number: int, by: int) -> None:
    """Publish one expert's weights as another one's."""
    target = folder / f"islands/{number}/expert"
    shutil.rmtree(target)
    shutil.copytree(folder / f"islands/{by}/expert", target)
    card = json.loads((target / "card.json").read_text())
    (target / "card.json").write_text(json.dumps({**card, "island": number}))


def start_anew(folder: Path, student: dict[str, Any]) -> Path:
    """The same campaign with another student."""
    shutil.rmtree(folder / "student", ignore_errors=True)
    write_campaign(folder, {"student": {**STUDENT, **student}})
    make_islands(Campaign.open(folder))
    return folder


def test_a_student_that_starts_as_its_teacher_has_nothing_to_learn(copy: Path, tmp_path: Path) -> None:
    replace_expert(copy, 1, by=0)
    for name in ("expert:1", "average"):
        folder = Path(shutil.copytree(copy, tmp_path / name[:6]))
        start_anew(folder, {"start": name, "train": {"log_every": 1}})
        train_run(Campaign.open(folder), "student")
        losses = [line["loss"] for line in metrics(folder / "student") if "loss" in line]
        assert losses[0] < 1e-12  # the teacher runs in other batches, so the last bits differ
        card = Checkpoint(Store.open(folder), "student/expert").card
        assert card.provenance["init"]["kind"] == "experts"
        assert card.provenance["init"]["start"] == name.partition(":")[0]


def test_the_average_is_that_of_the_weights(copy: Path) -> None:
    start_anew(copy, {"start": "average"})
    train_run(Campaign.open(copy), "student")
    laid = load_file(copy / "student/init/diffusion_pytorch_model.safetensors")
    parts = [load_file(copy / f"islands/{k}" / WEIGHTS) for k in range(2)]
    for name, value in laid.items():
        assert torch.allclose(value, (parts[0][name] + parts[1][name]) / 2, atol=1e-7)
        assert value.dtype == torch.float32
    (copy / "student/expert/card.json").unlink()
    replace_expert(copy, 1, by=0)
    with pytest.raises(PartitionError, match="another choice of experts"):
        train_run(Campaign.open(copy), "student")


def test_where_teachers_lie_changes_no_bit(copy: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(copy, tmp_path / "other"))
    train_run(Campaign.open(copy), "student")
    one_place = ["student.residency.experts=1", "student.residency.prefetch=false"]
    train_run(Campaign.open(other, one_place), "student")
    assert same_bits(copy / "student", other / "student")


def test_a_student_that_left_and_was_killed_goes_on_to_the_same_bits(
    copy: Path, tmp_path: Path, told_to_leave: Callable[[int], None], capsys: pytest.CaptureFixture[str]
) -> None:
    train = {"log_every": 1, "checkpoint_every_s": 0.0}
    few = {"steps": 4, "teacher_steps": 8, "guidance": 2.0, "routing": "once null sample-1"}
    start_anew(copy, {"teacher": "routed", **few, "step_share": 0.5, "train": train})
    reference = Path(shutil.copytree(copy, tmp_path / "reference"))
    train_run(Campaign.open(reference), "student")
    told_to_leave(7)
    with pytest.raises(Interrupted, match="left at step 7 of"):
        train_run(Campaign.open(copy), "student")
    other = Path(shutil.copytree(copy, tmp_path / "other"))
    with Nursery(tmp_path / "said") as processes:  # killed while it saves its next state
        child = processes.start("train", "student", copy, faults={"die": [r".*/COMMIT\.json", "torn"]})
        assert child.wait() == -signal.SIGKILL and "resumed at step 7 of" in child.said(), child.said()
    train_run(Campaign.open(copy), "student")
    assert "resumed at step 7 of" in capsys.readouterr().out
    assert same_bits(copy / "student", reference / "student")
    assert metrics(copy / "student") == metrics(reference / "student")
    assert Checkpoint(Store.open(copy), "student/expert").card.sampling == FOUR
    # Under other teachers it does not go on.
    replace_expert(other, 1, by=0)
    with pytest.raises(ConfigError, match="was made with other settings"):
        train_run(Campaign.open(other), "student")


def test_previews_and_validations_are_at_the_times_of_few_steps(tmp_path: Path) -> None:
    student = {"steps": 2, "teacher_steps": 4, "stock": False, "train": {"previews": 1}}
    changes = {"budget": {"samples": 64}, "monolith": False, "objective": {"time": {"shift": "tokens"}}}
    assembled(tmp_path / "c", {**changes, "student": student})
    train_run(Campaign.open(tmp_path / "c"), "student")
    assert [*(tmp_path / "c/student/run/previews").glob("*.png")]
    validated = [line["times"] for line in metrics(tmp_path / "c/student") if "validation_loss" in line]
    assert validated
    assert {tuple(at) for at in validated} == {times(2, shift_at("tokens", 8 * 8 / 4))[-2::-1]}


def test_the_card_tells_the_teachers_which_have_to_stay(copy: Path, run: Run) -> None:
    train_run(Campaign.open(copy), "student")
    store = Store.open(copy)
    card = Checkpoint(store, "student/expert").card
    cards = [Checkpoint(store, f"islands/{k}/expert").card for k in (0, 1)]
    told = card.provenance["student"]
    assert card.role == "student" and (card.prediction, card.schedule) == ("v", "rectified-flow")
    assert told["teachers"] == {f"islands/{k}": cards[k].weights_sha256 for k in (0, 1)}
    assert told["teacher"] == "cluster"
    student = Checkpoint(store, "student/expert").expert()
    labels = Condition(labels=torch.tensor([0, 1]))
    v = student.velocity(torch.zeros(2, 1, 8, 8), torch.tensor([0.2, 0.8]), labels)
    assert v.isfinite().all() and v.abs().max() > 0
    sample = "sample", copy, "1", "--model", "student", "--out", copy / "a.png"
    refused(run(*sample, "--set", "quarantine=[1]"), "learned from expert 1, in quarantine or replaced")
    replace_expert(copy, 0, by=1)
    export = "export", copy, "--model", "student", "--to", copy.parent / "out"
    for words in (sample, export, ("train", "student", copy)):
        refused(run(*words), "learned from expert 0, in quarantine or replaced since", "remove student/run")


@pytest.mark.slow
def test_a_student_of_few_steps_draws_by_its_own(
    copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In commands, the model and what is measured, until a call asks for something else."""
    train_run(Campaign.open(copy), "student")
    path = copy / "student/expert/card.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "sampling": FOUR}))
    model, store = Model.load(Store.open(copy), "student", generation=Generation(steps=25)), Store.open(copy)
    assert (model.generation.steps, model.generation.guidance) == (4, 1.0)
    assert model(["1"], steps=2).generation.steps == 2
    answer = command(capsys, "sample", copy, "1", "--model", "student", "--out", tmp_path / "four.png")
    assert answer.code == 0 and "4 steps, guidance 1" in answer.out, answer
    options = ["--model", "student", "--steps", "2", "--set", "sampling.steps=9"]
    answer = command(capsys, "sample", copy, "1", *options, "--out", tmp_path / "two.png")
    assert answer.code == 0 and "2 steps, guidance 1" in answer.out, answer
    assemble(Campaign.open(copy))
    capsys.readouterr()
    sets = ["compare.strategies=[top-1]", "compare.guidances=[1.0]", "compare.sweep=[top-1]"]
    assert {row.model for row in compare(Campaign.open(copy, sets)).tables.guidance} == {"top-1"}
    (told,) = [line for line in capsys.readouterr().out.splitlines() if "as it was trained" in line]
    assert "steps 4" in told and "guidance 1" in told
    points = [MeasuredPoint.read(store, key) for key in store.list("reports/points") if key.endswith(".json")]
    steps = {point.subject["name"]: point.protocol.steps for point in points if point.protocol.steps}
    assert steps == {"student": 4, "ensemble": 2}


@pytest.mark.parametrize("sampling", [{"steps": 0}, {"seed": 3}, {"steps": "many"}])
def test_a_card_of_steps_that_cannot_be_is_refused(copy: Path, sampling: dict[str, Any]) -> None:
    path = copy / "islands/0/expert/card.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "sampling": sampling}))
    with pytest.raises(StoreError, match="sampling"):
        _ = Checkpoint(Store.open(copy), "islands/0/expert").card


# Mistakes.


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"teacher": "majority"}, ("student.teacher", "'cluster' or 'routed'")),
        ({"start": "averag"}, ("unknown 'averag'", "average")),
        ({"start": "expert:2"}, ("no expert 2", "expert:0 to expert:1")),
        ({"routing": "oracle"}, ("oracle", "teacher: cluster")),
        ({"routing": "top-1 every 2"}, ("every",)),
        ({"teacher": "routed", "routing": "top-4"}, ("'top-4' with 2 experts", "at most 2")),
        ({"routing": "once null sample-1"}, ("the teacher is not guided",)),
        ({"steps": 0}, ("student.steps", "greater than or equal to 1")),
        ({"reuse": 0}, ("student.reuse", "greater than or equal to 1")),
        ({"steps": 32}, ("32 steps of a teacher that takes 24", "teacher_steps to a multiple, such as 32")),
        ({"steps": 5}, ("5 steps of a teacher that takes 24", "such as 25")),
        ({"steps": 4, "data_weight": 0.5}, ("student.data_weight",)),
        ({"residency": {"dtype": "int8"}}, ("student.residency.dtype", "student.residency.experts")),
        ({"batch_share": 0.05}, ("0.05 of train.batch, 16, is less than one",)),
        ({"train": {"batch": 4}}, ("student.batch_share",)),
        ({"start": "average", "network": {"depth": 2}}, ("needs equal networks", "expert 0")),
    ],
)
def test_wrong_settings_are_one_line(
    settings: dict[str, Any], words: tuple[str, ...], tmp_path: Path, run: Run
) -> None:
    refused(run("plan", write_campaign(tmp_path / "c", {"student": {"stock": False, **settings}})), *words)


def test_teachers_that_are_missing_misplaced_or_left_out_are_named(copy: Path, run: Run) -> None:
    start_anew(copy, {"teacher": "routed"})
    train = "train", "student", copy
    refused(run(*train, "--set", "quarantine=[1]"), "in quarantine: 1", "train them anew")
    refused(run(*train, "--set", f"trusted=[{key_pair(copy / 'key')[1]}]"), "expert is unsigned")
    (copy / "router/expert/card.json").unlink()
    refused(run(*train), "no router yet")
    shutil.rmtree(copy / "islands/1/expert")
    refused(run(*train), "not published: 1", "atoll launch")
    shutil.copytree(copy / "islands/0/expert", copy / "islands/1/expert")
    refused(run(*train), "islands/1 holds expert 0")
