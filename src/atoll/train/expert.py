"""Training a denoiser: an expert on its cluster, or the monolith on everything. Same code, other data."""

from collections.abc import Collection, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from atoll.base.errors import ConfigError
from atoll.base.pictures import grid, png, to_images
from atoll.base.rng import normals
from atoll.campaign.settings.train import VALIDATION_TIMES
from atoll.data.columns import some_rows
from atoll.encoders.registry import check_known
from atoll.encoders.vae import Autoencoder, autoencoder_of
from atoll.flow.objective import noisy, per_sample_loss, target
from atoll.flow.schedule import schedule
from atoll.model.bank import Bank
from atoll.model.expert import Expert, bound_of
from atoll.model.generation import Generation
from atoll.model.sampler import Row, Sampler
from atoll.networks.families import family
from atoll.train.rows import Batch, TrainingRows


class DenoiserTask:
    """The task of `train.loop.train` for experts and monoliths.

    Args:
        network: initialised, on its device.
        rows: what it learns from; the recipe's network names its family.

    Attributes:
        encoders: names of autoencoders that the user vouches for, beside the well-known ones.
    """

    encoders: Collection[str] = ()

    def __init__(self, network: nn.Module, rows: TrainingRows) -> None:
        self.network, self.rows, self.recipe = network, rows, rows.recipe
        self.family = family(rows.recipe.network["family"])
        self.schedule = schedule(rows.recipe.objective.schedule)
        self.device = next(network.parameters()).device

    def batch(self, positions: range) -> Batch:
        """Latents, conditions, noise and times of these positions."""
        return self.rows.batch(positions)

    def step(self, batch: Batch) -> tuple[Tensor, dict[str, float]]:
        """Mean squared error of the prediction."""
        return self._losses(batch.to(self.device)).mean(), {}

    def validate(self) -> dict[str, Any]:
        """Loss on held-out rows at 8 fixed times, with fixed noise and no dropout."""
        losses = [
            float(torch.cat([self._losses(batch.to(self.device)) for batch in batches]).mean())
            for batches in self.rows.validation()
        ]
        if not losses:
            return {}
        return {"times": VALIDATION_TIMES, "validation": losses, "validation_loss": sum(losses) / len(losses)}

    def preview(self) -> bytes:
        """Twelve training conditions sampled in 12 steps with guidance 2, nearest to a square."""
        index = some_rows(np.arange(len(self.rows.train)), 12)
        objective, bound = self.recipe.objective, bound_of(self.rows.latents)
        denoiser = Expert(
            self.network,
            self.family.name,
            objective.prediction,
            objective.schedule,
            bound=bound,
            learning=True,
        )
        shape = (self.rows.train.shape.channels, *self.rows.train.shape.usual)
        # A stream of their own: previews take nothing from the noise of training or of sampling.
        noise = normals(0, "preview-noise", index.tolist(), shape).to(self.device)
        generation = Generation(steps=12, guidance=2.0).for_condition(self.rows.train.condition)
        cond, null = (
            one.to(self.device) for one in (self.rows.train.conditions(index), self.rows.train.null())
        )
        rows = Row.each(generation, range(len(index)))
        pictures = to_images(self._decode(Sampler(Bank([denoiser]), cond, null, rows, noise).run()))
        return png(grid(pictures, columns=6, scale=max(1, 64 // shape[-1])))

    def _decode(self, latents: Tensor) -> Tensor:
        """Pixels of latents; false colours of the first channels where the VAE is not at hand."""
        if self._vae is not None:
            return self._vae.decode(latents)
        channels: Sequence[int] = (0, 1, 2) if latents.shape[1] >= 3 else (0,)
        return Autoencoder("none").decode(latents[:, list(channels)].cpu() / 2)

    @cached_property
    def _vae(self) -> Autoencoder | None:
        """The autoencoder of the latents, loaded and held against its hash once in a run."""
        try:
            check_known(self.rows.latents["name"], self.encoders)
            return autoencoder_of(self.rows.latents)
        except ConfigError:
            return None

    def _losses(self, batch: Batch) -> Tensor:
        prediction = self.recipe.objective.prediction
        x_t = noisy(batch.x0, batch.eps, batch.t, self.schedule)
        output = self.family.predict(self.network, x_t, batch.t * self.schedule.clock, batch.cond)
        return per_sample_loss(output, target(batch.x0, batch.eps, batch.t, self.schedule, prediction))
