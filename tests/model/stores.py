"""Published experts for tests, and the ways to hold an ensemble of them."""

from atoll.model.checkpoint import Checkpoint
from atoll.model.expert import Expert, StoredExpert
from atoll.networks.settings import DataShape
from atoll.store.store import Store
from helpers_networks import card


def publish(store: Store, number: int, expert: Expert, shape: DataShape) -> str:
    """Write an expert as training would; its folder."""
    weights = dict(expert.network.named_parameters())
    own = {name: getattr(expert, name) for name in ("family", "prediction", "schedule")}
    about = card(island=number, condition="text" if shape.text_width else "class", shape=shape, **own)
    Checkpoint(store, f"experts/{number}").write(expert.network, weights, about)
    return f"experts/{number}"


def on_disk(store: Store, experts: list[Expert], shape: DataShape) -> list[StoredExpert | None]:
    """The same experts as files."""
    return [Checkpoint(store, publish(store, k, e, shape)).open_lazily() for k, e in enumerate(experts)]
