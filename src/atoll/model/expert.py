"""One expert: a diffusers network and its card, seen as a denoiser."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from jaxtyping import Float
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor, nn

from atoll.base.alike import rows_alike
from atoll.base.condition import Condition
from atoll.base.errors import StoreError, first_line
from atoll.base.hashing import digest, digest_tensors
from atoll.flow.prediction import flow_velocity
from atoll.flow.schedule import schedule
from atoll.flow.settings import Prediction
from atoll.model.card import Card
from atoll.networks.checkpoint import WEIGHTS
from atoll.networks.families import family
from atoll.networks.router import Router
from atoll.store.store import Store


@dataclass
class Expert:
    """A denoiser: a network trained on any schedule and prediction type, converted at its edge.

    Attributes:
        network: the diffusers network.
        family: name of its family.
        prediction: what it predicts.
        schedule: name of the noise schedule it was trained on.
        card: what it is, once published.
        bound: largest absolute value of its data, if there is one. A card tells it better.
        learning: the network is still trained, so its layers stay as they are (`rows_alike`).
    """

    network: nn.Module
    family: str
    prediction: Prediction
    schedule: str
    card: Card | None = None
    bound: float | None = None
    learning: bool = False

    def __post_init__(self) -> None:
        """See to it that a sample does not depend on its batch."""
        if not self.learning:
            rows_alike(self.network)

    def velocity(
        self, x_t: Float[Tensor, "B C H W"], t: Float[Tensor, "B"], cond: Condition
    ) -> Float[Tensor, "B C H W"]:
        """Rectified-flow velocity of this expert (see `base.condition.Denoiser`)."""
        adapter, curve = family(self.family), schedule(self.schedule)
        dtype = next((p.dtype for p in self.network.parameters()), x_t.dtype)

        def predict(x: Tensor, tau: Tensor) -> Tensor:
            # The network computes in the type of its weights; what surrounds it stays in the sampler's.
            return adapter.predict(self.network, x.to(dtype), tau * curve.clock, cond).to(x.dtype)

        bound = self.bound if self.card is None else bound_of(self.card.latents)
        return flow_velocity(predict, self.prediction, curve, x_t, t, bound)

    @classmethod
    def load(cls, store: Store, prefix: str, device: torch.device | str = "cpu") -> "Expert":
        """Read what `write_part` wrote; `StoreError` if the weights are not those of the card."""
        card, config, weights = read_part(store, prefix)
        network = filled(built(family(card.family).load, config, weights, store.name(prefix)), weights)
        return cls(network.to(device), card.family, card.prediction, card.schedule, card)


def bound_of(latents: Mapping[str, Any]) -> float | None:
    """Largest absolute value of what an autoencoder (by its `producer()`) makes: pixels are in [-1, 1]."""
    return 1.0 if latents["name"] == "none" else None


@dataclass
class RouterModel:
    """The router network and its card."""

    network: Router
    card: Card

    def __post_init__(self) -> None:
        """As an expert's."""
        rows_alike(self.network)

    def logits(
        self, x_t: Float[Tensor, "B C H W"], t: Float[Tensor, "B"], cond: Condition
    ) -> Float[Tensor, "B K"]:
        """Logits of `p(k | x_t, t, cond)`, computed in the type of the network's weights."""
        dtype = next(self.network.parameters()).dtype
        result: Tensor = self.network(x_t.to(dtype), t, cond).to(x_t.dtype)
        return result

    @classmethod
    def load(cls, store: Store, prefix: str) -> "RouterModel":
        """Read what `write_part` wrote."""
        card, config, weights = read_part(store, prefix)
        network = filled(built(Router.from_config, config, weights, store.name(prefix)), weights)
        return cls(cast(Router, network), card)


def built(
    load: Callable[[Mapping[str, Any]], nn.Module],
    config: Mapping[str, Any],
    weights: Mapping[str, Any],
    where: str,
) -> nn.Module:
    """The network of a `config.json`, unfilled, once it is known to be the one of these weights.

    A config may ask for more than any machine has, so first the network is built without memory.

    Args:
        load: builds the network of a config.
        config: from outside.
        weights: what has a `shape`, by name.
        where: the part, for messages.

    Raises:
        StoreError: the config makes no network, or another one than the weights are of.
    """
    try:
        for key, value in config.items():
            if ("layers" in key or "depth" in key) and isinstance(value, int) and value > len(weights):
                raise ValueError(f"{key} is {value}")
        with torch.device("meta"):
            network = load(config)
        _check_types(network, config)
        shapes = {name: tuple(value.shape) for name, value in network.state_dict().items()}
        for name in shapes.keys() ^ weights.keys():
            raise ValueError(f"{'no' if name in shapes else 'a'} tensor {name}")
        for name, shape in shapes.items():
            if shape != tuple(weights[name].shape):
                raise ValueError(f"{name} has shape {tuple(weights[name].shape)} instead of {shape}")
        return load(config)
    except Exception as error:  # a class of diffusers that meets odd settings raises of every kind
        what = f"{where}/config.json makes no network of its weights ({first_line(error)[:200]})"
        raise StoreError(what, "restore it, or make it again") from None


def _check_types(network: nn.Module, config: Mapping[str, Any]) -> None:
    """Refuse a setting of another type than the class's default: some are not looked at before their use."""
    for name, parameter in inspect.signature(type(network).__init__).parameters.items():
        value, kind = config.get(name), type(parameter.default)
        kinds = (int, float) if kind is float else (kind,)
        if value is not None and kind in (bool, int, float, str) and type(value) not in kinds:
            raise ValueError(f"{name} is {value!r}")


def filled(network: nn.Module, weights: Mapping[str, Tensor]) -> nn.Module:
    """The network with these weights, in their own type of numbers, frozen."""
    kinds = {value.dtype for value in weights.values() if value.is_floating_point()}
    if len(kinds) == 1:
        # Not the class's own `to`, which warns of every change of type.
        nn.Module.to(network, dtype=kinds.pop())
    network.load_state_dict(weights)
    return network.eval().requires_grad_(False)


def write_part(
    store: Store, prefix: str, network: nn.Module, weights: Mapping[str, Tensor], card: Card
) -> None:
    """Publish a network: config and weights first, verified, then `card.json` if-absent."""
    settings = settings_of(network)
    store.put_json(f"{prefix}/config.json", settings)
    card = card.model_copy(update={"config_sha256": digest(settings)})
    data = save_tensors(
        {k: v.detach().cpu().contiguous() for k, v in weights.items()}, metadata={"format": "pt"}
    )
    store.put(f"{prefix}/{WEIGHTS}", data)
    if digest_tensors(load_tensors(store.get(f"{prefix}/{WEIGHTS}"))) != card.weights_sha256:
        raise StoreError(f"{store.name(prefix)}/{WEIGHTS} reads back differently", "check the disk")
    store.create_json(f"{prefix}/card.json", card.to_json())


def settings_of(network: nn.Module) -> dict[str, Any]:
    """Class and arguments of a network, as diffusers writes them into `config.json`."""
    config = dict(network.config)  # type: ignore[arg-type]
    return {"_class_name": type(network).__name__, **{k: v for k, v in config.items() if k[0] != "_"}}


def read_part(store: Store, prefix: str) -> tuple[Card, dict[str, object], dict[str, Tensor]]:
    """Card, config and verified weights of a published network."""
    card = read_card(store, prefix)
    try:
        weights = load_tensors(store.get(f"{prefix}/{WEIGHTS}"))
    except Exception as error:  # safetensors raises its own type for a damaged header
        if isinstance(error, StoreError):
            raise
        raise StoreError(
            f"{store.name(prefix)}/{WEIGHTS} is damaged", "remove card.json beside it and train again"
        ) from None
    if digest_tensors(weights) != card.weights_sha256:
        raise StoreError(
            f"{store.name(prefix)}/{WEIGHTS} is not what its card says",
            "remove card.json beside it and train again",
        )
    return card, read_config(store, prefix, card), weights


def read_config(store: Store, prefix: str, card: Card) -> dict[str, object]:
    """Class and arguments of a published network; `StoreError` if they are not those of the card."""
    config: dict[str, object] = store.get_json(f"{prefix}/config.json")
    if digest(config) != card.config_sha256:
        fix = "remove card.json beside it and train again"
        raise StoreError(f"{store.name(prefix)}/config.json is not what its card says", fix)
    return config


def read_card(store: Store, prefix: str) -> Card:
    """The card of a published network; `StoreError` if there is none or of another version."""
    return Card.read(store, f"{prefix}/card.json")


def published(store: Store, prefix: str) -> bool:
    """Whether a network was published here (its card exists)."""
    return store.exists(f"{prefix}/card.json")
