"""One expert: a diffusers network and its card, seen as a denoiser, in memory or as it lies on disk.

Here alone weights become a network.
"""

import hashlib
import inspect
import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from math import isqrt
from pathlib import Path
from stat import S_ISREG
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from atoll.base.batch_invariant import make_batch_invariant
from atoll.base.condition import Condition
from atoll.base.errors import AtollError, StoreError, first_line
from atoll.base.imports import lean_imports
from atoll.base.safe_parse import read_json
from atoll.flow.prediction import flow_velocity
from atoll.flow.schedule import schedule
from atoll.flow.settings import Prediction
from atoll.model.card import REMEDY, Card
from atoll.model.replay import COMPUTING, Replayed
from atoll.networks.families import family
from atoll.networks.router import Router
from atoll.store.store import Absent
from atoll.store.tensors import DTYPES

_LARGEST_HEADER = 10_000_000  # bytes: about 100,000 tensors
LARGEST_GRID = 512  # patches to a side, of which a class makes a table of positions


@dataclass
class Expert:
    """A denoiser: a diffusers network trained on any schedule and prediction, converted at its edge."""

    network: nn.Module
    family: str
    prediction: Prediction
    schedule: str
    card: Card | None = None  # what it is, once published
    bound: float | None = None  # largest absolute value of its data, if there is one; a card tells it better
    learning: bool = False  # still trained, so its layers stay as they are (`make_batch_invariant`)
    replayed: Replayed | None = None  # calls recorded on a GPU; experts that share a network share them

    def __post_init__(self) -> None:
        if not self.learning:  # else a sample would depend on its batch
            make_batch_invariant(self.network)
            self.replayed = self.replayed or Replayed(self.network, self._call)

    def _call(self, x: Tensor, t: Tensor, cond: Condition) -> Tensor:
        return family(self.family).predict(self.network, x, t, cond)

    def velocity(
        self, x_t: Float[Tensor, "B C H W"], t: Float[Tensor, "B"], cond: Condition
    ) -> Float[Tensor, "B C H W"]:
        """Rectified-flow velocity of this expert (see `base.condition.Denoiser`)."""
        call, curve = self.replayed or self._call, schedule(self.schedule)
        # The first of them may be stored in one byte, which nothing is computed in.
        kinds = (p.dtype for p in self.network.parameters())
        dtype = next((kind for kind in kinds if kind.itemsize > 1), x_t.dtype)

        def predict(x: Tensor, tau: Tensor) -> Tensor:
            # The network computes in the type of its weights; what surrounds it stays in the sampler's.
            return call(x.to(dtype), tau * curve.clock, cond).to(x.dtype)

        # Near noise a conversion from eps magnifies errors; pixels are known to lie in [-1, 1].
        bound = self.bound if self.card is None else bound_of(self.card.latents)
        return flow_velocity(predict, self.prediction, curve, x_t, t, bound)


def bound_of(latents: Mapping[str, Any]) -> float | None:
    """Largest absolute value of what an autoencoder (by its `producer()`) makes: pixels are in [-1, 1]."""
    return 1.0 if latents["name"] == "none" else None


@dataclass
class RouterModel:
    """The router network and its card."""

    network: Router
    card: Card

    def __post_init__(self) -> None:
        make_batch_invariant(self.network)
        self._logits = Replayed(self.network, self.network)

    def logits(
        self, x_t: Float[Tensor, "B C H W"], t: Float[Tensor, "B"], cond: Condition
    ) -> Float[Tensor, "B K"]:
        """Logits of `p(k | x_t, t, cond)`, computed in the type of the network's weights."""
        dtype = next(self.network.parameters()).dtype
        with COMPUTING:
            return self._logits(x_t.to(dtype), t, cond).to(x_t.dtype)


class FileWeights(Mapping[str, Tensor]):
    """The tensors of a safetensors file, each read when it is asked for, straight into where it belongs.

    It is read and not mapped: see docs/decisions/0009.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        # The file stays open, so that one that is replaced meanwhile does no harm.
        try:
            self._file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe would wait for a writer
        except FileNotFoundError:
            raise Absent(f"{path} is missing", REMEDY) from None
        except OSError as error:
            raise StoreError(f"cannot read {path}: {error.strerror}", "check its permissions") from None
        weakref.finalize(self, os.close, self._file)

        # The format is 8 bytes of length, JSON of that length, and the tensors' bytes. A header may come from
        # outside, so its types and offsets are checked before anything is read by them.
        state = os.fstat(self._file)
        if not S_ISREG(state.st_mode):
            raise StoreError(f"{path} is no regular file", REMEDY)
        size = state.st_size
        length = int.from_bytes(os.pread(self._file, 8, 0), "little")
        # Type and shape of each tensor: one of the meta device, which has no memory.
        self.specs, self._starts = dict[str, Tensor](), dict[str, int]()
        try:
            if size < 8 or length > min(size - 8, _LARGEST_HEADER):
                raise ValueError(length)
            tree = read_json(os.pread(self._file, length, 8))
            tree.pop("__metadata__", None)
            for name, entry in tree.items():
                kind, shape = DTYPES[entry["dtype"]], tuple(map(int, entry["shape"]))
                spec = torch.empty(shape, dtype=kind, device="meta")
                begin, end = map(int, entry["data_offsets"])
                if begin < 0 or end - begin != spec.nbytes:
                    raise ValueError(name)
                self.specs[name], self._starts[name] = spec, 8 + length + begin
        except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RuntimeError):
            raise StoreError(f"{path} is damaged, or no safetensors", REMEDY) from None
        ends = (self._starts[name] + spec.nbytes for name, spec in self.specs.items())
        if size != (expected := max(ends, default=8 + length)):
            raise StoreError(f"{path} has {size} bytes instead of {expected}", REMEDY)

    def __iter__(self) -> Iterator[str]:
        return iter(self.specs)

    def __len__(self) -> int:
        return len(self.specs)

    def __getitem__(self, name: str) -> Tensor:
        spec = self.specs[name]
        out = torch.empty(spec.shape, dtype=spec.dtype)
        self.read(name, out)
        return out

    def sha256(self) -> str:
        """Hex digest of the file, by the descriptor that tensors are read through later."""
        # Hashed by path, another file could lie there by the time that a tensor is wanted.
        with os.fdopen(os.dup(self._file), "rb") as file:
            file.seek(0)
            return hashlib.file_digest(file, "sha256").hexdigest()

    def content(self) -> bytes:
        """All bytes of the file, by the same descriptor."""
        with os.fdopen(os.dup(self._file), "rb") as file:
            file.seek(0)
            return file.read()

    def read(self, name: str, out: Tensor) -> None:
        """Read a tensor into contiguous memory of the CPU, converted where `out` has another dtype."""
        if out.dtype != self.specs[name].dtype:
            out.copy_(self[name])
            return
        rest: memoryview = out.reshape(-1).view(torch.uint8).numpy().data
        position = self._starts[name]
        while len(rest):  # Linux reads at most 2 GiB at once
            count = os.preadv(self._file, [rest], position)
            if count == 0:
                raise StoreError(f"{self.path} ends within {name}", REMEDY)
            rest, position = rest[count:], position + count


@dataclass(frozen=True)
class StoredExpert:
    """An expert as it lies on disk (`weights` is `FileWeights`) or in memory, without a network around it."""

    config: Mapping[str, Any]
    family: str
    prediction: Prediction
    schedule: str
    weights: Mapping[str, Tensor]
    card: Card | None = None
    base: Mapping[str, Tensor] = field(default_factory=dict)
    """Of a low-rank change: the weights of the network that it changes, one object for all that do."""

    @classmethod
    def of(cls, expert: Expert) -> "StoredExpert":
        """An expert whose network is in memory; the weights are shared with it, not copied."""
        weights = {name: value.detach() for name, value in expert.network.state_dict().items()}
        config = settings_of(expert.network)
        return cls(config, expert.family, expert.prediction, expert.schedule, weights, expert.card)

    @property
    def specs(self) -> Mapping[str, Tensor]:
        """Tensors of the types and shapes of its own, by name; nothing is read for them."""
        return specs_of(self.weights)

    @property
    def shared(self) -> str:
        """Digest of the network that it changes; empty of a whole one, or of a change put together."""
        return self.card.base if self.card is not None and self.base else ""

    def network(self) -> nn.Module:
        """A network of these settings, unfilled; `StoreError` if they are not those of the weights."""
        where = str(self.weights.path.parent) if isinstance(self.weights, FileWeights) else "the expert"
        routes = self.card is not None and self.card.role == "router"
        load = Router.from_config if routes else family(self.family).load
        return build_network(load, self.config, {**specs_of(self.base), **self.specs}, where)

    def filled(self) -> nn.Module:
        """The network with its weights in memory, in their own type of numbers, frozen."""
        network, weights = self.network(), {**self.base, **self.weights}
        kinds = {value.dtype for value in weights.values() if value.is_floating_point()}
        if len(kinds) == 1:
            # Not the class's own `to`, which warns of every change of type.
            nn.Module.to(network, dtype=kinds.pop())
        network.load_state_dict(weights)
        return network.eval().requires_grad_(False)

    def expert(self) -> Expert:
        """The same with a network of its own in memory."""
        return Expert(self.filled(), self.family, self.prediction, self.schedule, self.card)


def specs_of(weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Tensors of their types and shapes, without memory where they lie in a file."""
    return weights.specs if isinstance(weights, FileWeights) else weights


def check_shape(card: Card, config: Mapping[str, Any], where: str) -> None:
    """Refuse a network of other data than its card says (`StoreError`), before anything is built or drawn."""
    shape, longest = card.shape, max(map(max, card.shape.latents))
    try:
        if card.role == "router":
            known = {"patch_size": 2, "caption_channels": 0, "num_classes": 0, **config}
            made = {"channels": known["in_channels"], "classes": known["num_classes"] or shape.classes}
            made["text_width"] = known["caption_channels"] or shape.text_width
        else:
            known = {**(adapter := family(card.family)).defaults(), **config}
            made = asdict(adapter.made_for(known, replace(shape, size=longest)))
            if card.family == "sd3" and made["size"] < longest:  # others take larger ones
                raise ValueError(f"latents of {longest}, the network takes {made['size']}")
        for name in ("channels", "text_width", "classes"):
            if made[name] != (value := getattr(shape, name)):
                raise ValueError(f"{name} {value}, the network {made[name]}")
        # Flux is given its patches as channels, of patch 1.
        patch = known["patch_size"] * isqrt(known["in_channels"] // shape.channels)
        if any(side % patch or side // patch > LARGEST_GRID for sides in shape.latents for side in sides):
            raise ValueError(f"latents of {longest}, the network patches of {patch}")
    except (ValueError, TypeError, KeyError, ArithmeticError, AtollError) as error:
        what = f"{where} and config.json are of two networks (the card has {first_line(error)[:200]})"
        raise StoreError(what, REMEDY) from None


def build_network(
    load: Callable[[Mapping[str, Any]], nn.Module],
    config: Mapping[str, Any],
    weights: Mapping[str, Any],
    where: str,
) -> nn.Module:
    """The network of a `config.json`, unfilled; `weights` are what has a `shape`, by name.

    `StoreError` where the config makes no network, or another one than the weights are of.
    """
    try:
        # A config may ask for more than any machine has, so first the network is built without memory. Even
        # that takes time for each block, of which there cannot be more than tensors.
        for key, value in config.items():
            if ("layers" in key or "depth" in key) and isinstance(value, int) and value > len(weights):
                raise ValueError(f"{key} is {value}")
        patch = config.get("patch_size") or 1
        for key in ("sample_size", "pos_embed_max_size"):
            if (config.get(key) or 0) // (patch if key == "sample_size" else 1) > LARGEST_GRID:
                raise ValueError(f"{key} is {config[key]}")
        with lean_imports(), torch.device("meta"):
            network = load(config)
        # Some settings are not looked at before their use, when a picture is drawn.
        for name, parameter in inspect.signature(type(network).__init__).parameters.items():
            value, kind = config.get(name), type(parameter.default)
            kinds = (int, float) if kind is float else (kind,)
            if value is not None and kind in (bool, int, float, str) and type(value) not in kinds:
                raise ValueError(f"{name} is {value!r}")
        shapes = {name: tuple(value.shape) for name, value in network.state_dict().items()}
        for name in shapes.keys() ^ weights.keys():
            raise ValueError(f"{'no' if name in shapes else 'a'} tensor {name}")
        for name, shape in shapes.items():
            if shape != tuple(weights[name].shape):
                raise ValueError(f"{name} has shape {tuple(weights[name].shape)} instead of {shape}")
        return load(config)
    except Exception as error:  # a class of diffusers that meets odd settings raises of every kind
        what = f"{where}/config.json makes no network of its weights ({first_line(error)[:200]})"
        raise StoreError(what, "restore it, or make it again") from None


def settings_of(network: nn.Module) -> dict[str, Any]:
    """Class and arguments of a network, as diffusers writes them into `config.json`."""
    config = dict(network.config)  # type: ignore[arg-type]
    return {"_class_name": type(network).__name__, **{k: v for k, v in config.items() if k[0] != "_"}}
