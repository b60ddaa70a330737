"""Which strategies there are, what each needs and costs, and the names that routings are written by.

Nothing here imports torch, so that settings can be read without it; `route.py` computes the weights.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, ConfigDict, Field, PlainSerializer, model_validator

from atoll.base.config import Config
from atoll.base.errors import ConfigError, nearest

WeightFunction = Callable[[Any, Any], Any]
"""A user's own strategy: of logits `(B, K)` and uniforms `(B, 1)` on [0, 1) the weights `(B, K)`."""


@dataclass(frozen=True)
class Strategy:
    """One routing strategy: a new one is an entry of `STRATEGIES`, and a rule of its name in `route.py`.

    Attributes:
        form: how it is written; `K` and `P` stand for numbers.
        says: what it does, for tables and reports.
        parameters: fields of `Routing` that it uses, in the order of its arguments.
        draws: uniforms that a sample's weights take.
        experts: most experts that a sample has at a step; None for all of them.
        fixed: a sample's weights are found before the first step and stay.
        labels: it needs the cluster of every sample.
    """

    form: str
    says: str
    parameters: tuple[str, ...] = ()
    draws: Callable[["Routing"], int] = lambda routing: 0
    experts: Callable[["Routing"], int | None] = lambda routing: None
    fixed: bool = False
    labels: bool = False


STRATEGIES: dict[str, Strategy] = {
    "full": Strategy("full", "all experts, weighted by the router"),
    "top-k": Strategy("top-K", "the K likeliest experts at each step", ("k",), experts=lambda r: r.k),
    "threshold": Strategy("threshold(P)", "all experts above a probability, at each step", ("p",)),
    "sample-k": Strategy(
        "sample-K",
        "K draws from the router at each step",
        ("k", "temperature"),
        draws=lambda r: r.k,
        experts=lambda r: r.k,
    ),
    "nucleus": Strategy(
        "nucleus(P)",
        "one draw from the likeliest experts at each step",
        ("p", "temperature"),
        draws=lambda r: 1,
        experts=lambda r: 1,
    ),
    "oracle": Strategy(
        "oracle", "the expert of the row's own cluster", experts=lambda r: 1, fixed=True, labels=True
    ),
    "once": Strategy(
        "once",
        "one expert drawn at the start of each picture, and kept",
        ("temperature",),
        draws=lambda r: 1,
        experts=lambda r: 1,
        fixed=True,
    ),
    "function": Strategy("", "a strategy of your own", ("function",), draws=lambda r: 1),
}
_ALIASES = {"commit": "once"}
"""Earlier names of strategies."""
_FORMS = "full, top-K, threshold(P), sample-K, sample-K(T), nucleus(P), nucleus(P,T), oracle, once, once(T)"
_GRAMMAR = re.compile(
    r"(?P<word>[a-z]+)(?:-(?P<dash>[^\s()]+))?(?:\((?P<args>[^()]*)\))?(?:\s+every\s+(?P<every>\S+))?"
)


class Routing(Config):
    """A routing strategy (DDM table 1, and `once`), how often the router is asked, and the null branch's."""

    model_config = ConfigDict(allow_inf_nan=True)  # refused below, by the name of the strategy

    strategy: str = "once"
    """A key of `STRATEGIES`."""
    k: int = 1
    """Experts kept (top-k) or draws with replacement (sample-k)."""
    p: float | None = None
    """Smallest weight kept (threshold) or probability mass kept (nucleus), in (0, 1]; needed by these two."""
    temperature: float = 1.0
    """Divides the logits before a draw (sample-k, nucleus, once)."""
    every: int = 1
    """The router is asked every so many steps (once: at the first only); weights are kept in between."""
    function: WeightFunction | None = Field(default=None, repr=False)
    """A strategy of the user's own."""
    null: "Routing | None" = None
    """Strategy of guidance's null branch, on its own posterior. Without one, it has the conditional branch's
    experts; under `full` its own posterior all the same."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.strategy not in STRATEGIES or (self.strategy == "function") != (self.function is not None):
            raise ConfigError(f"there is no routing {self.strategy!r}", f"valid: {_FORMS}")
        if self.null is not None and (self.null.fixed_at_start or self.null.null):
            raise ConfigError(
                f"routing {self.strategy!r} with null {str(self.null)!r}",
                "the null branch takes full, top-K, threshold(P), sample-K or nucleus(P)",
            )
        uses = (*self._entry.parameters, *(() if self.strategy == "once" else ("every",)))
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
    def of(cls, value: Any) -> Any:
        """The routing of a name or of a function; anything else as it is."""
        if isinstance(value, str):
            return cls.named(value)
        return cls(strategy="function", function=value) if callable(value) else value

    @classmethod
    def named(cls, text: str) -> Self:
        """Parse a name: "top-2", "nucleus(0.9, 2)", "top-1 every 5", "once null sample-1".

        Raises:
            ConfigError: no strategy is called so, or a number is missing, malformed or out of range.
        """
        conditional, word_null, null = text.strip().lower().partition(" null ")
        match = _GRAMMAR.fullmatch(conditional.strip())
        word, dash, args, every = match.group("word", "dash", "args", "every") if match else (None,) * 4
        word = _ALIASES.get(str(word), word)
        entries = ((name, entry) for name, entry in STRATEGIES.items() if name.removesuffix("-k") == word)
        strategy, entry = next(entries, (None, None))
        if strategy is None or entry is None or not entry.form:
            raise ConfigError(f"there is no routing {text!r}", nearest(text, _FORMS.split(", ")))
        values = [v.strip() for v in (dash, *(args or "").split(",")) if v and v.strip()]
        needed = sum(name in ("k", "p") for name in entry.parameters)
        if not needed <= len(values) <= len(entry.parameters) or ("k" in entry.parameters and dash is None):
            raise ConfigError(f"routing {text!r} does not have the form of {word!r}", f"valid: {_FORMS}")
        settings: dict[str, Any] = dict(zip(entry.parameters, values, strict=False))
        settings |= ({"every": every} if every else {}) | ({"null": cls.named(null)} if word_null else {})
        return cls.parse({"strategy": strategy, **settings}, f"routing {text!r}")

    def __str__(self) -> str:
        """The canonical name; `Routing.named` reads it back, unless it is a function."""
        if self.function is not None:
            name = getattr(self.function, "__name__", type(self.function).__name__)
        else:
            name = self.strategy.replace("-k", f"-{self.k}")
        args = [] if self.p is None else [repr(self.p)]
        args += [] if self.temperature == 1 else [repr(self.temperature)]
        suffix = "" if self.every == 1 else f" every {self.every}"
        suffix += "" if self.null is None else f" null {self.null}"
        return name + (f"({', '.join(args)})" if args else "") + suffix

    @property
    def _entry(self) -> Strategy:
        return STRATEGIES[self.strategy]

    @property
    def fixed_at_start(self) -> bool:
        """Whether a sample's experts are known before the first step, and kept."""
        return self._entry.fixed

    @property
    def needs_labels(self) -> bool:
        """Whether the cluster of every sample has to be given."""
        return self._entry.labels

    @property
    def draws(self) -> int:
        """Uniforms per sample that one call of `route` uses."""
        return self._entry.draws(self)

    @property
    def of_null(self) -> "Routing | None":
        """How the null branch of guidance is routed; None where it has the conditional branch's experts."""
        return self if self.null is None and self.strategy == "full" else self.null

    def asks_at(self, step: int) -> bool:
        """Whether the router is asked at this step (from 0; steps, not calls)."""
        return step == 0 if self.fixed_at_start else step % self.every == 0

    def experts_per_step(self, k: int) -> int:
        """Most experts of K that one branch of a sample is evaluated by at a step."""
        most = self._entry.experts(self)
        return k if most is None else min(most, k)

    def possible(self, experts: int) -> bool:
        """Whether there are experts enough, both branches looked at."""
        enough = self.strategy != "top-k" or self.k <= experts
        return enough and (self.null is None or self.null.possible(experts))

    def check(self, experts: int) -> Self:
        """Itself; `ConfigError` if it wants more experts than there are."""
        if not self.possible(experts):
            raise ConfigError(f"routing {str(self)!r} with {experts} experts", f"give k of at most {experts}")
        return self

    def describe(self) -> str:
        """What it does, in words."""
        words = self._entry.says.replace("K ", f"{self.k} ") if self.k > 1 else self._entry.says
        words = words.replace("the K likeliest experts", "the likeliest expert").replace(
            "K draws", "one draw"
        )
        if self.null is not None:
            words += f"; guidance's null branch: {self.null.describe()}"
        return words


RoutingField = Annotated[Routing, BeforeValidator(Routing.of), PlainSerializer(str, return_type=str)]
"""A routing among settings: written as its name, parsed once."""
