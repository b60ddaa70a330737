"""The GPUs that a plan counts with, and what a user's own table changes."""

from importlib.resources import files
from pathlib import Path
from typing import Any

from pydantic import Field

from atoll.base.config import Config
from atoll.base.errors import ConfigError
from atoll.base.safe_parse import expanded, read_text, read_yaml


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


def load_gpus(path: str | Path | None = None) -> dict[str, Gpu]:
    """The GPUs of `gpus.yaml`, with what the YAML file at `path` adds or changes."""
    texts = [("gpus.yaml", files("atoll.campaign").joinpath("gpus.yaml").read_text(encoding="utf-8"))]
    if path is not None:
        texts.append((str(path), read_text(expanded(path))))
    table = dict[str, dict[str, Any]]()
    for where, content in texts:
        tree = read_yaml(content, where)
        if not isinstance(tree, dict) or not all(isinstance(values, dict) for values in tree.values()):
            raise ConfigError(f"{where} is no table of GPUs", "write lines like 'h100: {usd_per_hour: 2.5}'")
        for name, values in tree.items():
            table[str(name)] = {**table.get(str(name), {}), **values}
    return {name: Gpu.parse(values, f"{name} of {path or 'gpus.yaml'}") for name, values in table.items()}
