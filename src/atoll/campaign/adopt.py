"""A published checkpoint as the expert of an island, as it is: not trained here, but converted exactly."""

import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from atoll.base.condition import Condition
from atoll.base.console import say
from atoll.base.errors import ConfigError, PartitionError
from atoll.base.version import code_version
from atoll.campaign.folder import Campaign
from atoll.campaign.publication import announce, settle
from atoll.campaign.runs import Run, RunPlan
from atoll.data.dataset import DataSet
from atoll.flow.published import trained_on
from atoll.flow.schedule import schedule, schedule_name
from atoll.flow.settings import Prediction
from atoll.model.card import Card, check_producers
from atoll.model.checkpoint import Checkpoint
from atoll.model.stored import fill_network
from atoll.networks.diffusers_checkpoint import DiffusersCheckpoint, find, whole
from atoll.networks.families import Family, family, parameter_count
from atoll.networks.flops import count
from atoll.networks.settings import DataShape
from atoll.store.lease import LeaseConfig, acquire, new_holder
from atoll.store.log import Log
from atoll.store.store import Store


@dataclass(frozen=True)
class Adoption:
    """What is adopted.

    Attributes:
        checkpoint: folder, relative to the current one, or hub name.
        island: number of the cluster whose expert it becomes.
        prediction: what it predicts; None for what its `scheduler_config.json` says.
        schedule: noise schedule that it was trained on; None likewise.
    """

    checkpoint: str
    island: int
    prediction: Prediction | None = None
    schedule: str | None = None


def adopt(campaign: Campaign, wanted: Adoption) -> Card:
    """Publish a checkpoint as the expert of an island.

    Its bits stay as they are, in float32. What it once cost is not known, so its card says 0 samples and
    operations.

    Raises:
        ConfigError: no such checkpoint, or one that does not fit the campaign's data.
        PartitionError: no such island, or one that has an expert or has begun to train one.
        Held: the island is being trained.
    """
    store, plan = _island(campaign, wanted.island)
    checkpoint = find(wanted.checkpoint, Path())
    adapter = _family(checkpoint, campaign.config.condition)
    prediction, curve = _objective(checkpoint, wanted)
    shape = plan.shape
    latents, text = DataSet.open(store, "data").producers(campaign.config.data.text_column)
    check_producers(latents, text)
    _check_shape(checkpoint, adapter, shape)
    _check_vae(checkpoint, latents)
    flops = _forward(checkpoint, adapter, shape)
    network = _built(checkpoint, adapter)
    weights = whole(network, checkpoint)
    card = Card(
        role="expert",
        island=wanted.island,
        family=adapter.name,
        prediction=prediction,
        schedule=curve,
        condition=campaign.config.condition,
        partition=plan.partition,
        latents=latents,
        text=text,
        shape=plan.shape,
        parameters=parameter_count(network),
        rows=0,
        samples=0,
        batch=0,
        train_flops=0.0,
        forward_flops=flops,
        provenance=_provenance(checkpoint),
    )
    _publish(store, fill_network(network, weights), weights, card)
    _tell(wanted, card)
    return card


def _island(campaign: Campaign, number: int) -> tuple[Store, RunPlan]:
    k, run = campaign.config.partition.k, Run("expert", number)
    if not 0 <= number < k:
        raise PartitionError(f"there is no expert {number}", f"give --expert 0 to {k - 1}")
    if not campaign.store.exists(run.plan):
        what = f"{campaign.store.name(run.folder)} has no island.json"
        raise PartitionError(what, "run 'atoll partition' first")
    store = campaign.store.sub(run.folder)
    fix = f"to adopt another, remove run/ and expert/ of {store.location}, and assemble again"
    if Checkpoint(store, "expert").published:
        raise PartitionError(f"there is an expert {number} already", fix)
    if any(entry.kind == "commit" for entry in Log(store.sub("run"), "").entries()):
        raise PartitionError(f"expert {number} has begun to train", fix)
    return store, RunPlan.read(campaign.store, run.plan)


def _family(checkpoint: DiffusersCheckpoint, condition: str) -> Family:
    try:
        adapter = family(checkpoint.class_name)
    except ConfigError:
        known = "DiT, PixArt, SD3 and Flux transformers can be adopted"
        raise ConfigError(f"{checkpoint.name!r} is a {checkpoint.class_name}", known) from None
    if adapter.takes_text != (condition == "text"):
        takes = "text" if adapter.takes_text else "class labels or nothing"
        raise ConfigError(
            f"{checkpoint.name!r} is a {checkpoint.class_name}, which takes {takes}; the campaign's"
            f" condition is {condition!r}",
            "adopt one of the same condition",
        )
    return adapter


def _objective(checkpoint: DiffusersCheckpoint, wanted: Adoption) -> tuple[Prediction, str]:
    """What the user says, and else what the checkpoint says."""
    if wanted.prediction is not None and wanted.schedule is not None:
        return wanted.prediction, schedule_name(schedule(wanted.schedule))
    settings = checkpoint.beside("scheduler", "scheduler_config.json")
    if settings is None:
        raise ConfigError(
            f"{checkpoint.name!r} has no scheduler_config.json that says what it was trained on",
            "say it: for example --prediction eps --schedule ddpm-linear",
        )
    prediction, curve = trained_on(settings)
    named = prediction if wanted.prediction is None else wanted.prediction
    return named, curve if wanted.schedule is None else schedule_name(schedule(wanted.schedule))


def _check_shape(checkpoint: DiffusersCheckpoint, adapter: Family, shape: DataShape) -> None:
    with torch.device("meta"):  # settings that config.json leaves out have their defaults then
        settings: Any = _built(checkpoint, adapter).config
    implied = asdict(adapter.made_for(settings, shape))
    for part, value in asdict(shape).items():
        if part != "text_length" and implied[part] != value:
            what = _WORDS[part].format(implied[part])
            raise ConfigError(
                f"{checkpoint.name!r} was made for {what}, the campaign's data have {value}",
                "adopt one that was trained on data of this shape",
            )


_WORDS = {
    "channels": "latents of {} channels",
    "size": "latents of {} px",
    "text_width": "text states {} wide",
    "classes": "{} classes",
}


def _check_vae(checkpoint: DiffusersCheckpoint, latents: Mapping[str, Any]) -> None:
    """Refuse a checkpoint whose pipeline has an autoencoder with other constants than the campaign's."""
    vae = checkpoint.beside("vae", "config.json")
    if vae is None:
        return
    shift, scale = float(vae.get("shift_factor") or 0.0), float(vae.get("scaling_factor") or 1.0)
    latents_text = f"have {latents['shift']:g} and {latents['scale']:g}"
    same = (shift, scale) == (latents["shift"], latents["scale"])
    same = same and list(vae.get("latents_mean") or []) == list(latents.get("mean") or [])
    if latents["name"] == "none" or not same:
        raise ConfigError(
            f"{checkpoint.name!r} was trained on latents with shift {shift:g} and scale {scale:g},"
            f" the campaign's {'are pixels' if latents['name'] == 'none' else latents_text}",
            "adopt one that was trained on the same latents",
        )


def _built(checkpoint: DiffusersCheckpoint, adapter: Family) -> nn.Module:
    """Its network, without its weights."""
    try:
        return adapter.load(checkpoint.settings)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{checkpoint.name!r} has settings that make no network ({_line(error)})", "adopt another one"
        ) from None


def _forward(checkpoint: DiffusersCheckpoint, adapter: Family, shape: DataShape) -> float:
    """Operations of one evaluation; that it can be evaluated at all is found out here, without weights."""

    def ask(network: nn.Module, x: Tensor, t: Tensor, cond: Condition) -> Tensor:
        answer = adapter.predict(network, x, t, cond)
        if answer.shape != x.shape:
            raise ValueError(f"it answers {tuple(answer.shape)} to {tuple(x.shape)}")
        return answer

    try:
        return count(lambda: _built(checkpoint, adapter), ask, shape).forward
    except (TypeError, ValueError, RuntimeError, AttributeError, KeyError) as error:
        raise ConfigError(
            f"{checkpoint.name!r} cannot be asked with the campaign's data ({_line(error)})",
            "adopt another one",
        ) from None


def _line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _provenance(checkpoint: DiffusersCheckpoint) -> dict[str, Any]:
    origin = {"name": checkpoint.name, "class": checkpoint.class_name}
    return {
        "atoll": code_version(),
        "torch": torch.__version__,
        "machine": platform.machine(),
        "init": {"kind": "adopted", **origin},
    }


def _publish(store: Store, network: nn.Module, weights: Mapping[str, Tensor], card: Card) -> None:
    """As a run publishes: through the island's log, so that nobody trains it meanwhile or after."""
    log = Log(store.sub("run"), new_holder())
    if not acquire(log, LeaseConfig()):
        raise PartitionError(f"expert {card.island} was published meanwhile", "look at atoll status")
    announce(log.store, log, 0, lambda run, prefix: Checkpoint(run, prefix).write(network, weights, card))
    settle(store, log)


def _tell(wanted: Adoption, card: Card) -> None:
    millions = card.parameters / 1e6
    what = f"{card.family} of {millions:.1f} M parameters, {card.prediction} on {card.schedule}"
    say(f"expert {wanted.island}: adopted {wanted.checkpoint!r}: {what}")
    trust = [f"its latents are those of {card.latents['name']}"]
    if card.text is not None:
        trust.append(f"its text states those of {card.text['name']}")
    if card.condition == "class":
        trust.append("its labels mean what the campaign's mean")
    say(f"  taken on trust: {', '.join(trust)}; what it once cost is in no FLOPs")
