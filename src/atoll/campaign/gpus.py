"""The table of GPUs that `atoll plan` counts with: `gpus.yaml` beside this module, and the user's own."""

from importlib.resources import files
from pathlib import Path
from typing import Any

from pydantic import Field

from atoll.base.config import Config
from atoll.base.errors import ConfigError, nearest
from atoll.base.plain import expanded, read_yaml


class Gpu(Config):
    """One kind of GPU."""

    memory_gib: float = Field(gt=0)
    """Memory that a process can use, in GiB."""
    tflops: float = Field(gt=0)
    """Peak of dense bf16 matrix products, in TFLOP/s."""
    utilisation: float = Field(gt=0, le=1)
    """Share of the peak that training is assumed to reach (model FLOPs utilisation)."""
    usd_per_hour: float = Field(ge=0)
    """Price of one GPU, in US dollars an hour."""

    @property
    def memory(self) -> float:
        """Memory in bytes."""
        return self.memory_gib * 2**30

    @property
    def speed(self) -> float:
        """Operations that count towards training, per second."""
        return self.tflops * 1e12 * self.utilisation


def load(path: str | Path | None = None) -> dict[str, Gpu]:
    """The table, with what the file at `path` adds or changes.

    Raises:
        ConfigError: the file is missing, is not YAML, or holds a wrong key or value.
    """
    tree = _tree(files("atoll.campaign").joinpath("gpus.yaml").read_text(encoding="utf-8"), "gpus.yaml")
    if path is not None:
        try:
            text = expanded(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "not text"
            raise ConfigError(f"cannot read the table {path}: {reason}", "give a YAML file") from None
        for name, entry in _tree(text, str(path)).items():
            tree[name] = {**tree.get(name, {}), **entry}
    return {name: Gpu.parse(values, f"{name} of {path or 'gpus.yaml'}") for name, values in tree.items()}


def find(table: dict[str, Gpu], name: str) -> Gpu:
    """A GPU by name; `ConfigError` with the nearest one if there is none."""
    if name not in table:
        raise ConfigError(f"unknown GPU {name!r}", f"{nearest(name, table)}; --table FILE adds your own")
    return table[name]


def _tree(text: str, where: str) -> dict[str, dict[str, Any]]:
    tree = read_yaml(text, where)
    if not isinstance(tree, dict) or not all(isinstance(values, dict) for values in tree.values()):
        raise ConfigError(f"{where} is no table of GPUs", "write lines like 'h100: {usd_per_hour: 2.5}'")
    return {str(name): dict(values) for name, values in tree.items()}
