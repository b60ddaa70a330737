"""What a sample brings depends on its position in the run, and on nothing else."""

import io
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from atoll.campaign.folder import Campaign
from atoll.campaign.initial import initial_network, initial_router
from atoll.campaign.runs import Recipe, RunPlan
from atoll.data.dataset import DataSet
from atoll.data.samples import Samples
from atoll.train.rows import Batch, TrainingRows
from atoll.train.tasks import DenoiserTask, RouterTask
from helpers import partitioned


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory) -> Campaign:
    return partitioned(tmp_path_factory.mktemp("draws") / "c")


def rows_of(campaign: Campaign, folder: str = "islands/0", **changes: object) -> TrainingRows:
    plan = RunPlan.read(campaign.store, f"{folder}/island.json").model_copy(update=changes)
    config, network = campaign.config, campaign.config.network.model_dump()
    recipe = Recipe(objective=config.objective, train=config.train, network=network, plan=plan)
    dataset = DataSet.open(campaign.store, f"{folder}/data")
    return TrainingRows.of(dataset, config.condition, recipe, clusters=folder == "router")


def batch(campaign: Campaign, positions: range, **plan: object) -> Batch:
    return rows_of(campaign, **plan).batch(positions)


def tensors(b: Batch) -> dict[str, torch.Tensor]:
    assert b.cond.labels is not None
    return {"x0": b.x0, "eps": b.eps, "t": b.t, "labels": b.cond.labels}


def test_samples_do_not_depend_on_their_batch(campaign: Campaign) -> None:
    whole = tensors(batch(campaign, range(5, 101)))
    for size in (1, 7, 32):
        cut = [tensors(batch(campaign, range(a, min(a + size, 101)))) for a in range(5, 101, size)]
        for name, values in whole.items():
            assert torch.equal(torch.cat([c[name] for c in cut]), values)


def test_another_seed_draws_everything_anew(campaign: Campaign) -> None:
    one, other = tensors(batch(campaign, range(64))), tensors(batch(campaign, range(64), seed=77))
    for name in ("x0", "eps", "t"):
        assert not torch.equal(one[name], other[name])
    assert float((one["eps"] == other["eps"]).float().mean()) < 0.01


def test_an_epoch_later_the_row_is_the_same_and_its_noise_is_not(campaign: Campaign) -> None:
    rows = len(rows_of(campaign).train)
    first, second = (tensors(batch(campaign, range(e * rows, (e + 1) * rows))) for e in range(2))
    assert first["x0"].flatten(1).sum() == pytest.approx(float(second["x0"].flatten(1).sum()), rel=1e-5)
    assert not torch.equal(first["x0"], second["x0"]) and not torch.equal(first["eps"], second["eps"])


def test_draws_have_the_distributions_they_should(campaign: Campaign) -> None:
    rows = rows_of(campaign)
    drawn = tensors(batch(campaign, range(4000)))
    t = drawn["t"].numpy()
    assert np.abs(np.histogram(t, 10, (0, 1))[0] / 4000 - 0.1).max() < 0.02
    null = rows.train.null.labels
    assert null is not None
    dropped = float((drawn["labels"] == null).float().mean())
    assert dropped == pytest.approx(rows.recipe.objective.condition_dropout, abs=0.02)
    assert float(drawn["eps"].mean()) == pytest.approx(0, abs=0.01)
    assert float(drawn["eps"].std()) == pytest.approx(1, abs=0.01)
    assert abs(np.corrcoef(t, drawn["eps"].flatten(1).mean(1))[0, 1]) < 0.05  # streams apart


def test_only_training_rows_are_trained_on(campaign: Campaign) -> None:
    rows = rows_of(campaign)
    seen = set(rows.train.rows[rows.order.at(range(3 * len(rows.train)))].tolist())
    assert seen == set(rows.train.dataset.split("train").tolist())
    assert seen.isdisjoint(rows.heldout.rows.tolist()) and len(rows.heldout) > 0


# The router.


def router_task(campaign: Campaign, pure_noise: float) -> RouterTask:
    rows = rows_of(campaign, "router")
    return RouterTask(initial_router(campaign, rows.recipe.plan.shape), replace(rows, pure_noise=pure_noise))


def test_clusters_are_those_of_the_rows(campaign: Campaign) -> None:
    task = router_task(campaign, 0.0)
    drawn = task.batch(range(len(task.rows.train)))
    made = campaign.store.get_json("partition/partition.json")
    assert drawn.clusters is not None
    assert torch.bincount(drawn.clusters).tolist() == made["sizes"]
    islands = [DataSet.open(campaign.store, f"islands/{k}/data") for k in range(2)]
    latents = [island.column("latents").read(range(len(island))).float() for island in islands]
    for x0, k in zip(drawn.x0, drawn.clusters.tolist(), strict=True):
        assert (latents[k] == x0).flatten(1).all(1).any()


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_a_share_of_the_samples_is_pure_noise(campaign: Campaign, share: float) -> None:
    """At exactly t = 1, where `once` asks: there only the condition can tell."""
    t = router_task(campaign, share).batch(range(2000)).t
    assert float((t == 1).float().mean()) == pytest.approx(share, abs=0.03)
    assert torch.equal(t[t != 1], router_task(campaign, 0.0).batch(range(2000)).t[t != 1])


def test_a_router_without_knowledge_is_at_the_entropy(campaign: Campaign) -> None:
    task = router_task(campaign, 0.25)
    loss, metrics = task.step(task.batch(range(64)))
    assert float(loss.detach()) == pytest.approx(np.log(2), abs=1e-6)
    with torch.inference_mode():
        found = task.validate()
    assert len(found["validation"]) == 9 and found["validation_loss"] == pytest.approx(np.log(2), abs=1e-6)
    assert 0 <= metrics["accuracy"] <= 1


# The denoiser.


def denoiser_task(campaign: Campaign) -> DenoiserTask:
    rows = rows_of(campaign)
    return DenoiserTask(initial_network(campaign.config.network, rows.recipe.plan.shape, 0), rows)


def test_the_loss_at_the_start_is_that_of_predicting_zero(campaign: Campaign) -> None:
    task = denoiser_task(campaign)
    drawn = task.batch(range(64))
    loss, _ = task.step(drawn)
    assert float(loss.detach()) == pytest.approx(float((drawn.eps - drawn.x0).square().mean()), rel=1e-6)


def test_validation_is_repeatable_and_on_heldout_rows(campaign: Campaign) -> None:
    task = denoiser_task(campaign)
    heldout = task.rows.heldout
    nothing = Samples(heldout.dataset, heldout.rows[:0], heldout.condition, heldout.shape)
    with torch.inference_mode():
        first, again = task.validate(), task.validate()
        task.rows = replace(task.rows, train=heldout, heldout=task.rows.train)
        other = task.validate()
        task.rows = replace(task.rows, heldout=nothing)
        assert task.validate() == {}
    assert first == again != other and len(first["validation"]) == len(first["times"]) == 8
    assert first["condition_gain"] is None  # it is of texts


def test_a_preview_is_a_picture(campaign: Campaign) -> None:
    task = denoiser_task(campaign)
    kinds = [type(module) for module in task.network.modules()]
    with Image.open(io.BytesIO(task.preview())) as picture:
        picture.load()
        assert picture.width > 6 * 60
    assert [type(module) for module in task.network.modules()] == kinds, "a preview changes no layer"
