"""What `atoll evaluate` is asked for, seen before torch is there."""

import ast
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import atoll.measure.metrics as package
from atoll.base.config import set_value
from atoll.base.cores import cores
from atoll.base.errors import ConfigError, nearest
from atoll.campaign.settings.measure import EvaluateConfig
from atoll.measure.listing import COMPARED


def metric_names() -> list[str]:
    """Names of all metrics, out of the text of their modules, which import torch."""
    texts = [path.read_text("utf-8") for folder in package.__path__ for path in Path(folder).glob("*.py")]
    classes = [node for text in texts for node in ast.parse(text).body if isinstance(node, ast.ClassDef)]
    fields = [part for kind in classes for part in kind.body if isinstance(part, ast.Assign)]
    values = [field.value for field in fields if ast.unparse(field.targets[0]) == "names"]
    return [name for value in values for name in ast.literal_eval(value)]


def check_metrics(wanted: str) -> None:
    """`ConfigError` for a name of `evaluate.metrics` that no module has."""
    known = metric_names()
    for name in (part.strip().lower() for part in wanted.split(",")):
        if name not in (*known, "all", "fid"):
            raise ConfigError(f"unknown metric {name!r}", nearest(name, known))


def requested(options: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Arguments of `evaluate` that options of the command make, and the settings that they replace."""
    given = {name: value for name, value in options.items() if value is not None}
    generation = {name: given[name] for name in COMPARED if name in given}
    of_model = [name for name in ("model", *generation, "samples") if name in given]
    if "images" in given and of_model:
        raise ConfigError(f"--{of_model[0]} is for a model, and --images is none", "leave one of them out")
    shorthand = {name: given[name] for name in ("metrics", "extractor", "samples") if name in given}
    sets = (*given["sets"], *(f"evaluate.{name}={json.dumps(value)}" for name, value in shorthand.items()))
    rest: dict[str, Any] = {
        name: given[name] for name in ("model", "images", "reference", "split", "out") if name in given
    }
    return {"generation": generation, **rest}, sets


def alone(sets: Sequence[str]) -> EvaluateConfig:
    """Settings without a campaign, out of `evaluate.KEY=VALUE`."""
    tree: dict[str, Any] = {}
    for assignment in sets:
        if not assignment.startswith("evaluate."):
            raise ConfigError(f"--set {assignment!r}: there is no campaign", "set evaluate.KEY=VALUE")
        set_value(tree, assignment)
    return EvaluateConfig.parse(tree.get("evaluate", {}), "--set evaluate")


def spread(processes: int) -> bool:
    """Run this very command on several processes of this machine, unless it is one of them; whether it was
    run. A failure ends this process too."""
    if processes == 1 or "WORLD_SIZE" in os.environ:
        return False
    command = [sys.executable, "-m", "atoll.launch.torchrun", "--nnodes", "1", "--standalone"]
    command += ["--nproc-per-node", str(processes), "-m", "atoll", *sys.argv[1:]]
    environment = {"OMP_NUM_THREADS": str(max(1, cores() // processes)), **os.environ}
    done = subprocess.run(command, env=environment, check=False)
    if done.returncode:
        raise SystemExit(done.returncode)
    return True
