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

    Returned in the dtype of the logits (at least float32). A row without any finite logit, or with a NaN,
    comes back as NaN.

    Args:
        routing: the strategy.
        logits: of p(k | x_t, t, condition), up to a constant per row; -inf = this expert is missing, and its
            weight is exactly 0.
        uniforms: on [0, 1), `n >= routing.uniforms`.
        labels: the cluster of every sample, for `oracle`.
    """
    batch, experts = logits.shape
    assert uniforms.shape[0] == batch and uniforms.shape[1] >= routing.uniforms, "too few uniforms"
    routing.check(experts)
    name, draws = f"routing {str(routing)!r}", uniforms[:, : routing.uniforms]
    if routing.needs_labels:
        if labels is None:
            raise ConfigError(f"{name} without cluster labels", "give labels, or choose another strategy")
        present = logits.gather(-1, labels.long().clamp(0, experts - 1)[:, None])[:, 0] > -torch.inf
        known = (labels >= 0) & (labels < experts) & present
        if not bool(known.all()):
            absent = int(labels[~known][0])
            raise ConfigError(f"{name}: cluster {absent} has no expert", "choose another strategy")
        weights = torch.nn.functional.one_hot(labels.long(), experts).double()
    elif routing.function is not None:
        # A function of the user's: weights that are none would only show as bad pictures.
        weights = routing.function(logits, draws)
        if not isinstance(weights, Tensor) or weights.shape != logits.shape:
            raise ConfigError(f"{name} gave no weights of shape {tuple(logits.shape)}", "return (B, K)")
        sums = weights.sum(-1)
        if bool((weights < 0).any()) or not torch.allclose(sums, torch.ones_like(sums), atol=1e-4):
            raise ConfigError(f"{name} gave weights that do not sum to 1", "normalise them")
        if bool((weights[logits == -torch.inf] != 0).any()):
            raise ConfigError(f"{name} chose an expert that is missing", "mind logits of -inf")
    else:
        # In float64, so that sums over many experts add no rounding of their own: a draw compares them.
        p = torch.softmax(logits.double() / routing.temperature, dim=-1)
        rule = STRATEGIES[routing.strategy].weights
        assert rule is not None
        weights = rule(routing, p, draws)
    return weights.to(torch.promote_types(logits.dtype, torch.float32))
