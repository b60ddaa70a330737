"""A model as one object: experts and router (or one network), text encoder, autoencoder and card.

It is the only way from prompts to pictures: the command line, the diffusers pipeline, measuring and serving
all call `Model.generate`, so one seed is one picture everywhere.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property, partial
from numbers import Integral
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from atoll.base.condition import Condition
from atoll.base.device import weights_dtype
from atoll.base.errors import ConfigError, StoreError
from atoll.base.safe_parse import read_json
from atoll.base.text import Size, many, parse_size
from atoll.encoders.registry import check_known, text_parts, with_tokenizers
from atoll.encoders.text import LONGEST_PROMPT, TextEncoder, text_encoder_of
from atoll.encoders.vae import Autoencoder, autoencoder_of
from atoll.model.bank import Bank
from atoll.model.card import Card
from atoll.model.checkpoint import Checkpoint
from atoll.model.dispatch import Costs, Networks, Trace
from atoll.model.folder import MANIFEST, MODEL_INDEX, PRETRAIN_PART, SCHEDULER, defaults_in, read_manifest
from atoll.model.generate import Batch, Conditions, Sampling, generate
from atoll.model.generation import Generation, Residency
from atoll.model.opened import OpenFolder, border, inspect_folder, is_hub_name, locate
from atoll.model.pictures import Pictures, check_storage
from atoll.model.residency import ResidentExperts
from atoll.store.manifest import read_file
from atoll.store.store import Store

ENSEMBLE = "ensemble"
REMEMBERED = 64
"""Texts whose states are kept: the empty one is wanted by every guided call."""


class Model:
    """A bank of networks with all that brings prompts to pixels.

    The bank is on the device, or a function that loads it when the first sample is drawn. The card is the
    router's, or the network's; by default it names the text encoder, which is loaded when first needed.
    """

    def __init__(
        self,
        bank: Bank | Callable[[], Bank],
        card: Card,
        device: torch.device | str = "cpu",
        generation: Generation | None = None,
        encoder: TextEncoder | None = None,
        vae: Autoencoder | None = None,
    ) -> None:
        self._bank, self.card, self.device = bank, card, torch.device(device)
        self.generation = generation or Generation()
        self._folder: OpenFolder | None = None
        self._check: Callable[[Model], None] | None = None  # of what was loaded
        self._allowed: Collection[str] = ()
        self._known_texts: dict[str, Tensor] = {}
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
        generation: Generation | None = None,
        encoders: Collection[str] = (),
        trusted: Collection[str] | None = None,
    ) -> "Model":
        """Open a model; its weights are loaded when it first draws, every file held against its hash.

        Args:
            source: a campaign, the folder of an assembled or exported ensemble, or a hub name. Encoders that
                lie in the folder are taken from there.
            name: `ensemble`, or in a campaign a run on all the data, such as `monolith`.
            residency: how many experts stay on the device, and in which type of numbers all networks are; the
                others are brought when they are needed.
            generation: what a call draws by that says nothing else; a folder's own by default.
            encoders: names of encoders that you vouch for, where the model names one unknown to Atoll.
            trusted: keys or certificates, one of which must have signed the exported folder, each part
                of a campaign's ensemble, or the one network; None takes unsigned too.
        """
        if isinstance(source, Store):
            store = source
        else:
            store = Store.open(locate(source, "auto") if is_hub_name(source) else source)
        residency, check = residency or Residency(), None
        if residency.stored and residency.bound < 1:
            one = Residency(experts=1, prefetch=False)
            plain = partial(cls.load, source, name, one, device, generation, encoders, trusted)
            check = partial(check_storage, plain, residency)
        dtype = weights_dtype(residency.dtype, device)
        if name != ENSEMBLE:
            if not name.isidentifier():  # it is a part of a path
                fix = "name 'ensemble', or a run such as 'monolith'"
                raise ConfigError(f"there is no model {name!r}", fix)
            network = Checkpoint.of_run(store, name)
            if trusted is not None:
                network.check_trusted(trusted)
            # A network that learned few steps draws by no others, unless a call asks for them.
            generation = (generation or Generation()).with_(**network.card.sampling)
            # Limits are those of experts, which take turns.
            whole = Residency(dtype=residency.dtype, keep=residency.keep)
            alone = partial(load_experts, {0: network}, 1, whole, device)
            model = cls(lambda: Bank(alone()), network.card, device, generation)
            model._allowed, model._check = encoders, check
            return model
        prefix = "" if store.exists(MANIFEST) else f"{ENSEMBLE}/"
        content = read_manifest(store, prefix)
        parts = content.checkpoints(store, prefix)
        if trusted is not None and not prefix:
            content.check_trusted(store, trusted)
        elif trusted is not None:  # what a campaign has put together is signed by its parts' makers
            for part in parts.values():
                part.check_trusted(trusted)
        experts = {number: parts[f"experts/{number}"] for number in content.experts}
        absent = [number for number in range(content.k) if number not in experts]
        router = parts["router"]

        # Read when a picture is first drawn: a wrong prompt is then refused before gigabytes are.
        def bank() -> Bank:
            guide, pretrain = parts.get(PRETRAIN_PART), None
            cards = {number: part.card for number, part in experts.items()}
            costs = Costs.of(router.card, cards, content.k, guide.card if guide else None)
            loaded = load_experts(experts, content.k, residency, device)
            if guide is not None:
                pretrain = loaded.unchanged(guide.card) if isinstance(loaded, ResidentExperts) else None
                pretrain = pretrain or guide.expert(device, dtype=dtype)
            return Bank(loaded, router.router(device, dtype), absent, costs, pretrain)

        if generation is None:  # as the folder's pipeline draws if a call says nothing else
            listed = [entry for entry in content.files if entry.path in (MODEL_INDEX, SCHEDULER)]
            if len(listed) < 2:
                raise StoreError(f"{MODEL_INDEX} or {SCHEDULER} is not listed in {MANIFEST}", content.REMEDY)
            by_path = {entry.path: read_json(read_file(store, prefix, entry)) for entry in listed}
            generation = defaults_in(by_path[MODEL_INDEX], by_path[SCHEDULER])
        model = cls(bank, router.card, device, generation)
        model._allowed, model._check = encoders, check
        if not prefix and store.local is not None:
            model._folder = inspect_folder(store.local, "auto")
        return model

    def __repr__(self) -> str:
        name, how = self.card.role.replace("router", ENSEMBLE), self.generation
        drawing = f"{many(how.steps, 'step')}, guidance {how.guidance:g}, routing {how.routing}"
        return f"Model({name}, condition {self.card.condition}, {drawing}, on {self.device})"

    @property
    def bank(self) -> Bank:
        """Experts and router, or one network; loaded when it is first asked for."""
        if callable(self._bank):
            load = self._bank
            with border(self.card.title):
                self._bank = load()
            try:
                if self._check is not None:
                    self._check(self)
            except BaseException:
                self._bank = load
                raise
        return self._bank

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of a latent of the model's own size, (C, H, W)."""
        return self.card.shape.channels, *self.card.shape.usual

    @property
    def sizes(self) -> list[Size]:
        """Widths and heights in pixels that it was trained on."""
        factor = self.vae.factor
        return [(width * factor, height * factor) for height, width in self.card.shape.latents]

    def shape_for(self, size: str | None) -> tuple[int, int, int]:
        """Of a latent of pictures of this size (width x height in pixels), (C, H, W)."""
        if size is None:
            return self.shape
        known = dict(zip(self.sizes, self.card.shape.latents, strict=True))
        wanted = parse_size(size)
        if wanted not in known:
            named = ", ".join(f"{width}x{height}" for width, height in known)
            raise ConfigError(f"this model draws no pictures of {size}", f"it was trained on {named}")
        return self.card.shape.channels, *known[wanted]

    @cached_property
    def encoder(self) -> TextEncoder:
        """The text encoder of the training; `ConfigError` if its weights are others by now."""
        assert self.card.text is not None
        names, places = with_tokenizers(text_parts(self.card.text)), list[tuple[str, str]]()
        if self._folder is not None and {*names} <= {*self._folder.components}:
            paths = [str(self._folder.root / name) for name in names]
            places = [*zip(paths[::2], paths[1::2], strict=True)]
        else:
            check_known(self.card.text["name"], self._allowed)
        # What the training saw of captions bounds no prompt: its states are as long as it is.
        return text_encoder_of(self.card.text, str(self.device), places, LONGEST_PROMPT)

    @cached_property
    def vae(self) -> Autoencoder:
        """The autoencoder of the latents."""
        place = None
        if self._folder is not None and "vae" in self._folder.components:
            place = str(self._folder.root / "vae")
        else:
            check_known(self.card.latents["name"], self._allowed)
        return autoencoder_of(self.card.latents, str(self.device), place)

    def conditions(
        self,
        prompts: str | int | Sequence[str | int] = (),
        negative: Sequence[str] | str = "",
        each: int = 1,
        cut: bool = False,
        fix: str = "shorten it",
    ) -> Conditions:
        """Turn texts, or class labels, into conditions; an unconditional model takes none.

        Args:
            prompts: texts or labels; one text may stand alone.
            negative: what guidance leads away from, one text for all or one for each prompt.
            each: samples of every prompt; without prompts, samples.
            cut: cut texts that are too long, instead of refusing them with a `fix`.
        """
        prompts = [prompts] if isinstance(prompts, str | int | Integral) else list(prompts)  # numpy's too
        if each < 1:
            raise ConfigError(f"{each} pictures of each prompt", "give 1 or more")
        texts = tuple(map(str, prompts))
        negatives = [negative] if isinstance(negative, str) else list(negative)
        # A number would be encoded as a text, and give a picture of the word "3"; tokenizers raise on others.
        for text in (*prompts, *negatives) if self.card.condition == "text" else ():
            if not isinstance(text, str) or text.encode("utf-8", "replace").decode() != text:
                raise ConfigError(f"{text!r:.60} is no text", "give texts in UTF-8, and no class labels")
        if any(negatives) and (self.card.condition != "text" or self.card.shape.guidance):
            raise ConfigError("this model takes no negative prompt", "leave it out")
        if self.card.condition == "none":
            if texts:
                raise ConfigError("this model is unconditional", "leave the prompts out")
            return Conditions.of_rows(Condition(), Condition(), 1, each=each)
        if not texts:
            raise ConfigError(f"this model needs prompts ({self.card.condition})", "give one or more")
        if self.card.condition == "class":
            classes = self.card.shape.classes
            for text in texts:
                if not text.isdecimal() or len(text) > 99 or int(text) >= classes:
                    what = f"{text!r:.60} is no class label"
                    raise ConfigError(what, f"give a number from 0 to {classes - 1}")
            cond = Condition(labels=torch.tensor([int(text) for text in texts]))
            null = Condition(labels=torch.tensor([classes]))  # the row after the last class
        else:
            if not cut:
                self.encoder.refuse_long([*texts, *negatives], fix)
            cond, null = self._encoded(texts, negatives)
        return Conditions.of_rows(cond, null, len(texts), texts, each)

    def _encoded(self, texts: Sequence[str], negatives: Sequence[str]) -> tuple[Condition, Condition]:
        wanted, known = [*texts, *negatives], dict(self._known_texts)
        if new := [text for text in dict.fromkeys(wanted) if text not in known]:
            padded, real = self.encoder.encode(new)
            known |= {text: row[mask] for text, row, mask in zip(new, padded, real, strict=True)}
        rows = [known[text] for text in wanted]
        states, lengths = pad_sequence(rows, batch_first=True), torch.tensor([len(row) for row in rows])
        mask, shape = torch.arange(states.shape[1]) < lengths[:, None], self.card.shape
        seen = None if bool(mask.all()) else mask
        both = Condition.of_text(states, seen, shape.pooled_width, shape.guidance)
        # The latest texts are kept. A new dictionary: threads of a server may ask at once.
        latest = [*(text for text in known if text not in {*wanted}), *dict.fromkeys(wanted)]
        self._known_texts = {text: known[text] for text in latest[-REMEMBERED:]}
        return both.select(slice(0, len(texts))), both.select(slice(len(texts), None))

    def generate(
        self,
        conditions: Conditions,
        generation: Generation | None = None,
        count: int | None = None,
        **how: Any,
    ) -> Iterator[Batch]:
        """Draw samples, batch by batch; takes what `sampling` takes."""
        return generate(self.bank, self.sampling(conditions, generation, count, **how))

    def sampling(
        self,
        conditions: Conditions,
        generation: Generation | None = None,
        count: int | None = None,
        **how: Any,
    ) -> Sampling:
        """Everything about samples of this model; `how` are `first`, `batch` and other fields of `Sampling`.

        By default it draws as the model's own `generation` says, and as many as there are conditions.
        """
        generation = (generation or self.generation).for_condition(self.card.condition)
        count, shape = conditions.count if count is None else count, self.shape_for(generation.size)
        return Sampling(generation.at(*shape[1:]), conditions, shape, count, device=self.device, **how)

    def pictures(self, latents: Tensor, rows: Sequence[int] | None = None) -> list[Image.Image]:
        """Pictures of latents `(B, C, H, W)`; `DataError` names the row of one that is broken."""
        return self.vae.pictures(latents.cpu(), rows)

    def __call__(
        self,
        prompts: str | int | Sequence[str | int] = (),
        each: int = 1,
        generation: Generation | None = None,
        batch: int = 64,
        **changes: Any,
    ) -> Pictures:
        """Draw pictures of prompts.

        Args:
            prompts: a text, or texts or class labels; none for an unconditional model.
            each: pictures of each prompt.
            generation: how; the model's own by default.
            changes: `steps`, `guidance`, `routing` (a name, or a function of logits and uniforms), `size`,
                `seed`, in place of the generation's.
        """
        generation = (generation or self.generation).with_(**changes)
        if generation.routing.needs_labels:
            raise ConfigError("routing 'oracle' needs known clusters", "use it in 'atoll compare'")
        sampling = self.sampling(self.conditions(prompts, each=each), generation, batch=batch)
        drawn, traces = dict[int, Image.Image](), list[Trace]()
        for part in generate(self.bank, sampling):
            drawn |= dict(zip(part.rows, self.pictures(part.latents, part.rows), strict=True))
            traces += [] if part.trace is None else [part.trace]
        trace = Trace.joined(traces, [*drawn]) if traces else None
        images = [drawn[row] for row in range(sampling.count)]
        return Pictures(images, trace, sampling.generation, sampling.conditions.texts)


def load_experts(
    parts: Mapping[int, Checkpoint], k: int, residency: Residency, device: torch.device | str
) -> Networks:
    """All K experts on the device, or as many as the budget lets; None where one is not there."""
    dtype = weights_dtype(residency.dtype, device)
    # Changes of one network (LoRA) share it, as experts do that take turns on the device.
    if not residency.limited and not any(part.card.base for part in parts.values()):
        loaded = {number: part.expert(device, dtype=dtype) for number, part in parts.items()}
        return [loaded.get(number) for number in range(k)]
    stored = {number: part.open_lazily() for number, part in parts.items()}
    return ResidentExperts([stored.get(number) for number in range(k)], residency, device, dtype)
