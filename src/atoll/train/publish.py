"""The card of a finished run."""

import platform
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from atoll.base.hashing import digest_tensors
from atoll.base.version import code_version
from atoll.campaign.settings.train import Recipe
from atoll.data.samples import Samples
from atoll.ensemble.card import Card
from atoll.networks.families import parameter_count


class _Trained(Protocol):
    network: Any
    train: Samples
    latents: dict[str, Any]
    text: dict[str, Any] | None


def card_of(task: _Trained, recipe: Recipe, weights: dict[str, Tensor], family: str, seconds: float) -> Card:
    """What a network says of itself when it is published."""
    plan, objective = recipe.plan, recipe.objective
    network: nn.Module = task.network
    return Card(
        role=plan.role,
        island=plan.island,
        family=family,
        prediction=objective.prediction,
        schedule=objective.schedule,
        condition=task.train.condition,
        partition=plan.partition,
        latents=task.latents,
        text=task.text,
        shape=plan.shape,
        parameters=parameter_count(network),
        rows=plan.rows,
        samples=plan.samples,
        batch=plan.batch,
        train_flops=plan.train_flops,
        forward_flops=plan.forward_flops,
        weights_sha256=digest_tensors(weights),
        provenance={
            "atoll": code_version(),
            "torch": torch.__version__,
            "machine": platform.machine(),
            "threads": recipe.train.threads,
            "seed": plan.seed,
            "init": {"kind": plan.init, **plan.init_origin},
            "initial_weights": plan.init_sha256,
            "data": task.train.dataset.id_hash,
            "seconds": round(seconds, 1),
            "peak_lr": recipe.train.lr,
        },
    )
