"""Where the weights of a run start: drawn, from a published checkpoint, or from shared pretraining."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from atoll.base.console import say
from atoll.base.errors import ConfigError, PartitionError
from atoll.base.hashing import digest_tensors
from atoll.campaign.runs import RUNS, Init, Run, RunPlan
from atoll.campaign.settings.campaign import CampaignConfig
from atoll.flow.published import trained_on
from atoll.model.initial import lay_initial, read_initial, read_manifest
from atoll.networks.diffusers_checkpoint import DiffusersCheckpoint, find
from atoll.networks.families import family
from atoll.networks.settings import NetworkConfig
from atoll.store.store import Store

SCRATCH = "scratch"


def start_of(config: CampaignConfig, run: Run) -> Init:
    """Where a run's weights come from. The monolith's never from shared pretraining."""
    named = "scratch" if config.denoiser(*run)[0].init == SCRATCH else "checkpoint"
    return run.kind.init(config) or named  # type: ignore[return-value]


def check_checkpoints(config: CampaignConfig, beside: str) -> None:
    """Refuse a checkpoint that is not there or is of another class, before any work is done.

    Args:
        config: of the campaign.
        beside: the campaign's folder, from which paths start.
    """
    warned = set()
    whole = [Run(role.name) for role in RUNS.values() if role.rows == "all" and role.task != "route"]
    for run in (*whole, *(Run("expert", island) for island in config.islands)):
        network, objective = config.denoiser(*run)[0], config.objective_of(run.expert)
        if network.init == SCRATCH or (network, objective) in warned:
            continue
        warned.add((network, objective))
        origin = _found(network, beside)
        with suppress(ConfigError):  # a kind that is not converted; the objective is the user's
            settings = origin.beside("scheduler", "scheduler_config.json")
            kind = trained_on(settings) if settings is not None else None
            if kind not in (None, (objective.prediction, objective.schedule)):
                say(
                    f"warning: {network.init!r} was trained to give {' on '.join(kind)}, and goes on with"
                    f" {objective.prediction} on {objective.schedule}: objective sets that"
                )


@dataclass
class Checkpoints:
    """The checkpoints that runs start from, each read once and told once.

    Attributes:
        beside: the campaign's folder.
    """

    beside: str
    _read: dict[str, tuple[dict[str, Any], dict[str, Any]]] = field(default_factory=dict)
    _told: set[str] = field(default_factory=set)

    def start(self, run: Store, network: nn.Module, settings: NetworkConfig, partition: str) -> str:
        """Give a network what fits of its checkpoint, and publish that as the run's `init/`.

        Args:
            run: narrowed to the run's folder.
            network: initialised from scratch; changed in place.
            settings: of the network; `init` names the checkpoint.
            partition: hash.

        Returns:
            Digest of the weights.
        """
        origin, weights = self._weights(settings)
        whose = repr(settings.init)
        fit = lay_initial(run, network, "checkpoint", origin, partition, lambda: weights, whose)
        for line in fit.lines(whose) if fit is not None else ():
            if line not in self._told:
                say(line)
                self._told.add(line)
        return read_manifest(run).weights_sha256

    def _weights(self, settings: NetworkConfig) -> tuple[dict[str, Any], dict[str, Any]]:
        if settings.init not in self._read:
            checkpoint = _found(settings, self.beside)
            with _setting():
                weights = checkpoint.weights()
            origin = {
                "name": checkpoint.name,
                "class": checkpoint.class_name,
                "weights_sha256": digest_tensors(weights),
            }
            self._read[settings.init] = (origin, weights)
        return self._read[settings.init]


def start(network: nn.Module, plan: RunPlan, run: Store, name: str) -> RunPlan:
    """Check a freshly drawn network, or give it the weights of the run's own `init/`.

    Args:
        network: as drawn from `plan.init_seed`.
        plan: of the run.
        run: narrowed to the run's folder.
        name: of the run, for messages.

    Returns:
        The plan with the digest and the origin of the weights that the run really starts from.

    Raises:
        PartitionError: the run needs an `init/` that is missing or was made for another run.
    """
    if plan.init == "scratch":
        if digest_tensors(dict(network.named_parameters())) != plan.init_sha256:
            whose = "than the one that made the partition"
            say(f"{name}: warning: this machine draws other initial weights {whose}")
        return plan
    initial = read_initial(run, network, plan.init, plan.partition)
    if plan.init_sha256 not in (None, initial.weights_sha256):
        raise PartitionError(
            f"{run.name('init')} holds other initial weights than island.json names", "put its own back"
        )
    return plan.model_copy(update={"init_sha256": initial.weights_sha256, "init_origin": initial.origin})


def _found(settings: NetworkConfig, beside: str) -> DiffusersCheckpoint:
    with _setting():
        checkpoint = find(settings.init, Path(beside))
    wanted = family(settings.family).network_class().__name__
    if checkpoint.class_name != wanted:
        raise ConfigError(
            f"network.init: {settings.init!r} is a {checkpoint.class_name}, {settings.family} is a {wanted}",
            "give a checkpoint of that class, or set network.family",
        )
    return checkpoint


@contextmanager
def _setting() -> Iterator[None]:
    """Name the setting in what is wrong with its checkpoint."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"network.init: {error.what}", error.fix) from None
