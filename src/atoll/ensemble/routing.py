"""Which experts answer for a sample: weights from the router's logits, as a pure function.

The randomness comes in as uniforms, drawn per sample from a stream of their own, so a sample's
experts depend neither on its batch nor on its starting noise.
"""

import re
from typing import Any, Literal, Self

import torch
from jaxtyping import Float, Int
from pydantic import ConfigDict, model_validator
from torch import Tensor

from atoll.base.config import Config
from atoll.base.errors import ConfigError, nearest

Strategy = Literal["full", "top-k", "threshold", "sample-k", "nucleus", "oracle", "once"]

_USES: dict[Strategy, tuple[str, ...]] = {
    "full": (),
    "top-k": ("k",),
    "threshold": ("p",),
    "sample-k": ("k", "temperature"),
    "nucleus": ("p", "temperature"),
    "oracle": (),
    "once": ("temperature",),
}
_ALIASES = {"commit": "once"}
"""Earlier names of strategies."""
_FORMS = "full, top-K, threshold(P), sample-K, sample-K(T), nucleus(P), nucleus(P,T), oracle, once, once(T)"
_GRAMMAR = re.compile(
    r"(?P<word>[a-z]+)(?:-(?P<dash>[^\s()]+))?(?:\((?P<args>[^()]*)\))?(?:\s+every\s+(?P<every>\S+))?"
)


class Routing(Config):
    """A routing strategy (DDM table 1, and `once`), and how often the router is asked."""

    model_config = ConfigDict(allow_inf_nan=True)  # refused below, by the name of the strategy

    strategy: Strategy = "once"
    """full, top-k, threshold, sample-k, nucleus, oracle, or once (drawn once per sample and kept)."""
    k: int = 1
    """Experts kept (top-k) or draws with replacement (sample-k)."""
    p: float | None = None
    """Smallest weight kept (threshold) or probability mass kept (nucleus), in (0, 1]; needed by these two."""
    temperature: float = 1.0
    """Divides the logits before a draw (sample-k, nucleus, once)."""
    every: int = 1
    """The router is asked every so many steps (once: at the first only); weights are kept in between."""
    null: "Routing | None" = None
    """Strategy of guidance's null branch, on its own posterior. Without one, it has the conditional branch's
    experts; under `full` its own posterior all the same."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.null is not None and (self.null.strategy in ("once", "oracle") or self.null.null):
            raise ConfigError(
                f"routing {self.strategy!r} with null {str(self.null)!r}",
                "the null branch takes full, top-K, threshold(P), sample-K or nucleus(P)",
            )
        uses = (*_USES[self.strategy], *(() if self.strategy == "once" else ("every",)))
        for name in ("k", "p", "temperature", "every"):
            if name not in uses and getattr(self, name) != type(self).model_fields[name].default:
                raise ConfigError(f"routing {self.strategy!r} has no {name}", "leave it out")
        if self.k < 1:
            raise ConfigError(f"routing {self.strategy!r} with k = {self.k}", "give k of 1 or more")
        if "p" in uses and (self.p is None or not 0 < self.p <= 1):
            raise ConfigError(f"routing {self.strategy!r} with p = {self.p}", "give p above 0, at most 1")
        if not 0 < self.temperature < float("inf"):
            raise ConfigError(
                f"routing {self.strategy!r} at temperature {self.temperature}", "give one above 0"
            )
        if self.every < 1:
            raise ConfigError(f"routing {self.strategy!r} every {self.every} steps", "give 1 or more")
        return self

    @classmethod
    def named(cls, text: str) -> Self:
        """The routing of a name: "top-2", "nucleus(0.9, 2)", "top-1 every 5", "once null sample-1".

        Raises:
            ConfigError: no strategy is called so, or a number is missing, malformed or out of range.
        """
        own, word_null, null = text.strip().lower().partition(" null ")
        match = _GRAMMAR.fullmatch(own.strip())
        word, dash, args, every = match.group("word", "dash", "args", "every") if match else (None,) * 4
        word = _ALIASES.get(str(word), word)
        strategy = next((s for s in _USES if s.removesuffix("-k") == word), None)
        if strategy is None:
            raise ConfigError(f"there is no routing {text!r}", nearest(text, _FORMS.split(", ")))
        values = [v.strip() for v in (dash, *(args or "").split(",")) if v and v.strip()]
        names = _USES[strategy]
        needed = sum(name in ("k", "p") for name in names)
        if not needed <= len(values) <= len(names) or ("k" in names and dash is None):
            raise ConfigError(f"routing {text!r} does not have the form of {word!r}", f"valid: {_FORMS}")
        settings: dict[str, Any] = dict(zip(names, values, strict=False))
        settings |= ({"every": every} if every else {}) | ({"null": cls.named(null)} if word_null else {})
        return cls.parse({"strategy": strategy, **settings}, f"routing {text!r}")

    def __str__(self) -> str:
        """The canonical name; `Routing.named` reads it back."""
        name = self.strategy.replace("-k", f"-{self.k}")
        args = [] if self.p is None else [repr(self.p)]
        args += [] if self.temperature == 1 else [repr(self.temperature)]
        suffix = "" if self.every == 1 else f" every {self.every}"
        suffix += "" if self.null is None else f" null {self.null}"
        return name + (f"({', '.join(args)})" if args else "") + suffix

    @property
    def of_null(self) -> "Routing | None":
        """How the null branch of guidance is routed; None where it has the conditional branch's experts."""
        return self if self.null is None and self.strategy == "full" else self.null

    def possible(self, experts: int) -> bool:
        """Whether there are experts enough, both branches looked at."""
        enough = self.strategy != "top-k" or self.k <= experts
        return enough and (self.null is None or self.null.possible(experts))


def uniforms_needed(routing: Routing) -> int:
    """How many uniforms per sample one call of `route` uses."""
    return {"sample-k": routing.k, "nucleus": 1, "once": 1}.get(routing.strategy, 0)


def asked_at(routing: Routing, step: int) -> bool:
    """Whether the router is asked at this step (from 0; steps, not calls); otherwise weights are kept."""
    return step == 0 if routing.strategy == "once" else step % routing.every == 0


def route(
    routing: Routing,
    logits: Float[Tensor, "B K"],
    uniforms: Float[Tensor, "B n"],
    labels: Int[Tensor, "B"] | None = None,
) -> Float[Tensor, "B K"]:
    """The weight of every expert for every sample; rows sum to 1.

    Computed in float64, returned in the dtype of the logits (at least float32). A row without any finite
    logit, or with a NaN, comes back as NaN.

    Args:
        routing: the strategy.
        logits: of p(k | x_t, t, condition), up to a constant per row; -inf = this expert is missing, and its
            weight is exactly 0.
        uniforms: on [0, 1), `n >= uniforms_needed(routing)`.
        labels: the cluster of every sample, for `oracle`.

    Raises:
        ConfigError: k above K, or oracle without labels or with a label that has no expert.
    """
    batch, experts = logits.shape
    assert uniforms.shape[0] == batch and uniforms.shape[1] >= uniforms_needed(routing), "too few uniforms"
    p = torch.softmax(logits.double() / routing.temperature, dim=-1)
    bound = 1.0 if routing.p is None else routing.p
    if routing.strategy == "top-k":
        if routing.k > experts:
            raise ConfigError(
                f"routing {str(routing)!r} with {experts} experts", f"give k of at most {experts}"
            )
        weights = _keep(p, torch.zeros_like(p).scatter(-1, p.topk(routing.k).indices, 1))
    elif routing.strategy == "threshold":
        top = torch.zeros_like(p).scatter(-1, p.argmax(-1, keepdim=True), 1)
        weights = _keep(p, torch.where(p > bound, 1, top))
    elif routing.strategy == "oracle":
        weights = _one_hot(labels, logits)
    elif routing.strategy == "full":
        weights = p
    else:
        p = _nucleus(p, bound) if routing.strategy == "nucleus" else p
        weights = _draw(p, uniforms[:, : uniforms_needed(routing)])
    return weights.to(torch.promote_types(logits.dtype, torch.float32))


def _keep(p: Tensor, mask: Tensor) -> Tensor:
    kept = p * mask
    return kept / kept.sum(-1, keepdim=True)


def _nucleus(p: Tensor, mass: float) -> Tensor:
    """The smallest set of experts with at least this mass, renormalised (arXiv 1904.09751)."""
    falling, order = p.sort(stable=True, dim=-1, descending=True)
    before = falling.cumsum(-1) - falling
    return _keep(p, torch.zeros_like(p).scatter(-1, order, (before < mass).to(p.dtype)))


def _draw(p: Tensor, uniforms: Tensor) -> Tensor:
    """Counts / n of n draws with replacement, by inverse CDF; an expert with p = 0 is never drawn."""
    cdf = p.cumsum(-1)
    point = uniforms.to(p) * cdf[:, -1:]
    last = (p > 0).cumsum(-1).argmax(-1, keepdim=True)  # rounding must not lead past the last expert present
    drawn = torch.searchsorted(cdf, point.contiguous(), right=True).minimum(last)
    counts = torch.zeros_like(p).scatter_add(-1, drawn, torch.ones_like(point))
    return counts / uniforms.shape[1] + 0 * cdf[:, -1:]  # a NaN stays one, instead of choosing an expert


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
