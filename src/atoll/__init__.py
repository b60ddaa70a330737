"""Train one diffusion model on many islands of compute.

The names below are the public ones. Each is loaded when it is first asked for (PEP 562), so that
`import atoll` and `atoll --help` stay quick. Nothing inside the package imports from here.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from atoll.api import create as create
    from atoll.api import evaluate as evaluate
    from atoll.api import fit as fit
    from atoll.api import load as load
    from atoll.api import prepare as prepare
    from atoll.base.condition import Condition as Condition
    from atoll.base.errors import AtollError as AtollError
    from atoll.data.dataset import DataSet as DataSet
    from atoll.export.pipeline import AtollPipeline as AtollPipeline
    from atoll.model.bank import Bank as Bank
    from atoll.model.generation import Generation as Generation
    from atoll.model.generation import Residency as Residency
    from atoll.model.model import Model as Model
    from atoll.model.routing import Routing as Routing
    from atoll.model.sampler import Sampler as Sampler
    from atoll.store.store import Store as Store

__version__ = "0.1.0"

_PUBLIC = {
    "AtollError": "atoll.base.errors",
    "AtollPipeline": "atoll.export.pipeline",
    "Bank": "atoll.model.bank",
    "Condition": "atoll.base.condition",
    "DataSet": "atoll.data.dataset",
    "Generation": "atoll.model.generation",
    "Model": "atoll.model.model",
    "Residency": "atoll.model.generation",
    "Routing": "atoll.model.routing",
    "Sampler": "atoll.model.sampler",
    "Store": "atoll.store.store",
    "create": "atoll.api",
    "load": "atoll.api",
    "evaluate": "atoll.api",
    "prepare": "atoll.api",
    "fit": "atoll.api",
}


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'atoll' has no attribute {name!r}")
    value = getattr(importlib.import_module(_PUBLIC[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(["__version__", *_PUBLIC])
