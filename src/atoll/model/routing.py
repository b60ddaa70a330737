"""A routing: a strategy for the conditional branch, when the router is asked, and the null branch's strategy.

A new strategy is one entry of `STRATEGIES`, here or in a file of your own. Settings name strategies and are
read without torch, so nothing here imports it before weights are computed, which `dispatch.py` does.
"""

import inspect
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import BeforeValidator, ConfigDict, Field, PlainSerializer, model_validator

from atoll.base.config import Config
from atoll.base.errors import ConfigError, nearest
from atoll.base.text import many

if TYPE_CHECKING:
    from torch import Tensor

PRETRAIN: Literal["pretrain"] = "pretrain"
LARGEST_K = 4096
"""Most clusters of a model."""
WeightFunction = Callable[[Any, Any], Any]
"""A user's own strategy: of logits `(B, K)` and uniforms `(B, 1)` on [0, 1) the weights `(B, K)`."""
_GRAMMAR = re.compile(
    r"(?P<word>[a-z]+)(?:-(?P<dash>[^\s()]+))?(?:\((?P<args>[^()]*)\))?(?:\s+every\s+(?P<every>\S+))?"
    r"(?:\s+without\s+(?P<without>\d{1,4}(?:\s*,\s*\d{1,4})*))?"
)

_NUMBERS = str.maketrans({"K": "1", "P": "0.9", "T": "2"})  # in place of placeholders a form may be copied


def _forms() -> str:
    return ", ".join(entry.forms for entry in STRATEGIES.values() if entry.forms)


class Routing(Config):
    """A routing strategy (DDM table 1, and `once`), how often the router is asked, and the null branch's."""

    model_config = ConfigDict(allow_inf_nan=True)  # refused below, by the name of the strategy

    strategy: str = "once"
    """Routing strategy: full, top-k, threshold, sample-k, nucleus, oracle, once, or another key of
    `STRATEGIES`."""
    k: int = 1
    """Number of experts (top-k), or of draws with replacement (sample-k); at most 4096."""
    p: float | None = None
    """Minimum weight (threshold) or probability mass (nucleus), in (0, 1]; these two need it."""
    temperature: float = 1.0
    """Temperature of the logits for sampling an expert (sample-k, nucleus, once), from 1e-6 to 1e6."""
    every: int = 1
    """Steps between evaluations of the router; `once` evaluates it at the first step only."""
    without: tuple[int, ...] = ()
    """Experts to leave out in both branches, as if they were missing."""
    function: WeightFunction | None = Field(default=None, repr=False)
    """A routing function of your own."""
    null: "Routing | Literal['pretrain'] | None" = None
    """Strategy of the unconditional branch, or `pretrain` for the network of shared pretraining. By default
    the experts of the conditional branch; `full` uses the router's answer without the condition."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.strategy not in STRATEGIES or (self.strategy == "function") != (self.function is not None):
            raise ConfigError(f"there is no routing {self.strategy!r}", f"valid: {_forms()}")
        if self.function is not None:
            try:
                hash(self.function)
                with suppress(ValueError):  # a builtin does not tell
                    inspect.signature(self.function).bind(None, None)
            except TypeError:
                fix = "give a function of logits and uniforms, or an object with a hash"
                raise ConfigError(f"routing {str(self)!r} is no strategy", fix) from None
        null = self.null
        if isinstance(null, Routing) and (null.rule.fixed or null.null or null.without):
            fix = "the null branch takes full, top-K, threshold(P), sample-K, nucleus(P) or pretrain"
            raise ConfigError(f"routing {self.strategy!r} with null {str(null)!r}", fix)
        if self.without and (self.needs_labels or sorted({*self.without}) != list(self.without)):
            fix = "give a strategy that asks the router, and each expert once, in order"
            raise ConfigError(f"routing {self.strategy!r} without {self.without}", fix)
        uses = (*self.rule.parameters, *(() if self.rule.fixed else ("every",)))
        for name in ("k", "p", "temperature", "every"):
            if name not in uses and getattr(self, name) != type(self).model_fields[name].default:
                raise ConfigError(f"routing {self.strategy!r} has no {name}", "leave it out")
        for wrong, value, fix in (
            (not 1 <= self.k <= LARGEST_K, f"with k = {self.k}", f"give k from 1 to {LARGEST_K}"),
            ("p" in uses and not 0 < (self.p or 0) <= 1, f"with p = {self.p}", "give p above 0, at most 1"),
            (not 1e-6 <= self.temperature <= 1e6, f"at temperature {self.temperature}", "give 1e-6 to 1e6"),
            (self.every < 1, f"every {self.every} steps", "give 1 or more"),
        ):
            if wrong:
                raise ConfigError(f"routing {self.strategy!r} {value}", fix)
        return self

    @classmethod
    def of(cls, value: Any) -> Any:
        """The routing of a name or of a function; anything else as it is, for pydantic to judge."""
        if isinstance(value, str):
            return cls.named(value)
        return cls(strategy="function", function=value) if callable(value) else value

    @classmethod
    def named(cls, text: str) -> Self:
        """Parse a name, such as "nucleus(0.9, 2)", "top-1 every 5" or "once null sample-1"."""
        # The null branch comes last, so that "every" and "without" may belong to either branch.
        conditional, word_null, null = text.strip().lower().partition(" null ")
        match = _GRAMMAR.fullmatch(conditional.strip())
        word, dash, args, every, without = match.groups() if match else (None,) * 5
        entries = {name.removesuffix("-k"): name for name, entry in STRATEGIES.items() if entry.forms}
        if word not in entries or " null " in null:  # that of a null branch has none of its own
            forms = [*_forms().split(", "), f"once null {PRETRAIN}"]
            names = [form.translate(_NUMBERS) for form in forms]
            raise ConfigError(f"there is no routing {text!r}", nearest(text, names, forms))
        parameters = STRATEGIES[entries[word]].parameters
        values = [v.strip() for v in (dash, *(args or "").split(",")) if v and v.strip()]
        needed = sum(name in ("k", "p") for name in parameters)
        if not needed <= len(values) <= len(parameters) or ("k" in parameters and dash is None):
            right = STRATEGIES[entries[word]].forms.translate(_NUMBERS)
            right += "" if STRATEGIES[entries[word]].fixed else f", {right.partition(',')[0]} every 5"
            raise ConfigError(f"routing {text!r} is no form of {entries[word]}", f"write {right}")
        settings: dict[str, Any] = dict(zip(parameters, values, strict=False))
        settings |= {"every": every} if every else {}
        if word_null:
            settings["null"] = PRETRAIN if null.strip() == PRETRAIN else cls.named(null)
        settings |= {"without": sorted({int(n) for n in without.split(",")})} if without else {}
        return cls.parse({"strategy": entries[word], **settings}, f"routing {text!r}")

    def __str__(self) -> str:
        """The canonical name; `Routing.named` reads it back, unless it is a function."""
        name = self.strategy.replace("-k", f"-{self.k}")
        if self.function is not None:
            name = getattr(self.function, "__name__", type(self.function).__name__)
        args = [] if self.p is None else [repr(self.p)]
        args += [] if self.temperature == 1 else [repr(self.temperature)]
        suffix = "" if self.every == 1 else f" every {self.every}"
        suffix += f" without {','.join(map(str, self.without))}" if self.without else ""
        suffix += "" if self.null is None else f" null {self.null}"
        return name + (f"({', '.join(args)})" if args else "") + suffix

    @property
    def named_only(self) -> bool:
        """Whether its name says all: a function's does not say what it computes, so nothing is kept by it."""
        return self.function is None and (not isinstance(self.null, Routing) or self.null.named_only)

    @property
    def rule(self) -> "Strategy":
        """What its strategy computes."""
        return STRATEGIES[self.strategy]

    @property
    def needs_labels(self) -> bool:
        """Whether the cluster of every sample has to be given, in place of the router's answer."""
        return self.rule.weights is None and self.function is None

    @property
    def uniforms(self) -> int:
        """Uniforms per sample that one call of `route` uses."""
        return self.rule.uniforms(self)

    @property
    def of_null(self) -> "Routing | None":
        """How guidance's null branch is routed; None where no router is asked for it."""
        if isinstance(self.null, Routing):
            return self.null
        return self if self.null is None and self.rule.own_null else None

    def asks_at(self, step: int) -> bool:
        """Whether the router is asked at this step (from 0; steps, not calls)."""
        return step == 0 if self.rule.fixed else step % self.every == 0

    def experts_per_step(self, k: int) -> int:
        """Most experts of K that one branch of a sample is evaluated by at a step."""
        return min(self.rule.experts(self) or k, k)

    def possible(self, experts: int) -> bool:
        """Whether there are experts enough, both branches looked at."""
        left = experts - len(self.without)
        null = self.null if isinstance(self.null, Routing) else None
        return max(1, self.rule.least(self)) <= left and (null is None or null.possible(left))

    def check(self, experts: int, pretrained: bool = True) -> Self:
        """Itself; `ConfigError` if it wants, or leaves out, networks that there are not."""
        name = f"routing {str(self)!r}"
        if self.null == PRETRAIN and not pretrained:
            fix = "where budget.pretrain is above 0, run 'atoll assemble'; else take another null branch"
            raise ConfigError(f"{name}: there is no network of shared pretraining", fix)
        if self.without and self.without[-1] >= experts:
            raise ConfigError(f"{name}: there is no expert {self.without[-1]}", f"stay below {experts}")
        if not self.possible(experts):
            left = experts - len(self.without)
            fix = f"give k of at most {left}" if left else "leave fewer out"
            raise ConfigError(f"{name} with {experts} experts", fix)
        return self

    def describe(self) -> str:
        """Say what it does, in words."""
        words = self.rule.words(self)
        words += f", asked every {self.every} steps" if self.every > 1 else ""
        words += f", without {' and '.join(map(str, self.without))}" if self.without else ""
        if self.null is None:
            return words
        null = "the network of shared pretraining" if self.null == PRETRAIN else self.null.describe()
        return f"{words}; unconditional branch: {null}"


RoutingField = Annotated[Routing, BeforeValidator(Routing.of), PlainSerializer(str, return_type=str)]
"""A routing among settings: written as its name, parsed once."""


@dataclass(frozen=True)
class Strategy:
    """What a strategy computes, and what it needs and costs."""

    forms: str  # how it is written, for messages; `K`, `P` and `T` stand for numbers
    words: "Callable[[Routing], str]"  # what it does, for tables and reports
    # (B, K) of the router's probabilities (B, K) in float64 and uniforms (B, n); None without the router.
    weights: "Callable[[Routing, Tensor, Tensor], Tensor] | None" = None
    parameters: tuple[str, ...] = ()  # fields of `Routing` that it uses, in the order of its arguments
    uniforms: "Callable[[Routing], int]" = lambda routing: 0  # n, for each sample
    experts: "Callable[[Routing], int | None]" = lambda routing: None  # most at a step; None for all
    least: "Callable[[Routing], int]" = lambda routing: 1  # fewest experts that there have to be
    fixed: bool = False  # a sample's experts are known before the first step and stay
    own_null: bool = False  # guidance's null branch goes by its own posterior, which makes the flow exact


def keep(p: "Tensor", mask: "Tensor") -> "Tensor":
    """Probabilities where the mask is 1, renormalised."""
    kept = p * mask  # a NaN stays one, in either factor: no expert is chosen by it in silence
    return kept / kept.sum(-1, keepdim=True)


def draw(p: "Tensor", uniforms: "Tensor") -> "Tensor":
    """Counts / n of n draws with replacement, by inverse CDF; an expert with p = 0 is never drawn."""
    import torch  # here, since settings name strategies and are read without it

    cdf = p.cumsum(-1)
    point = uniforms.to(p) * cdf[:, -1:]
    last = (p > 0).cumsum(-1).argmax(-1, keepdim=True)  # rounding must not lead past the last expert present
    drawn = torch.searchsorted(cdf, point.contiguous(), right=True).minimum(last)
    counts = p.new_zeros(p.shape).scatter_add(-1, drawn, torch.ones_like(point))
    return counts / uniforms.shape[1] + 0 * cdf[:, -1:]  # a NaN stays one, instead of choosing an expert


def _threshold(routing: Routing, p: "Tensor", uniforms: "Tensor") -> "Tensor":
    # The top one always stays: with many experts none may reach the threshold.
    top = p.new_zeros(p.shape).scatter(-1, p.argmax(-1, keepdim=True), 1)
    return keep(p, top.masked_fill(p > (routing.p or 0), 1))


def _nucleus(routing: Routing, p: "Tensor", uniforms: "Tensor") -> "Tensor":
    # From the smallest set of experts with at least this mass (arXiv 1904.09751).
    falling, order = p.sort(stable=True, dim=-1, descending=True)
    before = falling.cumsum(-1) - falling
    nucleus = p.new_zeros(p.shape).scatter(-1, order, (before < (routing.p or 0)).to(p.dtype))
    return draw(keep(p, nucleus), uniforms)


STRATEGIES: dict[str, Strategy] = {
    "full": Strategy(
        "full", lambda r: "all experts, weighted by the router", lambda r, p, u: p, own_null=True
    ),
    "top-k": Strategy(
        "top-K",
        lambda r: f"the {f'{r.k} most likely experts' if r.k > 1 else 'most likely expert'} at each step",
        lambda r, p, u: keep(p, p.new_zeros(p.shape).scatter(-1, p.topk(r.k).indices, 1)),
        ("k",),
        experts=lambda r: r.k,
        least=lambda r: r.k,
    ),
    "threshold": Strategy(
        "threshold(P)", lambda r: f"all experts with a probability above {r.p:g}", _threshold, ("p",)
    ),
    "sample-k": Strategy(
        "sample-K, sample-K(T)",
        lambda r: f"{many(r.k, 'expert')} drawn at each step",
        lambda r, p, u: draw(p, u),
        ("k", "temperature"),
        uniforms=lambda r: r.k,
        experts=lambda r: r.k,
    ),
    "nucleus": Strategy(
        "nucleus(P), nucleus(P,T)",
        lambda r: f"1 expert drawn at each step, of the most likely with {r.p:g} in total",
        _nucleus,
        ("p", "temperature"),
        uniforms=lambda r: 1,
        experts=lambda r: 1,
    ),
    "oracle": Strategy(
        "oracle", lambda r: "the expert of the image's own cluster", experts=lambda r: 1, fixed=True
    ),
    "once": Strategy(
        "once, once(T)",
        lambda r: "1 expert drawn for each image, at its start",
        lambda r, p, u: draw(p, u),
        ("temperature",),
        uniforms=lambda r: 1,
        experts=lambda r: 1,
        fixed=True,
    ),
    "function": Strategy("", lambda r: "a function of your own", uniforms=lambda r: 1),
}
