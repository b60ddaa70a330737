"""`init/`: the weights that a run starts from where it does not draw them."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

from safetensors.torch import save as save_tensors
from torch import Tensor, nn

from atoll.base.errors import PartitionError
from atoll.base.hashing import digest
from atoll.model.stored import settings_of
from atoll.networks.diffusers_checkpoint import WEIGHTS, Fit, take_over
from atoll.store.manifest import Published, publish, read_published
from atoll.store.store import Conflict, Store, to_json
from atoll.store.tensors import read_tensors

FOLDER, MANIFEST = "init", "init.json"
Kind = Literal["checkpoint", "pretrain", "experts"]


class Initial(Published):
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
        return next(file.sha256 for file in self.files if file.path == WEIGHTS)


def lay_initial(
    store: Store,
    network: nn.Module,
    kind: Kind,
    origin: dict[str, Any],
    partition: str,
    weights: Callable[[], Mapping[str, Tensor]],
    whose: str,
) -> Fit | None:
    """Give a network what fits of its origin's weights, and publish that as `init/` of a run's folder.

    Weights first, verified, then `init.json` if-absent. The same origin again does nothing.

    Args:
        store: narrowed to the run's folder.
        network: initialised from scratch; changed in place.
        kind: what the origin is.
        origin: plain data that names it.
        partition: hash of the run's partition.
        weights: reads the origin's, by name; called if they are needed.
        whose: what the weights are of, for messages.

    Returns:
        What was taken over; None if it lies there already.

    Raises:
        PartitionError: there lie initial weights of another origin.
        StoreError: what was written reads back differently.
    """
    if store.exists(f"{FOLDER}/{MANIFEST}"):
        _check_origin(store, kind, origin)
        return None
    fit = take_over(network, weights(), whose)
    tensors = {name: p.detach().cpu().contiguous() for name, p in network.named_parameters()}
    initial = Initial(
        kind=kind,
        origin=origin,
        partition=partition,
        network=digest(settings_of(network)),
        kept=len(fit.kept),
        drawn=dict(fit.drawn),
        unused=list(fit.unused),
    )
    blobs = {
        "config.json": to_json(settings_of(network)),
        WEIGHTS: save_tensors(tensors, metadata={"format": "pt"}),
    }
    try:
        publish(store, FOLDER, blobs, MANIFEST, initial)
    except Conflict:  # somebody did the same at the same time
        _check_origin(store, kind, origin)
    return fit


def _check_origin(store: Store, kind: Kind, origin: dict[str, Any]) -> None:
    initial = read_manifest(store)
    if (initial.kind, initial.origin) != (kind, origin):
        raise PartitionError(
            f"{store.name(FOLDER)} holds initial weights of another {_ORIGINS[kind]}",
            "remove it, and run/ and expert/ beside it, to start the run anew",
        )


def read_manifest(store: Store) -> Initial:
    """`init/init.json` of a run's folder; `StoreError` if there is none or of another version."""
    return Initial.read(store, f"{FOLDER}/{MANIFEST}")


def read_initial(store: Store, network: nn.Module, kind: Kind, partition: str) -> Initial:
    """Give a network its initial weights, verified.

    Args:
        store: narrowed to the run's folder; nothing else is read.
        network: whose parameters are overwritten.
        kind: where they must come from.
        partition: hash of the run's partition.

    Raises:
        PartitionError: they are not there, or were made for another partition or network.
        StoreError: a file is damaged.
    """
    where = store.name(FOLDER)
    if not store.exists(f"{FOLDER}/{MANIFEST}"):
        raise PartitionError(f"{where} has no {MANIFEST}: {_WANTED[kind]}", _FIXES[kind])
    manifest = read_manifest(store)
    wanted = {"kind": kind, "partition": partition, "network": digest(settings_of(network))}
    for field, value in wanted.items():
        if getattr(manifest, field) != value:
            raise PartitionError(f"{where} was made for another {_FIELDS[field]} than this run's", _OTHER)
    data = read_published(store, FOLDER, MANIFEST, Initial)[1][WEIGHTS]
    take_over(network, read_tensors(data, f"{where}/{WEIGHTS}"), str(where))
    return manifest


_ORIGINS = {"pretrain": "shared pretraining", "checkpoint": "checkpoint", "experts": "choice of experts"}
_WANTED = {
    "pretrain": "this run starts from shared pretraining, which has not handed its weights over",
    "checkpoint": "this run starts from a checkpoint, which the partition laid there",
    "experts": "this run starts from the experts, which are not all finished",
}
_FIXES = {
    "pretrain": "run shared pretraining first: atoll train pretrain, then atoll launch",
    "checkpoint": "copy the folder from where the partition was made",
    "experts": "train the experts first: atoll launch",
}
_FIELDS = {"kind": "start", "partition": "partition", "network": "network"}
_OTHER = "put back the one that was made with this island.json"
