"""A model as one object: experts and router (or one network), text encoder, autoencoder and card.

It is the only way from prompts to pictures: the command line, the diffusers pipeline, measuring and serving
all call `Model.generate`, so one seed is one picture everywhere.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from PIL import Image
from torch import Tensor

from atoll.base.condition import Condition
from atoll.base.errors import ConfigError, StoreError
from atoll.base.rng import Position
from atoll.encoders.text import TextEncoder, text_encoder
from atoll.encoders.vae import Autoencoder, autoencoder_of
from atoll.ensemble.card import Card
from atoll.ensemble.dispatch import Experts
from atoll.ensemble.ensemble import Costs, Ensemble, Field, Trace
from atoll.ensemble.expert import Expert, RouterModel, published, read_card
from atoll.ensemble.folder import MODEL_INDEX
from atoll.ensemble.generate import Batch, Conditions, Sampling, generate
from atoll.ensemble.generation import Generation
from atoll.ensemble.residency import ResidentExperts
from atoll.ensemble.settings import Residency
from atoll.ensemble.stored import StoredExpert
from atoll.store.manifest import FileEntry, check_file
from atoll.store.store import Store

SCHEMA = 1
MANIFEST = "ensemble.json"
ENSEMBLE = "ensemble"


@dataclass(frozen=True)
class Prompts:
    """Conditions of prompts, on the model's device.

    Attributes:
        cond: one row for each prompt; without a condition, nothing.
        null: what guidance leads away from, one row.
        texts: what was asked for, as it was written.
    """

    cond: Condition
    null: Condition
    texts: tuple[str, ...]

    def repeated(self, each: int) -> Conditions:
        """Conditions of pictures by number, `each` of every prompt one after the other."""

        def conditions(rows: Sequence[int]) -> Condition:
            device = next((part.device for part in vars(self.cond).values() if part is not None), None)
            return self.cond.select(torch.tensor([row // each for row in rows], device=device))

        return conditions


@dataclass(frozen=True)
class Pictures:
    """What a call gives.

    Attributes:
        images: by number.
        routing: which expert served which picture at which step; None for a single network.
        generation: how they were drawn.
    """

    images: list[Image.Image]
    routing: Trace | None
    generation: Generation


class Model:
    """A denoiser with all that brings prompts to pixels.

    Args:
        denoiser: experts and router, or one network (a monolith, a student), on the device.
        card: the router's, or the network's: condition, shape, latents and text encoder.
        device: where it samples.
        generation: what a call draws by that says nothing else.
        encoder: of texts; by default the one that the card names, loaded when it is first needed.
        vae: of pictures; likewise.
    """

    def __init__(
        self,
        denoiser: Ensemble | Expert,
        card: Card,
        device: torch.device | str = "cpu",
        generation: Generation | None = None,
        encoder: TextEncoder | None = None,
        vae: Autoencoder | None = None,
    ) -> None:
        self.denoiser, self.card, self.device = denoiser, card, torch.device(device)
        self.generation = generation or Generation()
        if encoder is not None:
            self.encoder = encoder
        if vae is not None:
            self.vae = vae

    @classmethod
    def load(
        cls,
        source: Store | str | Path,
        name: str = ENSEMBLE,
        residency: Residency | None = None,
        device: torch.device | str = "cpu",
        verified: bool = False,
    ) -> "Model":
        """Load a model, every file held against its hash.

        Args:
            source: a campaign, or the folder of an assembled or exported ensemble.
            name: `ensemble`, or in a campaign `monolith`, `student` or `pretrain`.
            residency: how many experts stay on the device; the others are brought when they are needed.
            device: where it samples.
            verified: the files were checked just now.

        Raises:
            StoreError: not assembled or not published, or a file is not what the manifest says.
            ConfigError: the budget holds no expert.
        """
        store = source if isinstance(source, Store) else Store.open(source)
        if name != ENSEMBLE:
            return cls._single(store, name, device)
        prefix = "" if store.exists(MANIFEST) else f"{ENSEMBLE}/"
        content = read_manifest(store, prefix)
        if not verified:
            for tree in content["files"]:
                check_file(store, prefix.rstrip("/"), FileEntry.parse(tree, MANIFEST))
        router = RouterModel.load(store, f"{prefix}router")
        router.network.to(device)
        places = {number: f"{prefix}experts/{number}" for number in content["experts"]}
        cards = {number: read_card(store, place) for number, place in places.items()}
        absent = [number for number in range(content["k"]) if number not in cards]
        experts = load_experts(store, content["k"], places, residency, device)
        denoiser = Ensemble(experts, router, absent, Costs.of(router.card, cards, content["k"]))
        return cls(denoiser, router.card, device, _defaults(store, prefix))

    @classmethod
    def _single(cls, store: Store, name: str, device: torch.device | str) -> "Model":
        if not published(store, f"{name}/expert"):
            fix = f"train it: atoll train {name} {store.location}"
            raise StoreError(f"{store.location} has no {name} yet", fix)
        expert = Expert.load(store, f"{name}/expert")
        expert.network.to(device)
        assert expert.card is not None
        return cls(expert, expert.card, device)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of a latent, (C, H, W)."""
        return self.card.shape["channels"], self.card.shape["size"], self.card.shape["size"]

    @cached_property
    def encoder(self) -> TextEncoder:
        """The text encoder of the training; `ConfigError` if its weights are others by now."""
        assert self.card.text is not None
        name, length = self.card.text["name"], self.card.text["max_length"]
        encoder = text_encoder(name, min(length, self.card.shape["text_length"]), str(self.device))
        if encoder.producer()["hash"] != self.card.text["hash"]:
            raise ConfigError(
                f"the text encoder {encoder.name!r} is not the one of the training", "install that one"
            )
        return encoder

    @cached_property
    def vae(self) -> Autoencoder:
        """The autoencoder of the latents."""
        return autoencoder_of(self.card.latents, str(self.device))

    def prompts(self, prompts: Sequence[str], negative: str = "") -> Prompts:
        """Turn texts, or class labels as numbers, into conditions; an unconditional model takes none.

        Raises:
            ConfigError: prompts that do not fit the model's condition.
        """
        texts = tuple(prompts)
        if self.card.condition == "none":
            if texts:
                raise ConfigError("this model is unconditional", "leave the prompts out")
            return Prompts(Condition(), Condition(), texts)
        if not texts:
            raise ConfigError(f"this model needs prompts ({self.card.condition})", "give one or more")
        if self.card.condition == "class":
            cond, null = self._labels(texts)
        else:
            self.encoder.refuse_long(texts)
            states, mask = self.encoder.encode([*texts, negative])
            both = Condition(text=states, mask=mask)
            cond, null = both.select(slice(0, len(texts))), both.select(slice(len(texts), None))
        return Prompts(cond.to(self.device), null.to(self.device), texts)

    def _labels(self, texts: Sequence[str]) -> tuple[Condition, Condition]:
        classes = self.card.shape["classes"]
        for text in texts:
            if not text.isdecimal() or int(text) >= classes:
                raise ConfigError(f"{text!r} is no class label", f"give a number from 0 to {classes - 1}")
        labels = torch.tensor([int(text) for text in texts])
        return Condition(labels=labels), Condition(labels=torch.tensor([classes]))

    def generate(
        self,
        conditions: Conditions,
        null: Condition,
        count: int,
        generation: Generation | None = None,
        *,
        first: int = 0,
        batch: int = 64,
        clusters: Int[Tensor, "N"] | None = None,
        position: Callable[[int], Position] = int,
        noise: Callable[[Sequence[int]], Tensor] | None = None,
        around: Callable[[Field, Sequence[int]], Field] | None = None,
        integrate: Callable[[Field, Tensor], Tensor] | None = None,
    ) -> Iterator[Batch]:
        """Draw samples; see `ensemble.generate.Sampling` for the arguments."""
        sampling = Sampling(
            generation or self.generation,
            conditions,
            null,
            self.shape,
            count,
            first,
            batch,
            self.device,
            clusters,
            position,
            noise,
            around,
            integrate,
        )
        return generate(self.denoiser, sampling)

    def pictures(self, latents: Tensor, rows: Sequence[int] | None = None) -> list[Image.Image]:
        """Pictures of latents `(B, C, H, W)`; `DataError` names the row of one that is broken."""
        return self.vae.pictures(latents.cpu(), rows)

    def __call__(
        self, prompts: Sequence[str] = (), each: int = 1, batch: int = 64, **changes: Any
    ) -> Pictures:
        """Draw pictures of prompts.

        Args:
            prompts: texts or class labels; none for an unconditional model.
            each: pictures of each prompt.
            batch: most pictures at once; it does not change them.
            changes: `steps`, `guidance`, `routing` (a name, or a function of logits and uniforms), `seed`, in
                place of the model's own.
        """
        generation = self.generation.with_(**changes)
        if generation.routing.needs_labels:
            raise ConfigError("routing 'oracle' needs known clusters", "use it in 'atoll compare'")
        asked = self.prompts(prompts)
        count = max(1, len(asked.texts)) * each
        drawn, traces = dict[int, Image.Image](), list[tuple[list[int], Trace]]()
        for part in self.generate(asked.repeated(each), asked.null, count, generation, batch=batch):
            drawn |= dict(zip(part.rows, self.pictures(part.latents, part.rows), strict=True))
            if part.trace is not None:
                traces.append((part.rows, part.trace))
        return Pictures([drawn[row] for row in range(count)], joined(traces), generation)


def joined(traces: Sequence[tuple[list[int], Trace]]) -> Trace | None:
    """One trace of all batches, samples in the order of their numbers; None where there is none."""
    if not traces:
        return None
    rows = torch.tensor([row for batch, _ in traces for row in batch])
    trace, order = Trace.joined([trace for _, trace in traces]), rows.argsort()
    return replace(trace, weights=[weights[order] for weights in trace.weights])


def load_experts(
    store: Store,
    k: int,
    places: Mapping[int, str],
    residency: Residency | None,
    device: torch.device | str,
    verified: bool = True,
) -> Experts:
    """All experts on the device, or as many as the budget lets.

    Args:
        store: where they lie.
        k: number of clusters.
        places: folders of the experts that are there, by number.
        residency: the budget.
        device: where they run.
        verified: their files were checked against hashes before.
    """
    if residency is None or not residency.limited:
        loaded = {number: Expert.load(store, place) for number, place in places.items()}
        for expert in loaded.values():
            expert.network.to(device)
        return [loaded.get(number) for number in range(k)]
    stored = {n: StoredExpert.find(store, place, verified=verified) for n, place in places.items()}
    return ResidentExperts([stored.get(number) for number in range(k)], residency, device)


def read_manifest(store: Store, prefix: str = f"{ENSEMBLE}/") -> dict[str, Any]:
    """What `ensemble.json` says; `StoreError` if nothing was assembled, or by another version."""
    key = f"{prefix}{MANIFEST}"
    if not store.exists(key):
        fix = "run 'atoll assemble' first, or 'atoll launch' if its parts are not trained yet"
        raise StoreError(f"{store.location} has no ensemble", fix)
    content: dict[str, Any] = store.get_json(key)
    if content.get("schema") != SCHEMA:
        raise StoreError(
            f"{key} has schema {content.get('schema')}", f"this Atoll reads {SCHEMA}: assemble again"
        )
    return content


def _defaults(store: Store, prefix: str) -> Generation:
    """How the folder's pipeline draws if a call says nothing."""
    index = store.get_json(f"{prefix}{MODEL_INDEX}") if store.exists(f"{prefix}{MODEL_INDEX}") else {}
    names = {"steps": "num_inference_steps", "guidance": "guidance_scale", "routing": "routing"}
    return Generation().with_(**{name: index.get(key) for name, key in names.items()})
