"""Publishing a finished network once and for all, whatever dies in between.

The network is written under the holder's own name, then the log's `publish` entry names it with the
hash of every file: from then on the run is over and nobody can acquire it. Copying it to `expert/` is
housekeeping that any process may do or repeat, since all copy the same bytes.
"""

import os
from collections.abc import Callable
from pathlib import Path

from atoll.base.console import say
from atoll.base.errors import StoreError
from atoll.base.hashing import sha256
from atoll.campaign.folder import Campaign, single_network
from atoll.campaign.runs import Run
from atoll.model.checkpoint import CARD
from atoll.store.log import Fenced, Log
from atoll.store.manifest import entry_of, read_file
from atoll.store.signatures import sign
from atoll.store.store import Absent, Store

KEY = "ATOLL_KEY"
"""Environment variable with the path of the private key that signs what is published."""


def publish_network(run: Store, log: Log, step: int, write: Callable[[Store, str], object]) -> None:
    """Write the network below `export/HOLDER` and name it in the log; `Fenced` if the run was taken over."""
    prefix = f"export/{log.holder}"
    if not run.exists(f"{prefix}/{CARD}"):
        write(run, prefix)
    files = [entry_of(run, prefix, key[len(prefix) + 1 :]) for key in run.list(prefix)]
    try:
        log.append("publish", step=step, export=prefix, files=files)
    except Fenced:
        run.delete(*run.list(prefix))  # the taker may have finished and removed all exports already
        raise


def trained_already(campaign: Campaign, run: Run) -> bool:
    """Whether a run has published, and still counts, which is said; nothing of it is left half done then."""
    if published := run.published(campaign.store):
        _remove_exports(campaign.store.sub(run.folder))
        if run.kind.task == "distill":
            single_network(campaign, run.role)
        say(f"{run.name}: finished already")  # the weights that it started from may be gone by now
    return published


def promote(store: Store, log: Log) -> None:
    """Copy what the log says was published to `expert/`, its card last; nothing to do if it is there."""
    entry = log.publication()
    assert entry is not None
    source = f"run/{entry.export}"
    try:
        if not store.exists(f"expert/{CARD}"):
            for file in entry.files:
                if file.path != CARD:
                    store.copy(f"{source}/{file.path}", f"expert/{file.path}")
                    read_file(store, "expert", file)
            card = read_file(store, source, next(file for file in entry.files if file.path == CARD))
            if key := os.environ.get(KEY):  # before the card: once that is there nobody comes back to sign
                sign(store, "expert", {file.path: file.sha256 for file in entry.files}, Path(key))
            store.create(f"expert/{CARD}", card)
    except StoreError as error:
        # A conflict is with another process, which copied the same bytes meanwhile.
        if not store.exists(f"expert/{CARD}"):
            if isinstance(error, Absent):  # an export goes once it is copied
                fix = f"restore it, or remove {store.name('run')} too to train it again"
                raise StoreError(f"{store.name('expert')} was published, and is gone", fix) from None
            raise
    _remove_exports(store)


def check_published(store: Store) -> None:
    """Refuse a network in a run's folder that is not the one that the run's log says was published."""
    if not store.exists("run/log/000000.json"):
        return  # carried here without its log: only a signature says whose it is
    entry = Log(store.sub("run"), "").publication()
    hashes = {file.path: file.sha256 for file in entry.files} if entry is not None else {}
    if hashes and hashes.get(CARD) != sha256(store.get(f"expert/{CARD}")):
        fix = "copy the folder again from where it was trained, or remove it and run/ to train it again"
        raise StoreError(f"{store.name('expert')}/{CARD} is not the one that its run published", fix)


def _remove_exports(store: Store) -> None:
    run = store.sub("run")  # whoever copied its export to `expert/` may have died before this
    run.delete(*run.list("export"))
