"""Training the router: which cluster does the data under this noise come from (DDM, eq. 5)."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from atoll.base.rng import uniforms
from atoll.campaign.settings.train import VALIDATION_TIMES
from atoll.flow.objective import noisy
from atoll.flow.schedule import RectifiedFlow
from atoll.networks.router import Router
from atoll.train.rows import Batch, TrainingRows


class RouterTask:
    """The task of `train.loop.train` for the router.

    Args:
        network: initialised, on its device.
        rows: of the whole data set, with clusters.
        pure_noise: share of the samples trained at exactly t = 1, where `once` asks.
    """

    def __init__(self, network: Router, rows: TrainingRows, pure_noise: float) -> None:
        self.network, self.rows, self.pure_noise = network, rows, pure_noise
        self.schedule = RectifiedFlow()
        self.device = next(network.parameters()).device

    def batch(self, positions: range) -> Batch:
        """Latents, conditions, noise, times and clusters of these positions."""
        batch = self.rows.batch(positions)
        pure = uniforms(self.rows.recipe.plan.seed, "pure-noise", positions) < self.pure_noise
        return replace(batch, t=torch.where(pure, torch.ones_like(batch.t), batch.t))

    def step(self, batch: Batch) -> tuple[Tensor, dict[str, float]]:
        """Cross-entropy of the cluster."""
        logits, clusters = self._classify(batch.to(self.device))
        accuracy = float((logits.detach().argmax(1) == clusters).float().mean())
        return torch.nn.functional.cross_entropy(logits, clusters), {"accuracy": accuracy}

    def validate(self) -> dict[str, Any]:
        """Cross-entropy and accuracy on held-out rows at 8 fixed times and at t = 1."""
        times = (*VALIDATION_TIMES, 1.0)
        losses, hits = [], []
        for batches in self.rows.validation(times):
            pairs = [self._classify(batch.to(self.device)) for batch in batches]
            logits, clusters = (torch.cat(parts) for parts in zip(*pairs, strict=True))
            losses.append(float(torch.nn.functional.cross_entropy(logits, clusters)))
            hits.append(float((logits.argmax(1) == clusters).float().mean()))
        if not losses:
            return {}
        mean = sum(losses) / len(losses)
        return {"times": times, "validation": losses, "accuracy_by_time": hits, "validation_loss": mean}

    def preview(self) -> None:
        """A router draws nothing."""

    def _classify(self, batch: Batch) -> tuple[Tensor, Tensor]:
        assert batch.clusters is not None
        logits = self.network(noisy(batch.x0, batch.eps, batch.t, self.schedule), batch.t, batch.cond)
        return logits, batch.clusters
