"""Islands that differ, other objectives in one ensemble, and stale columns."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from atoll.base.errors import PartitionError
from atoll.base.processes import ProcessGroup
from atoll.campaign.assemble import assemble
from atoll.campaign.folder import Campaign
from atoll.campaign.prepare import prepare
from atoll.campaign.sample import sample_campaign
from atoll.model.checkpoint import Checkpoint
from atoll.model.model import Model
from atoll.networks.families import Family, parameter_count
from atoll.train import loop, state, tasks
from atoll.train.rows import Batch
from atoll.train.run import train_run
from atoll.train.tasks import DenoiserTask
from helpers import entries, partitioned, write_campaign
from helpers_networks import random_weights


@pytest.mark.slow
def test_islands_of_another_size_and_objective(tmp_path: Path) -> None:
    changes = {
        "objective": {"prediction": "x0", "schedule": "ddpm-linear"},
        "islands": {1: {"network": {"depth": 2}, "train": {"batch": 8, "lr": 1e-4}}},
        "budget": {"samples": 320},
        "monolith": False,
    }
    campaign = partitioned(tmp_path / "c", changes)
    for run in (("expert", 0), ("expert", 1), ("router",)):
        train_run(campaign, *run)  # type: ignore[arg-type]
    cards = [Checkpoint(campaign.store, f"islands/{k}/expert").card for k in range(2)]
    assert [card.batch for card in cards] == [16, 8]
    assert cards[1].provenance["peak_lr"] == 1e-4
    assert (cards[1].prediction, cards[1].schedule) == ("x0", "ddpm-linear")
    assert cards[1].parameters > 1.3 * cards[0].parameters
    assemble(campaign)
    ensemble = Model.load(campaign.store).bank
    assert [parameter_count(e.network) for e in ensemble.experts] == [c.parameters for c in cards]  # type: ignore[union-attr]
    own = Campaign.open(tmp_path / "c", ["sampling.routing=full", "sampling.steps=4"])
    sample_campaign(own, ("0", "1"), [tmp_path / "a.png"])
    assert (tmp_path / "a.png").stat().st_size > 500


def test_a_loss_in_velocity_weighs_every_sample_by_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def look(self: DenoiserTask, batch: Batch) -> None:
        seen.append((self._losses(batch).detach(), batch.t))
        raise KeyboardInterrupt

    monkeypatch.setattr(DenoiserTask, "step", look)
    for loss in ("prediction", "velocity"):
        campaign = partitioned(tmp_path / loss, {"objective": {"prediction": "x0", "loss": loss}})
        with pytest.raises(KeyboardInterrupt):
            train_run(campaign, "monolith")
    (plain, t), (weighted, same) = seen
    assert torch.equal(t, same) and len(t.unique()) > 1
    torch.testing.assert_close(weighted, plain / t.square().clamp(min=1 / 400))


def test_a_column_of_another_encoder_is_made_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A first try that failed left columns behind; settings that changed since must count."""
    text = {"condition": "text", "network": {"family": "pixart"}, "data": {"text_length": 4}}
    folder = write_campaign(tmp_path / "c", {**text, "partition": {"k": 500}})
    with pytest.raises(PartitionError, match="K = 500"):
        prepare(Campaign.open(folder))
    assert Campaign.open(folder).dataset().column("text").meta.max_length <= 4
    assert re.search(r"training sees 4 tokens of \d+ longer captions", capsys.readouterr().out)
    write_campaign(folder, {**text, "data": {"text_length": 600}})
    prepare(Campaign.open(folder))
    column = Campaign.open(folder).dataset().column("text")
    assert column.meta.producer["max_length"] == 512 and column.meta.max_length > 4  # as many as it takes


def test_captions_that_are_ignored_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By a network that begins with zeros and learns nothing, and not by one with weights."""
    changes = {"condition": "text", "network": {"family": "pixart"}, "train": {"lr": 1e-12, "validations": 1}}
    campaign, real = partitioned(tmp_path / "c", changes), DenoiserTask.validate
    train_run(campaign, "monolith")
    monkeypatch.setattr(DenoiserTask, "validate", lambda task: random_weights(task.network, 0) and real(task))
    train_run(campaign, "expert", 0)
    assert set(re.findall(r"warning: (.+) ignores its captions", capsys.readouterr().out)) == {"monolith"}


def test_experts_start_alike_and_see_their_own_draws(tmp_path: Path) -> None:
    campaign = partitioned(tmp_path / "c")
    plans = [campaign.store.get_json(f"islands/{k}/island.json") for k in range(2)]
    monolith = campaign.store.get_json("monolith/island.json")
    assert plans[0]["init_sha256"] == plans[1]["init_sha256"] == monolith["init_sha256"]
    assert len({p["seed"] for p in (*plans, monolith)}) == 3
    assert plans[0]["partition"] == plans[1]["partition"] == monolith["partition"]


def test_a_partition_is_repeatable(tmp_path: Path) -> None:
    one, other = (partitioned(tmp_path / name) for name in "ab")
    hashes = [c.store.get_json("partition/partition.json")["hash"] for c in (one, other)]
    assert hashes[0] == hashes[1]
    third = partitioned(tmp_path / "c", {"seed": 8})
    assert third.store.get_json("partition/partition.json")["hash"] != hashes[0]
    files = [p.relative_to(tmp_path / "a") for p in (tmp_path / "a/islands").rglob("*") if p.is_file()]
    assert len(files) > 8
    assert all((tmp_path / "a" / f).read_bytes() == (tmp_path / "b" / f).read_bytes() for f in files)


def test_writes_are_waited_for_where_the_other_ranks_hear_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write of many gigabytes may take longer than a collective that the others would wait in."""
    inside, waited = [False], list[bool]()
    each, told = ProcessGroup.each, state._told

    def watched(group: ProcessGroup, do: Callable[[], Any]) -> Any:
        inside[0] = True
        try:
            return each(group, do)
        finally:
            inside[0] = False

    def waits(do: Callable[[], Any], fatal: bool) -> Any:
        assert inside[0] or getattr(do, "__name__", "") == "settle"  # when it ends, without other ranks
        waited.append(fatal)
        return told(do, fatal)

    monkeypatch.setattr(ProcessGroup, "each", watched)
    monkeypatch.setattr(state, "_told", waits)
    train_run(partitioned(tmp_path / "c", {"train": {"checkpoint_every_s": 0.0}}), "expert", 0)
    assert waited.count(True) == 2 and waited.count(False) >= 2


def test_checkpoints_are_as_far_apart_as_their_writes_are_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the first one took puts off all but the last, and the one that was due meanwhile."""
    monkeypatch.setattr(loop, "WRITES_APART", 1e9)
    folder = tmp_path / "c"
    train_run(partitioned(folder, {"train": {"checkpoint_every_s": 1e-9, "previews": 0}}), "expert", 0)
    commits = [entry["step"] for entry in entries(folder / "islands/0") if entry["kind"] == "commit"]
    assert commits[0] == 0 and commits[-1] == 17 and len(commits) <= 3


def test_micro_batches_bound_validation_and_preview(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that has room for two samples has none for all held-out rows; and it decodes what it drew."""
    predict, rows, devices = Family.predict, list[int](), list[str]()

    def counted(self: Family, network: Any, x: torch.Tensor, *given: Any) -> torch.Tensor:
        rows.append(len(x))
        return predict(self, network, x, *given)

    monkeypatch.setattr(Family, "predict", counted)
    monkeypatch.setattr(tasks, "autoencoder_of", lambda made, device: devices.append(device))
    train_run(partitioned(tmp_path / "c", {"train": {"parallel": {"micro_batch": 2}}}), "expert", 0)
    assert max(rows) == 4 and rows.count(4) == 6 * 12 and devices == ["cpu"]  # two images, guided
