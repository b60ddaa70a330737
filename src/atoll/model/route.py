"""Which experts answer for a sample: weights from the router's logits, as a pure function.

The randomness comes in as uniforms, drawn per sample from a stream of their own, so a sample's
experts depend neither on its batch nor on its starting noise.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from atoll.base.errors import ConfigError
from atoll.model.routing import STRATEGIES, Routing


def route(
    routing: Routing,
    logits: Float[Tensor, "B K"],
    uniforms: Float[Tensor, "B n"],
    labels: Int[Tensor, "B"] | None = None,
) -> Float[Tensor, "B K"]:
    """Compute the weight of every expert for every sample; rows sum to 1.

    Computed in float64, returned in the dtype of the logits (at least float32). A row without any finite
    logit, or with a NaN, comes back as NaN.

    Args:
        routing: the strategy.
        logits: of p(k | x_t, t, condition), up to a constant per row; -inf = this expert is missing, and its
            weight is exactly 0.
        uniforms: on [0, 1), `n >= routing.uniforms`.
        labels: the cluster of every sample, for `oracle`.

    Raises:
        ConfigError: k above K, oracle without labels or with a label that has no expert, or a function that
            gives no weights.
    """
    batch, experts = logits.shape
    assert uniforms.shape[0] == batch and uniforms.shape[1] >= routing.uniforms, "too few uniforms"
    routing.check(experts)
    if routing.needs_labels:
        weights = _one_hot(labels, logits)
    elif routing.function is not None:
        weights = _checked(routing, routing.function(logits, uniforms[:, : routing.uniforms]), logits)
    else:
        p = torch.softmax(logits.double() / routing.temperature, dim=-1)
        rule = STRATEGIES[routing.strategy].weights
        assert rule is not None
        weights = rule(routing, p, uniforms[:, : routing.uniforms])
    return weights.to(torch.promote_types(logits.dtype, torch.float32))


def _one_hot(labels: Tensor | None, logits: Tensor) -> Tensor:
    if labels is None:
        raise ConfigError(
            "routing 'oracle' without cluster labels", "give labels, or choose another strategy"
        )
    experts = logits.shape[1]
    known = (labels >= 0) & (labels < experts)
    present = logits.gather(-1, labels.long().clamp(0, experts - 1)[:, None])[:, 0] > -torch.inf
    if not bool((known & present).all()):
        absent = int(labels[~(known & present)][0])
        raise ConfigError(f"routing 'oracle': cluster {absent} has no expert", "choose another strategy")
    return torch.nn.functional.one_hot(labels.long(), experts).double()


def _checked(routing: Routing, weights: object, logits: Tensor) -> Tensor:
    """The weights of a user's function, if they are some."""
    if not isinstance(weights, Tensor) or weights.shape != logits.shape:
        raise ConfigError(
            f"routing {str(routing)!r} gave no weights of shape {tuple(logits.shape)}", "return (B, K)"
        )
    sums = weights.sum(-1)
    if bool((weights < 0).any()) or not torch.allclose(sums, torch.ones_like(sums), atol=1e-4):
        raise ConfigError(f"routing {str(routing)!r} gave weights that do not sum to 1", "normalise them")
    if bool((weights[logits == -torch.inf] != 0).any()):
        raise ConfigError(f"routing {str(routing)!r} chose an expert that is missing", "mind logits of -inf")
    return weights
