"""Where the weights of a run start: drawn, or in its `init/` from a checkpoint, pretraining or experts.

`init/` holds the network as it starts; its `init.json` names origin, partition and network of the weights.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save as save_tensors
from torch import Tensor, nn

from atoll.base.console import say
from atoll.base.errors import ConfigError, PartitionError, StoreError
from atoll.base.hashing import digest, digest_tensors
from atoll.campaign.budget import router_arguments
from atoll.campaign.folder import Campaign, finished_origin
from atoll.campaign.roles import RUNS
from atoll.campaign.runs import Run, RunPlan, experts_of
from atoll.encoders.text import text_form
from atoll.flow.published import trained_on
from atoll.model.card import WEIGHTS
from atoll.model.checkpoint import Checkpoint
from atoll.model.expert import settings_of
from atoll.model.foreign import DiffusersCheckpoint, Fit, compare, find, take_over
from atoll.networks.families import family, initialise, kept_buffers
from atoll.networks.lora import changes, shared
from atoll.networks.router import Router
from atoll.networks.settings import DataShape, NetworkConfig
from atoll.store.location import resolve
from atoll.store.manifest import Published, read_file, write_blocks
from atoll.store.store import Conflict, Store, to_json
from atoll.store.tensors import read_tensors

FOLDER, MANIFEST = "init", "init.json"
Kind = Literal["checkpoint", "pretrain", "experts"]
# By kind: the origin in words, why `init/` is missing, and what to do then.
_KINDS = {
    "pretrain": (
        "shared pretraining",
        "this run starts from shared pretraining, which has not handed its weights over",
        "run shared pretraining first: atoll train pretrain, then atoll launch",
    ),
    "checkpoint": (
        "checkpoint",
        "this run starts from a checkpoint, which the partition laid there",
        "copy the folder from where the partition was made",
    ),
    "experts": (
        "choice of experts",
        "this run starts from the experts, which are not all finished",
        "train the experts first: atoll launch",
    ),
}


def initial_network(config: NetworkConfig, shape: DataShape, seed: int) -> nn.Module:
    """A denoiser with its published initialisation."""
    network = family(config.family).build(config, shape)
    initialise(network, seed)
    return network


def initial_router(campaign: Campaign, shape: DataShape) -> Router:
    """The router with its initialisation."""
    network: Router = Router(**router_arguments(campaign.config, shape))
    initialise(network, campaign.config.seed)
    return network


class InitialWeights(Published):
    """`init/init.json`: where the initial weights come from and what they are for."""

    FORMAT, VERSION, PLACE = "atoll/initial-weights", 2, "ROLE/init/init.json"
    REMEDY = "put back the one that the partition or shared pretraining laid there"
    kind: Kind
    """`checkpoint`, `pretrain` or `experts`."""
    origin: dict[str, Any]
    """Which checkpoint, which shared pretraining, or which experts."""
    partition: str
    """Hash of the partition that they were made for."""
    network: str
    """Digest of the `config.json` of the network that they were made for."""
    kept: int
    """Number of tensors that come from the origin."""
    drawn: dict[str, str]
    """Names of the others, which were drawn, and why."""
    unused: list[str]
    """Names of the origin's tensors that have no place in the network."""

    @property
    def weights_sha256(self) -> str:
        """SHA-256 of the weights' file."""
        hashes = [file.sha256 for file in self.files if file.path == WEIGHTS]
        if not hashes:
            raise StoreError(f"{MANIFEST} names no {WEIGHTS}", self.REMEDY)
        return hashes[0]


def publish_initial(
    store: Store,
    network: nn.Module,
    kind: Kind,
    origin: dict[str, Any],
    partition: str,
    weights: Callable[[], Mapping[str, Tensor]],
    whose: str,
) -> Fit | None:
    """Give a network what fits of its origin's weights, and publish that as `init/` of a run's folder.

    The network, initialised from scratch, is changed in place. `weights` reads the origin's, which may be
    many gigabytes, if they are needed. Returns what was taken over; None if it lies there already.
    """

    def check_origin() -> None:
        initial = InitialWeights.read(store, f"{FOLDER}/{MANIFEST}")
        if (initial.kind, initial.origin) != (kind, origin):
            what = f"{store.name(FOLDER)} holds initial weights of another {_KINDS[kind][0]}"
            raise PartitionError(what, "remove it, and run/ and expert/ beside it, to start the run anew")

    if store.exists(f"{FOLDER}/{MANIFEST}"):
        check_origin()
        return None
    fit = take_over(network, weights(), whose)
    check_whole(network, fit, whose)
    settings = settings_of(network)
    # The file is that of the origin, where all of it is taken over. safetensors refuses tensors that are not
    # contiguous.
    whole = shared(network, {**dict(network.named_parameters()), **kept_buffers(network)})
    tensors = {name: value.detach().cpu().contiguous() for name, value in whole.items()}
    blobs = {"config.json": to_json(settings), WEIGHTS: save_tensors(tensors, metadata={"format": "pt"})}
    initial = InitialWeights(
        files=[write_blocks(store, FOLDER, path, [data]) for path, data in blobs.items()],
        kind=kind,
        origin=origin,
        partition=partition,
        network=digest(settings),
        kept=len(fit.kept),
        drawn=dict(fit.drawn),
        unused=list(fit.unused),
    )
    # `init.json` last and if-absent: what it names is whole, and of the first that came.
    try:
        store.create_json(f"{FOLDER}/{MANIFEST}", initial.to_json())
    except Conflict:  # two that finish pretraining at once lay the same weights
        check_origin()
    return fit


def check_whole(network: nn.Module, fit: Fit, whose: str) -> None:
    """Refuse a low-rank change of a network that would be drawn in part; `ConfigError`."""
    if changes(network) and fit.drawn:
        what = f"network.lora changes a whole network, and {whose} has no {next(iter(fit.drawn))} that fits"
        raise ConfigError(what, "give network its dimensions and arguments, or leave network.lora out")


def check_checkpoints(campaign: Campaign) -> None:
    """Refuse a checkpoint, or an `origin`, that is not there or of another kind, before any work."""
    config, beside, warned = campaign.config, campaign.store.location, set[Any]()
    if config.origin:  # before any network.init
        finished_origin(config, beside)
        return
    # Islands without settings of their own are the monolith's network, so each checkpoint is told once.
    whole = [Run(role.name) for role in RUNS.values() if role.rows == "all" and role.task != "route"]
    for run in (*whole, *(Run("expert", island) for island in config.islands)):
        network, objective = config.denoiser(*run)[0], config.objective_of(*run)
        learns = objective.prediction, objective.schedule
        if network.init == "scratch" or (network, learns) in warned:
            continue
        warned.add((network, learns))
        with _named_by_setting():
            shape = DataShape(1, 1)
            if config.condition == "text":
                form = text_form(config.data.text_encoder, config.data.text_length)
                shape = DataShape(1, 1, form.width, form.length, 0, form.pooled, network.guidance)
            origin = _find(network, beside, shape)
        with suppress(ConfigError):  # a kind that is not converted; the objective is the user's
            settings = origin.beside("scheduler", "scheduler_config.json")
            kind = trained_on(settings) if settings is not None else None
            if kind not in (None, learns):
                learned = f"{network.init!r} was trained to give {' on '.join(kind)}, and goes on with"
                say(f"warning: {learned} {' on '.join(learns)}: objective sets that, but for the student")


class Checkpoints:
    """The checkpoints that a campaign's runs start from, each read once and told once."""

    def __init__(self, campaign: Campaign) -> None:
        self.campaign, self.beside = campaign, campaign.store.location
        self._read: dict[str, tuple[dict[str, Any], dict[str, Tensor]]] = {}
        self._told: set[str] = set()

    def check(self, runs: Iterable[Run], shape: DataShape, latents: Mapping[str, Any]) -> None:
        """Refuse what a checkpoint's weights and positions tell, while settings may still change."""
        config = self.campaign.config
        for run in runs:
            settings = config.denoiser(*run)[0]
            if run.kind.init(config) == "pretrain" and settings.whole != config.network.whole:
                # Names and shapes alone decide what fits, so neither network needs memory here.
                with torch.device("meta"):
                    each = (settings.whole, config.network.whole)
                    own, pretrain = (family(network.family).build(network, shape) for network in each)
                if not compare(own, dict(pretrain.named_parameters())).kept:
                    what = f"islands.{run.expert}.network has no tensor of the pretrained shapes"
                    fix = "give it the campaign's heads and head_width, or set budget.pretrain=0"
                    raise ConfigError(f"{what}, to start from", fix)
            if run.kind.task == "route" or config.origin or settings.init in ("scratch", *self._read):
                continue
            with _named_by_setting():
                checkpoint = _find(settings, self.beside, shape)
                # Refused where it is adopted as it is; training gets used to them, and some fit well.
                if (others := checkpoint.other_latents(latents)) is not None:
                    say(f"warning: network.init: {others}")
                tensors = checkpoint.weights()
                if settings.interpolation_scale is None:
                    network = initial_network(settings, shape, config.seed)
                    checkpoint.check_positions(family(settings.family), network, tensors)
            if settings.lora is not None:
                with torch.device("meta"):
                    changed = family(settings.family).build(settings, shape)
                check_whole(changed, compare(changed, tensors), repr(settings.init))
            named = {"name": checkpoint.name, "class": checkpoint.class_name}
            self._read[settings.init] = {**named, "weights_sha256": digest_tensors(tensors)}, tensors

    def publish(self, run: Run, network: nn.Module, partition: str, shape: DataShape) -> str:
        """Publish what fits of `network.init`, or `origin`, as a run's `init/`; the digest of the weights."""
        config, folder = self.campaign.config, self.campaign.store.sub(run.folder)
        name = config.denoiser(*run)[0].init
        if config.origin:
            self._read.clear()  # each is read once: K experts may be more than the memory
            name = resolve(self.beside, config.origin)
            published = Checkpoint(Store.open(name), run.network)
            if config.trusted:
                published.check_trusted(config.trusted)
            made, tensors = published.read()
            learned = published.card.prediction, published.card.schedule
            wanted = config.objective_of(*run)
            if run.kind.task == "denoise" and learned != (wanted.prediction, wanted.schedule):
                what = f"{run.name} of {name} predicts {' on '.join(learned)}"
                raise ConfigError(what, "set objective, or islands.N.objective, to these")
            origin = {"name": f"{name}/{run.network}", "class": made["_class_name"]}
            self._read[name] = ({**origin, "weights_sha256": digest_tensors(tensors)}, tensors)
        origin, weights = self._read[name]
        fit = publish_initial(folder, network, "checkpoint", origin, partition, lambda: weights, repr(name))
        for line in fit.lines(repr(name)) if fit is not None else ():
            if line not in self._told:
                say(line)
                self._told.add(line)
        return InitialWeights.read(folder, f"{FOLDER}/{MANIFEST}").weights_sha256


def with_initial_weights(network: nn.Module, plan: RunPlan, run: Store, name: str) -> RunPlan:
    """Check a freshly drawn network, or give it the weights in `init/`; the plan with digest and origin."""
    if plan.init == "scratch":
        if digest_tensors(dict(network.named_parameters())) != plan.init_sha256:
            whose = "than the one that made the partition"
            say(f"{name}: warning: this machine draws other initial weights {whose}")
        return plan
    # Nothing but the run's own folder is read: an island has no other.
    where = run.name(FOLDER)
    if not run.exists(f"{FOLDER}/{MANIFEST}"):
        _, missing, fix = _KINDS[plan.init]
        raise PartitionError(f"{where} has no {MANIFEST}: {missing}", fix)
    initial = InitialWeights.read(run, f"{FOLDER}/{MANIFEST}")
    blobs = {entry.path: read_file(run, FOLDER, entry) for entry in initial.files}
    for field, mine, wanted in (
        ("start", initial.kind, plan.init),
        ("partition", initial.partition, plan.partition),
        ("network", initial.network, digest(settings_of(network))),
    ):
        if mine != wanted:
            fix = "put back the one that was made with this island.json"
            raise PartitionError(f"{where} was made for another {field} than this run's", fix)
    # Shared pretraining ends after the plan is written, so a plan may not know the weights yet.
    if plan.init_sha256 not in (None, initial.weights_sha256):
        what = f"{where} holds other initial weights than island.json names"
        raise PartitionError(what, "put its own back")
    take_over(network, read_tensors(blobs[WEIGHTS], f"{where}/{WEIGHTS}"), str(where))
    return plan.model_copy(update={"init_sha256": initial.weights_sha256, "init_origin": initial.origin})


def copy_initial_weights(campaign: Campaign) -> None:
    """Write the pretrained, averaged weights into `islands/K/init/` of every expert that has none.

    An expert of another size than shared pretraining takes over what fits; the rest is drawn.
    """
    store = campaign.store
    pretrained = Checkpoint(store, "pretrain/expert")
    card = pretrained.card
    origin = {name: getattr(card, name) for name in ("weights_sha256", "samples", "train_flops")}
    weights, count = cache(lambda: pretrained.read()[1]), 0
    for number, run in enumerate(experts_of(campaign.config.partition.k)):
        plan = RunPlan.read(store, run.plan)
        if plan.partition != card.partition:
            what = f"pretrain/ in {store.location} is of another partition than expert {number}"
            raise PartitionError(what, "put its own back")
        network = initial_network(campaign.config.island(number)[0], plan.shape, plan.init_seed)
        island, whose = store.sub(run.folder), "shared pretraining"
        fit = publish_initial(island, network, "pretrain", origin, plan.partition, weights, whose)
        if fit is None:
            continue
        count += 1
        for line in fit.lines(f"{whose} for {run.name}") if fit.drawn or fit.unused else ():
            say(line)
    if count:
        say(f"shared pretraining: its weights lie in {FOLDER}/ of {count} islands")


def pretrain_finished(campaign: Campaign) -> bool:
    """Whether there is shared pretraining and it has published."""
    return bool(campaign.config.budget.pretrain) and Checkpoint(campaign.store, "pretrain/expert").published


def _find(settings: NetworkConfig, beside: str, shape: DataShape) -> DiffusersCheckpoint:
    checkpoint = find(settings.init, Path(beside))
    wanted = family(settings.family).network_class().__name__
    if checkpoint.class_name != wanted:
        what = f"{settings.init!r} is a {checkpoint.class_name}, {settings.family} is a {wanted}"
        raise ConfigError(what, "give a checkpoint of that class, or set network.family")
    checkpoint.check_text(family(settings.family), shape)
    return checkpoint


@contextmanager
def _named_by_setting() -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"network.init: {error.what}", error.fix) from None
