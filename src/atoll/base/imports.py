"""Imports of diffusers and transformers without what they import and Atoll does not use.

Both import far more than the classes that are asked for, from whichever module: without this, `atoll sample`
and `atoll plan` take four seconds more of processor time, and the process of a training run three.
"""

import gc
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from types import ModuleType
from typing import Any


def _run(package: str) -> ModuleType:
    if isinstance(sys.modules.get(package), _Skipped):
        del sys.modules[package]
    return importlib.import_module(package)


class _Skipped(ModuleType):
    """A package whose modules can be imported and whose `__init__` runs when it is asked for a name."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        with suppress(ModuleNotFoundError):
            return importlib.import_module(f"{self.__name__}.{name}")
        return getattr(_run(self.__name__), name)


class _Late(type):
    """A class or function whose package runs when it is first used."""

    def __getattr__(cls, name: str) -> Any:
        return getattr(getattr(_run(cls.__module__), cls.__name__), name)

    def __call__(cls, *args: Any, **options: Any) -> Any:
        return getattr(_run(cls.__module__), cls.__name__)(*args, **options)


def assume_constant_result(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a function as torch does."""
    vars(function).update(_dynamo_marked_constant=True)
    return function


def disable(function: Callable[..., Any] | None, recursive: bool = True, **_: Any) -> Any:
    """Hide a function from the compiler, as torch does; its own only once there is a compiler."""
    from torch._compile import _disable_dynamo

    own = (getattr(function, "__module__", None) or "").startswith("torch.")
    return function if own else _disable_dynamo(function, recursive)


SKIPPED: dict[str, dict[str, Any]] = {
    "torch._dynamo": {  # 1.6 s: the compiler
        "allow_in_graph": lambda kind: kind,  # diffusers can do without
        "assume_constant_result": assume_constant_result,
        "disable": disable,
    },
    "diffusers.models.transformers": {},  # 1 s: every network that diffusers has
    # 1.4 s: transformers and accelerate
    "diffusers.quantizers": dict.fromkeys(["DiffusersAutoQuantizer", "DiffusersQuantizer"]),
    "transformers.models": {},  # 0.9 s: the names in all of its 1,800 files
    "scipy.optimize": dict.fromkeys(["linear_sum_assignment"]),  # 0.6 s: a loss of object detection
}
"""Packages whose `__init__` is not run, and what they are asked for all the same; None is a `_Late` one."""
_distributions = cache(metadata.packages_distributions)  # 0.5 s, once for diffusers and once for transformers


@contextmanager
def lean_imports() -> Iterator[None]:
    """Imports inside leave out `SKIPPED`; whoever imports those later gets them as they are."""
    placed = list[_Skipped]()
    for package, names in SKIPPED.items():
        top, *below = package.split(".")
        if package not in sys.modules and (spec := find_spec(top)):
            sys.modules[package] = skipped = _Skipped(package)
            folders = [os.path.join(folder, *below) for folder in spec.submodule_search_locations or ()]
            given = {name: kept or _Late(name, (), {"__module__": package}) for name, kept in names.items()}
            vars(skipped).update(given, __path__=folders)
            placed.append(skipped)
    # Nothing that an import makes is garbage, and looking for it takes a sixth of the time.
    collecting, distributions = gc.isenabled(), metadata.packages_distributions
    gc.disable()
    metadata.packages_distributions = _distributions
    try:
        yield
    finally:
        metadata.packages_distributions = distributions
        if collecting:
            gc.enable()
        for skipped in placed:
            if sys.modules.get(skipped.__name__) is skipped:
                del sys.modules[skipped.__name__]
