"""Training a denoiser: an expert on its cluster, or the monolith on everything. Same code, other data."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from atoll.base.condition import Condition
from atoll.base.errors import ConfigError
from atoll.base.pictures import grid, png, to_images
from atoll.base.rng import normals, uniforms
from atoll.campaign.settings.train import VALIDATION_TIMES, Recipe
from atoll.data.order import Order
from atoll.data.samples import Samples
from atoll.encoders.vae import Autoencoder, autoencoder_of
from atoll.ensemble.expert import Expert, bound_of, write_part
from atoll.ensemble.generate import Conditions, Sampling, generate
from atoll.ensemble.generation import Generation
from atoll.ensemble.integrate import starting_noise
from atoll.flow.objective import drop_condition, noisy, per_sample_loss, target
from atoll.flow.schedule import schedule
from atoll.flow.timesteps import training_times
from atoll.networks.families import family
from atoll.store.store import Store
from atoll.train.publish import card_of


@dataclass(frozen=True)
class Batch:
    """What the samples of one step bring, on the CPU.

    Attributes:
        x0: latents `(B, C, H, W)`.
        cond: conditions, dropped ones replaced by the null condition.
        eps: noise like `x0`.
        t: times `(B,)`.
        clusters: cluster of each sample `(B,)`, for router and student.
        draws: uniforms of each sample `(B, n)`, for a student's teacher.
    """

    x0: Tensor
    cond: Condition
    eps: Tensor
    t: Tensor
    clusters: Tensor | None = None
    draws: Tensor | None = None

    def to(self, device: torch.device) -> "Batch":
        """The same on another device."""
        parts = {field.name: getattr(self, field.name) for field in fields(self)}
        moved: dict[str, Any] = {
            name: None if part is None else part.to(device) for name, part in parts.items()
        }
        return Batch(**moved)


def draw_batch(samples: Samples, order: Order, recipe: Recipe, positions: range) -> tuple[Batch, Any]:
    """The samples at these positions of the run, with noise, times and dropout of their own.

    Returns:
        The batch, and the numbers of its samples within `samples`.
    """
    index = order.at(positions)
    seed, where = recipe.plan.seed, list(positions)
    x0 = samples.latents(index)
    cond = drop_condition(
        samples.conditions(index),
        samples.null(),
        uniforms(seed, "dropout", where),
        recipe.objective.condition_dropout,
    )
    objective = recipe.objective
    t = training_times(objective.time, uniforms(seed, "time", where), schedule(objective.schedule))
    return Batch(x0, cond, normals(seed, "noise", where, x0.shape[1:]), t), index


def spread(rows: int, count: int) -> NDArray[np.int64]:
    """At most `count` of so many rows, evenly spread: data of several islands lie one after the other."""
    return np.unique(np.linspace(0, rows - 1, min(rows, count)).astype(np.int64))


def held_out(
    samples: Samples, most: int, times: Sequence[float] = VALIDATION_TIMES
) -> tuple[NDArray[np.int64], list[Batch]]:
    """Some samples for a validation, at fixed times, with fixed noise and no dropout.

    Args:
        samples: held-out rows; may be empty.
        most: samples at most.
        times: each gives a batch of all of them.

    Returns:
        Their numbers within `samples`, and the batches; none if there are no samples.
    """
    rows = min(len(samples), most)
    if rows == 0:
        return np.empty(0, dtype=np.int64), []
    index = spread(len(samples), rows)
    x0, cond = samples.latents(index), samples.conditions(index)
    eps = normals(0, "validation", range(rows), x0.shape[1:])
    return index, [Batch(x0, cond, eps, torch.full((rows,), time)) for time in times]


class DenoiserTask:
    """The task of `train.loop.train` for experts and monoliths.

    Args:
        network: initialised, on its device.
        family_name: its family.
        train: training rows.
        heldout: held-out rows; may be empty.
        recipe: settings and numbers.
        latents: what made the latents (for previews and the card).
        text: what made the text states.
    """

    def __init__(
        self,
        network: nn.Module,
        family_name: str,
        train: Samples,
        heldout: Samples,
        recipe: Recipe,
        latents: dict[str, Any],
        text: dict[str, Any] | None,
    ) -> None:
        self.network, self.family = network, family(family_name)
        self.train, self.heldout, self.recipe = train, heldout, recipe
        self.latents, self.text = latents, text
        self.order = Order(len(train), recipe.plan.seed, train.dataset.id_hash)
        self.schedule = schedule(recipe.objective.schedule)
        self.device = next(network.parameters()).device

    def batch(self, positions: range) -> Batch:
        """Latents, conditions, noise and times of these positions."""
        return draw_batch(self.train, self.order, self.recipe, positions)[0]

    def step(self, batch: Batch) -> tuple[Tensor, dict[str, float]]:
        """Mean squared error of the prediction."""
        return self._losses(batch.to(self.device)).mean(), {}

    def validate(self) -> dict[str, Any]:
        """Loss on held-out rows at 8 fixed times, with fixed noise and no dropout."""
        batches = held_out(self.heldout, self.recipe.train.validation_rows)[1]
        if not batches:
            return {}
        losses = [float(self._losses(batch.to(self.device)).mean()) for batch in batches]
        return {"validation": losses, "validation_loss": sum(losses) / len(losses)}

    def preview(self) -> bytes:
        """Twelve training conditions sampled in 12 steps with guidance 2."""
        index = spread(len(self.train), 12)
        objective, bound = self.recipe.objective, bound_of(self.latents)
        denoiser = Expert(
            self.network, self.family.name, objective.prediction, objective.schedule, bound=bound
        )
        shape = (self.train.shape.channels, self.train.shape.size, self.train.shape.size)
        noise = starting_noise(0, index.tolist(), shape, "preview-noise").to(self.device)
        sampling = Sampling(
            Generation(steps=12, guidance=2.0),
            Conditions.of_rows(self.train.conditions(index), self.train.null(), len(index)),
            shape,
            len(index),
            device=self.device,
            noise=lambda rows: noise[rows],
        )
        latents = torch.cat([batch.latents for batch in generate(denoiser, sampling)])
        pictures = to_images(self._decode(latents))
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
            return autoencoder_of(self.latents)
        except ConfigError:
            return None

    def publish(self, store: Store, prefix: str, weights: dict[str, Tensor], seconds: float) -> None:
        """Write network and card."""
        card = card_of(self, self.recipe, weights, self.family.name, seconds)
        write_part(store, prefix, self.network, weights, card)

    def _losses(self, batch: Batch) -> Tensor:
        prediction = self.recipe.objective.prediction
        x_t = noisy(batch.x0, batch.eps, batch.t, self.schedule)
        output = self.family.predict(self.network, x_t, batch.t * self.schedule.clock, batch.cond)
        return per_sample_loss(output, target(batch.x0, batch.eps, batch.t, self.schedule, prediction))
