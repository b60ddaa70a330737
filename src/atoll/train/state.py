"""Checkpoints: everything that a run needs to go on, in one commit.

A checkpoint is a folder of safetensors and JSON under the holder's own name, verified and then made
real by `COMMIT.json`; the island's log names it. The newest one that is whole wins.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor, nn

from atoll.base.console import say
from atoll.base.errors import ConfigError, StoreError
from atoll.base.hashing import digest
from atoll.store.log import Log
from atoll.store.manifest import publish, read_published
from atoll.store.store import Store
from atoll.train.ema import Ema

SCHEMA = 1


@dataclass
class TrainState:
    """What changes while a network trains.

    Attributes:
        network: the network.
        ema: the average of its weights.
        optimizer: AdamW over its parameters.
        samples: training samples consumed: the cursor.
        step: optimizer steps done.
        seconds: time spent in steps, over all restarts.
        metrics: lines of metrics.jsonl up to here.
    """

    network: nn.Module
    ema: Ema
    optimizer: torch.optim.Optimizer
    samples: int = 0
    step: int = 0
    seconds: float = 0.0
    metrics: list[dict[str, Any]] = field(default_factory=list)

    def blobs(self) -> dict[str, bytes]:
        """The state as files."""
        weights = {name: p.detach() for name, p in self.network.named_parameters()}
        files = {"weights": weights, "ema": self.ema.weights, "optimizer": self._optimizer_tensors()}
        return {f"{name}.safetensors": save_tensors(_on_cpu(tensors)) for name, tensors in files.items()}

    def counters(self) -> dict[str, Any]:
        """The state's plain numbers."""
        return {"samples": self.samples, "step": self.step, "seconds": self.seconds}

    def restore(self, counters: dict[str, Any], blobs: dict[str, bytes]) -> None:
        """Take over a saved state, in place."""
        self.samples, self.step, self.seconds = counters["samples"], counters["step"], counters["seconds"]
        weights, average = load_tensors(blobs["weights.safetensors"]), load_tensors(blobs["ema.safetensors"])
        with torch.no_grad():
            for name, parameter in self.network.named_parameters():
                parameter.copy_(weights[name])
                self.ema.weights[name].copy_(average[name])
        self._restore_optimizer(load_tensors(blobs["optimizer.safetensors"]))

    def _optimizer_tensors(self) -> dict[str, Tensor]:
        found = {}
        for name, parameter in self.network.named_parameters():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                found[f"{name}/{key}"] = torch.as_tensor(value)
        return found

    def _restore_optimizer(self, tensors: dict[str, Tensor]) -> None:
        parameters = dict(self.network.named_parameters())
        for full_name, value in tensors.items():
            name, key = full_name.rsplit("/", 1)
            parameter = parameters[name]
            # a copy: mapped bytes may be unaligned, which changes how kernels sum
            self.optimizer.state[parameter][key] = value.clone().to(parameter.device)


def save(store: Store, log: Log, state: TrainState, learned: dict[str, Any], keep: int) -> None:
    """Commit a checkpoint, then prune older ones.

    Args:
        store: narrowed to the run's folder.
        log: whose holder we are.
        state: what to save.
        learned: settings that the weights depend on; a resume must agree with them.
        keep: newest commits that stay.
    """
    name = f"checkpoints/{state.step:08d}-{log.holder}"
    if store.exists(f"{name}/COMMIT.json"):
        return  # this step is saved already
    content = {"schema": SCHEMA, **state.counters(), "recipe": digest(learned)}
    publish(store, name, state.blobs(), "COMMIT.json", content)
    log.append("commit", checkpoint=name, **state.counters())
    _prune(store, log, keep)


def _prune(store: Store, log: Log, keep: int) -> None:
    """Remove what this holder and those before it left, but for the newest commits.

    What later holders wrote is never touched: this process may have been overtaken without knowing it yet.
    """
    entries = log.entries()
    kept = {entry["checkpoint"] for entry in [e for e in entries if e["kind"] == "commit"][-keep:]}
    holders = [entry["holder"] for entry in entries if entry["kind"] == "acquire"]
    ours = set(holders[: holders.index(log.holder) + 1])
    for key in store.list("checkpoints"):
        folder, name = "/".join(key.split("/")[:2]), key.split("/")[1]
        if folder not in kept and name.partition("-")[2] in ours:
            store.delete(key)


def resume(store: Store, log: Log, state: TrainState, learned: dict[str, Any]) -> bool:
    """Restore the newest whole checkpoint; False if there is none.

    Raises:
        ConfigError: the checkpoint belongs to other settings.
    """
    commits = [entry["checkpoint"] for entry in log.entries() if entry["kind"] == "commit"]
    for name in reversed(commits):
        if not store.exists(f"{name}/COMMIT.json"):
            continue  # pruned
        try:
            content, blobs = read_published(store, name, "COMMIT.json")
        except StoreError as error:
            say(f"warning: checkpoint set aside: {error}")
            continue
        if content.get("schema") != SCHEMA:
            raise ConfigError(f"{name} has schema {content.get('schema')}", f"this Atoll reads {SCHEMA}")
        if content["recipe"] != digest(learned):
            raise ConfigError(
                f"{name} was made with other settings", "restore them, or remove the run's folder"
            )
        state.restore(content, blobs)
        return True
    return False


def _on_cpu(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
