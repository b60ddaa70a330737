"""Imports of diffusers and transformers without what they import and Atoll does not use.

`torch._dynamo`, the compiler, takes longer to import than torch itself, and `diffusers.models.transformers`
imports every network that diffusers has.
"""

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.machinery import PathFinder
from types import ModuleType
from typing import Any

# All that is asked of the compiler at an import is to mark classes, which diffusers can do without, and
# functions.


def assume_constant_result(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a function as torch does."""
    vars(function).update(_dynamo_marked_constant=True)
    return function


def disable(function: Callable[..., Any], recursive: bool = True, **_: Any) -> Callable[..., Any]:
    """Mark a function as torch marks its own: the compiler comes when it is first called."""
    from torch._compile import _disable_dynamo

    return _disable_dynamo(function, recursive)


MARKS: dict[str, Any] = {
    "allow_in_graph": lambda kind: kind,
    "assume_constant_result": assume_constant_result,
    "disable": disable,
}
SKIPPED: dict[str, dict[str, Any]] = {"torch._dynamo": MARKS, "diffusers.models.transformers": {}}
"""Packages whose `__init__` is not run, and what they are asked for all the same."""


class _StandIn(ModuleType):
    """A package whose modules can be imported and whose `__init__` has not run; asked for a name, it runs."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)


@contextmanager
def lean_imports() -> Iterator[None]:
    """Imports inside leave out `SKIPPED`; whoever imports those later gets them as they are."""
    placed = list[_StandIn]()
    for name, attributes in SKIPPED.items():
        package = importlib.import_module(name.rpartition(".")[0])
        if name not in sys.modules and (spec := PathFinder.find_spec(name, package.__path__)):
            sys.modules[name] = stand_in = _StandIn(name)
            stand_in.__dict__.update(attributes, __path__=list(spec.submodule_search_locations or ()))
            placed.append(stand_in)
    try:
        yield
    finally:
        for stand_in in placed:
            if sys.modules.get(stand_in.__name__) is stand_in:
                del sys.modules[stand_in.__name__]
