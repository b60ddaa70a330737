"""The ensemble from what has been published, complete or partial."""

from collections.abc import Collection, Mapping, Sequence

from atoll.base.console import say
from atoll.base.errors import ConfigError, PartitionError, StoreError
from atoll.base.hashing import sha256
from atoll.campaign.card_facts import model_card_facts
from atoll.campaign.folder import Campaign
from atoll.campaign.milestones import TrainingRun
from atoll.campaign.publication import check_published
from atoll.campaign.runs import Run, experts_of, read_partition
from atoll.model.card import Card, check_place, check_together
from atoll.model.checkpoint import CARD, Checkpoint
from atoll.model.folder import (
    MODEL_INDEX,
    SCHEDULER,
    FolderWriter,
    Manifest,
    defaults,
    hashers,
    part_of,
    read_manifest,
    scheduler_shift,
)
from atoll.model.model_card import listed
from atoll.model.routing import PRETRAIN
from atoll.store.manifest import check_file
from atoll.store.signatures import SIGNATURE


def assemble(
    campaign: Campaign, quarantine: Collection[int] = (), trusted: Collection[str] | None = None
) -> list[int]:
    """Write `ensemble/`: a folder that `AtollPipeline` loads, and `ensemble.json` that names its files.

    Returns the numbers of the experts that it lacks.
    Parts that lie there unchanged are left alone, so an expert that comes later costs its own bytes only.
    `quarantine` (experts that are left out) and `trusted` (keys or certificates, one of which must have
    signed each part) add to those of the settings; without any key unsigned parts are taken too.
    """
    store, sampling = campaign.store, campaign.config.sampling
    k, cards = _gather(campaign, {*campaign.config.quarantine, *quarantine})
    if sampling.routing.null == PRETRAIN and Run(PRETRAIN) not in cards:
        what = f"{store.location} has no network of shared pretraining, which sampling.routing asks for"
        fix = "train it or put it back: pretrain/expert, or set another sampling.routing"
        raise PartitionError(what, fix)
    guide, share = None, sampling.guide_share
    if Run(PRETRAIN) in cards and share < 1:
        # A worse model of the same data is a better guide (arXiv 2406.02507), so a checkpoint may serve.
        training = TrainingRun.of(store, Run(PRETRAIN).network, f"{Run(PRETRAIN).folder}/run")
        guide = training.at(share, training.steps)
        if guide is None:
            there = ", ".join(f"{share:.3g}" for share in training.shares)
            there = there or "none: bring pretrain/run, if it has any"
            what = f"{store.location} has no checkpoint of pretrain after {share:g} of its steps"
            raise PartitionError(what, f"set sampling.guide_share=1, or to one that is there ({there})")
    if trusted is not None or campaign.config.trusted:
        keys = {*campaign.config.trusted, *(trusted or ())}
        if guide is not None:
            what = "sampling.guide_share takes a checkpoint of shared pretraining"
            fix = "set sampling.guide_share=1, or require no signatures"
            raise PartitionError(f"{what}, and nobody signs checkpoints", fix)
        for run in cards:
            Checkpoint(store, run.network).check_trusted(keys)
    store.sweep("ensemble")
    numbers = [run.expert for run in cards if run.expert is not None]
    missing = [number for number in range(k) if number not in numbers]
    card = training.card_at(guide) if guide else None
    if _assembled(campaign, cards, card):
        say(f"ensemble: assembled already, experts {listed(numbers)} of {k}")
        return missing
    early = training.stored(guide).filled() if guide else None  # read now: it may be damaged
    writer = FolderWriter(store.sub("ensemble"), k)
    for run in cards:
        if run.role == PRETRAIN and early and card:
            writer.save(early, card)
        else:
            writer.copy(Checkpoint(store, run.network))
    writer.describe({"scheduler": writer.scheduler(sampling)}, defaults(sampling))
    facts = model_card_facts(campaign, writer.parts)
    writer.finish(facts, name=f"{facts['name']}/ensemble")
    say(f"ensemble: experts {listed(numbers)} of {k} and the router")
    warn_of_missing(missing)
    return missing


def assembled_manifest(campaign: Campaign) -> Manifest:
    """What `ensemble/` holds; `ConfigError` for experts that are in quarantine by now."""
    manifest = read_manifest(campaign.store)
    if held := sorted({*manifest.experts} & {*campaign.config.quarantine}):
        what = f"ensemble/ of {campaign.store.location} holds experts {listed(held)}, which are in quarantine"
        raise ConfigError(what, "assemble it without them: atoll assemble")
    return manifest


def warn_of_missing(missing: Sequence[int]) -> None:
    """Say which experts a partial ensemble lacks."""
    if missing:
        say(f"  warning: partial: experts {listed(missing)} are missing; their share goes to the others")


def _assembled(campaign: Campaign, cards: Mapping[Run, Card], guide: Card | None) -> bool:
    """Whether `ensemble/` holds these very networks and signatures, whole, and draws as the settings say."""
    store, sampling = campaign.store, campaign.config.sampling
    try:
        manifest = read_manifest(store)
        index, scheduler = (store.get_json(f"ensemble/{file}") for file in (MODEL_INDEX, SCHEDULER))
        with hashers() as pool:
            list(pool.map(lambda entry: check_file(store, "ensemble", entry), manifest.files))
    except StoreError:
        return False
    hashes = {entry.path: entry.sha256 for entry in manifest.files}
    for run, card in cards.items():
        folders = f"ensemble/{part_of(card)}", run.network
        part, published = (f"{folder}/{CARD}" for folder in folders)
        keys = [f"{folder}/{SIGNATURE}" for folder in folders]
        signatures = [store.get(key) if store.exists(key) else b"" for key in keys]
        if (sha := hashes.get(part.removeprefix("ensemble/"))) is None:
            return False
        if run.role == PRETRAIN and guide is not None:
            # A checkpoint has no card of its own to be a copy of: all that is known of it must agree.
            known = {key: value for key, value in guide.model_dump(mode="json").items() if value}
            if signatures[0] or not known.items() <= store.get_json(part).items():
                return False
        elif sha != sha256(store.get(published)) or signatures[0] != signatures[1]:
            return False
    same = defaults(sampling).items() <= index.items()
    same = same and scheduler_shift(sampling.shift).items() <= scheduler.items()
    return same and len(manifest.parts) == len(cards)


def _gather(campaign: Campaign, quarantine: Collection[int]) -> tuple[int, dict[Run, Card]]:
    """K, and the cards of what is published: experts, shared pretraining, router; all belong together."""
    store = campaign.store
    if not campaign.is_partitioned:
        raise PartitionError(f"{store.location} has no partition", "run 'atoll launch' first")
    partition = read_partition(store)
    if not {*quarantine} < {*range(partition.k)}:
        what = f"experts {listed(sorted(quarantine))} cannot be left out"
        raise PartitionError(what, f"leave out some of 0 to {partition.k - 1}, and not all of them")
    runs = [run for run in experts_of(partition.k) if run.expert not in quarantine]
    networks = {run: Checkpoint(store, run.network) for run in (*runs, Run(PRETRAIN), Run("router"))}
    cards = {run: network.card for run, network in networks.items() if network.published}
    for lacking, some in (("no expert", runs), ("no router", [Run("router")])):
        if not cards.keys() & {*some}:
            raise PartitionError(f"{store.location} has {lacking} yet", "train first: atoll launch")
    check_together(list(cards.values()))
    if cards[Run("router")].partition != partition.hash:
        what = f"the parts in {store.location} were made for another partition"
        raise PartitionError(what, "put their own back")
    for run, card in cards.items():
        check_place(card, run.name, run.folder)
        check_published(store.sub(run.folder))
    return partition.k, cards
