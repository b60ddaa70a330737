"""One expert: a diffusers network and its card, seen as a denoiser."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from atoll.base.batch_invariant import make_batch_invariant
from atoll.base.condition import Condition
from atoll.flow.prediction import flow_velocity
from atoll.flow.schedule import schedule
from atoll.flow.settings import Prediction
from atoll.model.card import Card
from atoll.networks.families import family
from atoll.networks.router import Router


@dataclass
class Expert:
    """A denoiser: a diffusers network trained on any schedule and prediction, converted at its edge.

    Attributes:
        card: what it is, once published.
        bound: largest absolute value of its data, if there is one. A card tells it better.
        learning: the network is still trained, so its layers stay as they are (`make_batch_invariant`).
    """

    network: nn.Module
    family: str
    prediction: Prediction
    schedule: str
    card: Card | None = None
    bound: float | None = None
    learning: bool = False

    def __post_init__(self) -> None:
        if not self.learning:  # else a sample would depend on its batch
            make_batch_invariant(self.network)

    def velocity(
        self, x_t: Float[Tensor, "B C H W"], t: Float[Tensor, "B"], cond: Condition
    ) -> Float[Tensor, "B C H W"]:
        """Rectified-flow velocity of this expert (see `base.condition.Denoiser`)."""
        adapter, curve = family(self.family), schedule(self.schedule)
        dtype = next((p.dtype for p in self.network.parameters()), x_t.dtype)

        def predict(x: Tensor, tau: Tensor) -> Tensor:
            # The network computes in the type of its weights; what surrounds it stays in the sampler's.
            return adapter.predict(self.network, x.to(dtype), tau * curve.clock, cond).to(x.dtype)

        # Near noise a conversion from eps magnifies errors; pixels are known to lie in [-1, 1].
        bound = self.bound if self.card is None else bound_of(self.card.latents)
        return flow_velocity(predict, self.prediction, curve, x_t, t, bound)


def bound_of(latents: Mapping[str, Any]) -> float | None:
    """Largest absolute value of what an autoencoder (by its `producer()`) makes: pixels are in [-1, 1]."""
    return 1.0 if latents["name"] == "none" else None


@dataclass
class RouterModel:
    """The router network and its card."""

    network: Router
    card: Card

    def __post_init__(self) -> None:
        make_batch_invariant(self.network)

    def logits(
        self, x_t: Float[Tensor, "B C H W"], t: Float[Tensor, "B"], cond: Condition
    ) -> Float[Tensor, "B K"]:
        """Logits of `p(k | x_t, t, cond)`, computed in the type of the network's weights."""
        dtype = next(self.network.parameters()).dtype
        result: Tensor = self.network(x_t.to(dtype), t, cond).to(x_t.dtype)
        return result
