"""What networks learn: experts and monolith the flow (same code, other data), the router the clusters."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from atoll.base.device import own_device
from atoll.base.errors import ConfigError
from atoll.base.pictures import grid, png, to_images
from atoll.base.rng import normals
from atoll.campaign.settings.train import VALIDATION_TIMES
from atoll.data.columns import some_rows
from atoll.encoders.registry import check_known
from atoll.encoders.vae import Autoencoder, autoencoder_of
from atoll.flow.objective import noisy, per_sample_loss, target
from atoll.flow.prediction import velocity_weight
from atoll.flow.schedule import RectifiedFlow, schedule
from atoll.model.bank import Bank
from atoll.model.expert import Expert, bound_of
from atoll.model.generation import Generation
from atoll.model.sampler import Row, Sampler, rows_of
from atoll.networks.families import family
from atoll.train.rows import Batch, TrainingRows


class Task:
    """A network (initialised), the rows it learns from, and what it learns."""

    at_once: int | None = None  # most rows of a validation or preview together; all by default

    def __init__(self, network: nn.Module, rows: TrainingRows) -> None:
        self.network, self.device = network, own_device()
        self.rows, self.recipe = replace(rows, device=self.device), rows.recipe

    def batch(self, positions: range) -> Batch:
        """Everything that the samples at these positions bring: data, noise, times, dropout."""
        return self.rows.batch(positions)

    def step(self, batch: Batch) -> tuple[Tensor, dict[str, float]]:
        """Mean loss (a scalar with a graph) and mean metrics of one batch."""
        raise NotImplementedError

    def validate(self) -> dict[str, Any]:
        """Metrics on held-out rows with the weights that the network holds now; empty without such rows."""
        raise NotImplementedError

    def preview(self) -> bytes | None:
        """A PNG that shows what the network can do now, or None."""
        return None

    def _heldout(
        self, measure: Callable[[Batch], Sequence[Tensor]], times: Sequence[float] = VALIDATION_TIMES
    ) -> Iterator[list[Tensor]]:
        # What `measure` gives of all held-out rows, for each time.
        for batches in self.rows.validation(times, self.at_once):
            yield [torch.cat(tensors) for tensors in zip(*map(measure, batches), strict=True)]


def validation(losses: list[float], times: Sequence[float], **more: Any) -> dict[str, Any]:
    """Metrics of a validation by time, with the mean loss; empty where nothing was measured."""
    mean = sum(losses) / max(1, len(losses))
    return {"times": times, "validation": losses, "validation_loss": mean, **more} if losses else {}


class DenoiserTask(Task):
    """Experts and monoliths learn the flow."""

    encoders: Collection[str] = ()  # autoencoders that the user vouches for, beside the well-known ones

    def __init__(self, network: nn.Module, rows: TrainingRows) -> None:
        super().__init__(network, rows)
        self.family = family(rows.recipe.network["family"])
        self.schedule = schedule(rows.recipe.objective.schedule)

    def step(self, batch: Batch) -> tuple[Tensor, dict[str, float]]:
        """Mean squared error of the prediction."""
        return self._losses(batch).mean(), {}

    def validate(self) -> dict[str, Any]:
        """Loss on held-out rows at 8 fixed times with fixed noise; of texts also under those of others."""

        def under_both(batch: Batch) -> list[Tensor]:
            if self.rows.train.condition != "text":
                return [self._losses(batch)]
            others = torch.arange(len(batch.t), device=batch.t.device).roll(len(batch.t) // 2)
            return [*map(self._losses, (batch, replace(batch, cond=batch.cond.select(others))))]

        losses = [[float(part.mean()) for part in parts] for parts in self._heldout(under_both)]
        gain = max((theirs / max(own, 1e-9) - 1 for own, *rest in losses for theirs in rest), default=None)
        return validation([own for own, *_ in losses], VALIDATION_TIMES, condition_gain=gain)

    def preview(self) -> bytes:
        """Twelve training conditions, nearest to a square: 12 steps, guidance 2, or as its card says."""
        samples, objective = self.rows.train, self.recipe.objective
        how, bound = (objective.prediction, objective.schedule), bound_of(self.rows.latents)
        denoiser = Expert(self.network, self.family.name, *how, bound=bound, learning=True)
        index = some_rows(np.arange(len(samples)), 12)
        shape = (samples.shape.channels, *samples.shape.usual)
        # A stream of their own: previews take nothing from the noise of training or of sampling.
        noise = normals(0, "preview-noise", index.tolist(), shape).to(self.device)
        generation = Generation(steps=12, guidance=2.0).with_(**self.recipe.sampling)
        generation = generation.for_condition(samples.condition).at(*shape[1:])
        cond, null = samples.conditions(index).to(self.device), samples.null.to(self.device)
        rows = Row.each(generation, range(len(index)))
        bank, drawn = Bank([denoiser]), list[Tensor]()
        for part in torch.arange(len(rows)).split(self.at_once or len(rows)):
            some = part.tolist()
            drawn.append(Sampler(bank, rows_of(cond, some), null, [rows[n] for n in some], noise[some]).run())
        latents = torch.cat(drawn)
        if self._vae is not None:
            pixels = self._vae.decode(latents)
        else:  # false colours of the first channels where the VAE is not at hand
            channels = [0, 1, 2] if latents.shape[1] >= 3 else [0]
            pixels = Autoencoder("none").decode(latents[:, channels].cpu() / 2)
        return png(grid(to_images(pixels), columns=6, scale=max(1, 64 // shape[-1])))

    @cached_property
    def _vae(self) -> Autoencoder | None:
        # Loaded and held against its hash once in a run: its folder may be gigabytes.
        try:
            check_known(self.rows.latents["name"], self.encoders)
            return autoencoder_of(self.rows.latents, str(self.device))
        except ConfigError:
            return None

    def _losses(self, batch: Batch) -> Tensor:
        objective, t = self.recipe.objective, batch.t
        x_t = noisy(batch.x0, batch.eps, t, self.schedule)
        output = self.family.predict(self.network, x_t, t * self.schedule.clock, batch.cond)
        loss = per_sample_loss(output, target(batch.x0, batch.eps, t, self.schedule, objective.prediction))
        if objective.loss == "prediction":
            return loss
        return loss * velocity_weight(t, self.schedule, objective.prediction)


class RouterTask(Task):
    """The router learns which cluster the data under a noise come from (DDM, eq. 5)."""

    def step(self, batch: Batch) -> tuple[Tensor, dict[str, float]]:
        """Cross-entropy of the cluster."""
        logits, clusters = self._classify(batch)
        return cross_entropy(logits, clusters), {"accuracy": _accuracy(logits.detach(), clusters)}

    def validate(self) -> dict[str, Any]:
        """Cross-entropy and accuracy on held-out rows at 8 fixed times and at t = 1."""
        times = (*VALIDATION_TIMES, 1.0)
        answers = list(self._heldout(self._classify, times))
        losses = [float(cross_entropy(logits, clusters)) for logits, clusters in answers]
        return validation(losses, times, accuracy_by_time=[_accuracy(*answer) for answer in answers])

    def _classify(self, batch: Batch) -> tuple[Tensor, Tensor]:
        assert batch.clusters is not None
        x_t = noisy(batch.x0, batch.eps, batch.t, RectifiedFlow())
        return self.network(x_t, batch.t, batch.cond), batch.clusters


def _accuracy(logits: Tensor, clusters: Tensor) -> float:
    return float((logits.argmax(1) == clusters).float().mean())
