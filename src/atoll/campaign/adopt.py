"""A published checkpoint as the expert of an island, as it is: not trained here, but converted exactly."""

import platform
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from atoll.base.condition import Condition
from atoll.base.console import say
from atoll.base.errors import ConfigError, PartitionError, first_line
from atoll.base.format import code_version
from atoll.campaign.folder import Campaign
from atoll.campaign.publication import promote, publish_network
from atoll.campaign.runs import RunPlan, run_to_train
from atoll.data.dataset import DataSet
from atoll.flow.published import trained_on
from atoll.flow.schedule import schedule, schedule_name
from atoll.flow.settings import Prediction
from atoll.model.card import Card, check_producers
from atoll.model.checkpoint import Checkpoint
from atoll.model.foreign import DiffusersCheckpoint, find
from atoll.networks.cost import counts, mean
from atoll.networks.families import Family, family, parameter_count
from atoll.networks.settings import TAKES_TEXT, DataShape
from atoll.store.lease import LeaseConfig, acquire, new_holder
from atoll.store.log import Log

_WORDS = {
    "channels": "latents of {} channels",
    "size": "latents of {} px",
    "text_width": "text states {} wide",
    "classes": "{} classes",
}


def adopt(
    campaign: Campaign,
    checkpoint: str,
    island: int,
    prediction: Prediction | None = None,
    noise: str | None = None,
) -> Card:
    """Publish a checkpoint (a folder or hub name) as the expert of an island; its bits stay, in float32.

    Prediction and `noise`, the name of its schedule, are by default those of its `scheduler_config.json`.
    """
    # The island: it is there, and nobody has begun to train its expert.
    run = run_to_train(campaign, "expert", island)
    store, plan = campaign.store.sub(run.folder), RunPlan.read(campaign.store, run.plan)
    fix = f"to adopt another, remove run/ and expert/ of {store.location}, and assemble again"
    if Checkpoint(store, "expert").published:
        raise PartitionError(f"there is an expert {island} already", fix)
    if any(entry.kind == "commit" for entry in Log(store.sub("run"), "").entries()):
        raise PartitionError(f"expert {island} has begun to train", fix)

    # The network: of a known family, with the campaign's condition.
    origin, condition = find(checkpoint, Path()), campaign.config.condition
    try:
        adapter = family(origin.class_name)
    except ConfigError:
        known = "DiT, PixArt, SD3 and Flux transformers can be adopted"
        raise ConfigError(f"{checkpoint!r} is a {origin.class_name}", known) from None
    if TAKES_TEXT[adapter.name] != (condition == "text"):
        takes = "text" if TAKES_TEXT[adapter.name] else "class labels or nothing"
        what = f"{checkpoint!r} is a {origin.class_name}, which takes {takes}"
        raise ConfigError(f"{what}; the campaign's condition is {condition!r}", "adopt one of the same")

    # What it predicts, on which schedule: what the user says, and else what the checkpoint says.
    if prediction is None or noise is None:
        settings = origin.beside("scheduler", "scheduler_config.json")
        if settings is None:
            what = f"{checkpoint!r} has no scheduler_config.json that says what it was trained on"
            raise ConfigError(what, "say it: for example --prediction eps --schedule ddpm-linear")
        learned, learned_on = trained_on(settings)
        prediction, noise = prediction or learned, noise or learned_on
    latents, text = DataSet.open(store, "data").producers(campaign.config.data.text_column)
    check_producers(latents, text)
    forward_flops = _check_fit(origin, adapter, plan.shape, latents)

    network = origin.network(adapter)
    weights = origin.weights_of(network)
    card = Card(
        role="expert",
        island=island,
        family=adapter.name,
        prediction=prediction,
        schedule=schedule_name(schedule(noise)),
        condition=condition,
        partition=plan.partition,
        latents=latents,
        text=text,
        shape=plan.shape,
        parameters=parameter_count(network),
        # What it once cost is not known: a guess would stand in the sums of the campaign's FLOPs.
        rows=0,
        samples=0,
        batch=0,
        train_flops=0.0,
        forward_flops=forward_flops,
        provenance={
            "atoll": code_version(),
            "torch": torch.__version__,
            "machine": platform.machine(),
            "init": {"kind": "adopted", "name": checkpoint, "class": origin.class_name},
        },
    )
    # As a run publishes: through the island's log, so that nobody trains it meanwhile or after.
    log = Log(store.sub("run"), new_holder())
    if not acquire(log, LeaseConfig()):
        raise PartitionError(f"expert {island} was published meanwhile", "finish that: atoll train expert")
    publish_network(log.store, log, 0, lambda run, part: Checkpoint(run, part).write(network, weights, card))
    promote(store, log)

    size = f"{card.family} of {card.parameters / 1e6:.1f} M parameters"
    say(f"expert {island}: adopted {checkpoint!r}: {size}, {card.prediction} on {card.schedule}")
    trust = [f"its latents are those of {latents['name']}"]
    trust += [f"its text states those of {text['name']}"] if text is not None else []
    trust += ["its labels mean what the campaign's mean"] if condition == "class" else []
    say(f"  taken on trust: {', '.join(trust)}; what it once cost is in no FLOPs")
    return card


def _check_fit(
    origin: DiffusersCheckpoint, adapter: Family, shape: DataShape, latents: dict[str, Any]
) -> float:
    """Refuse a network that does not fit the data, before its weights are read; FLOPs of one evaluation."""

    def evaluate(network: nn.Module, x: Tensor, t: Tensor, cond: Condition) -> Tensor:
        output = adapter.predict(network, x, t, cond)
        if output.shape != x.shape:
            raise ValueError(f"it answers {tuple(output.shape)} to {tuple(x.shape)}")
        return output

    origin.check_text(adapter, shape)
    settings: Any = origin.network(adapter).config
    implied = asdict(adapter.made_for(settings, shape))
    for part, value in asdict(shape).items():
        if part in _WORDS and implied[part] != value:
            what = f"{origin.name!r} was made for {_WORDS[part].format(implied[part])}"
            fix = "adopt one that was trained on data of this shape"
            raise ConfigError(f"{what}, the campaign's data have {value}", fix)
    if (others := origin.other_latents(latents)) is not None:
        raise ConfigError(others, "adopt one that was trained on the same latents")
    try:
        return mean(counts(lambda: adapter.load(origin.settings), evaluate, shape)).forward
    except Exception as error:  # as `origin.network`
        what = f"{origin.name!r} cannot be asked with the campaign's data ({first_line(error)})"
        raise ConfigError(what, "adopt another one") from None
