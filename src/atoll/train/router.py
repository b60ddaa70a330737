"""Training the router: which cluster does the data under this noise come from (DDM, eq. 5)."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from atoll.base.rng import uniforms
from atoll.campaign.settings.train import VALIDATION_TIMES
from atoll.data.samples import Samples
from atoll.ensemble.expert import write_part
from atoll.flow.objective import noisy
from atoll.flow.schedule import RectifiedFlow
from atoll.networks.router import Router
from atoll.store.store import Store
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
        batch, index = self.rows.batch(positions)
        pure = uniforms(self.rows.recipe.plan.seed, "pure-noise", positions) < self.pure_noise
        t = torch.where(pure, torch.ones_like(batch.t), batch.t)
        return Batch(batch.x0, batch.cond, batch.eps, t, self._clusters(self.rows.train, index))

    def step(self, batch: Batch) -> tuple[Tensor, dict[str, float]]:
        """Cross-entropy of the cluster."""
        logits, clusters = self._classify(batch.to(self.device))
        accuracy = float((logits.detach().argmax(1) == clusters).float().mean())
        return torch.nn.functional.cross_entropy(logits, clusters), {"accuracy": accuracy}

    def validate(self) -> dict[str, Any]:
        """Cross-entropy and accuracy on held-out rows at 8 fixed times and at t = 1."""
        times = (*VALIDATION_TIMES, 1.0)
        index, batches = self.rows.validation(times)
        if not batches:
            return {}
        losses, hits = [], []
        for batch in batches:
            known = replace(batch, clusters=self._clusters(self.rows.heldout, index))
            logits, clusters = self._classify(known.to(self.device))
            losses.append(float(torch.nn.functional.cross_entropy(logits, clusters)))
            hits.append(float((logits.argmax(1) == clusters).float().mean()))
        return {"validation": losses, "accuracy_by_time": hits, "validation_loss": sum(losses) / len(losses)}

    def preview(self) -> None:
        """A router draws nothing."""

    def publish(self, store: Store, prefix: str, weights: dict[str, Tensor], seconds: float) -> None:
        """Write network and card."""
        card = self.rows.card(self.network, "router", weights, seconds)
        write_part(store, prefix, self.network, weights, card)

    def _clusters(self, samples: Samples, index: Any) -> Tensor:
        return self.rows.clusters[torch.from_numpy(samples.rows[index])]

    def _classify(self, batch: Batch) -> tuple[Tensor, Tensor]:
        assert batch.clusters is not None
        logits = self.network(noisy(batch.x0, batch.eps, batch.t, self.schedule), batch.t, batch.cond)
        return logits, batch.clusters
