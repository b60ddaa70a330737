"""Experts that are not loaded: their settings, and their weights where they lie in a safetensors file."""

import os
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from atoll.base.errors import StoreError
from atoll.base.hashing import digest_tensors
from atoll.base.plain import read_json
from atoll.flow.settings import Prediction
from atoll.model.card import Card
from atoll.model.expert import Expert, built, filled, read_card, read_config, settings_of
from atoll.networks.checkpoint import WEIGHTS
from atoll.networks.families import family
from atoll.store.store import Absent, Store

ALIGNMENT = 256  # bytes; what CUDA's allocator gives, and a multiple of what the CPU's gives
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_LARGEST_HEADER = 100_000_000  # bytes, as the safetensors library has it
_FIX = "restore it, or assemble again"


@dataclass(frozen=True)
class Spec:
    """One tensor of a set of weights.

    Attributes:
        dtype: of its numbers.
        shape: of the tensor.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        return prod(self.shape) * self.dtype.itemsize


class FileWeights(Mapping[str, Tensor]):
    """The tensors of a safetensors file, each read when it is asked for, straight into where it belongs.

    The file stays open, so one that is replaced meanwhile does no harm. It is read and not mapped: see
    docs/decisions/0009.

    Args:
        path: of the file.

    Raises:
        Absent: there is no such file.
        StoreError: it is damaged, or no safetensors.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe would wait for a writer
        except FileNotFoundError:
            raise Absent(f"{path} is missing", _FIX) from None
        except OSError as error:
            raise StoreError(f"cannot read {path}: {error.strerror}", "check its permissions") from None
        weakref.finalize(self, os.close, self._file)
        self.specs, self._starts = _header(path, self._file)

    def __iter__(self) -> Iterator[str]:
        return iter(self.specs)

    def __len__(self) -> int:
        return len(self.specs)

    def __getitem__(self, name: str) -> Tensor:
        spec = self.specs[name]
        out = torch.empty(spec.shape, dtype=spec.dtype)
        self.read(name, out)
        return out

    def read(self, name: str, out: Tensor) -> None:
        """Read a tensor into contiguous memory of the CPU, converted where `out` has another dtype."""
        spec = self.specs[name]
        if out.dtype != spec.dtype:
            out.copy_(self[name])
            return
        rest: memoryview = out.reshape(-1).view(torch.uint8).numpy().data
        where = self._starts[name]
        while len(rest):
            count = os.preadv(self._file, [rest], where)
            if count == 0:
                raise StoreError(f"{self.path} ends within {name}", _FIX)
            rest, where = rest[count:], where + count


@dataclass(frozen=True)
class StoredExpert:
    """An expert as it lies on disk or in memory, without a network around it.

    Attributes:
        config: class and arguments of the network, as in `config.json`.
        family: name of its family.
        prediction: what it predicts.
        schedule: name of the noise schedule it was trained on.
        weights: tensors by name; `FileWeights` reads them when they are needed.
        card: what it is, if it was published.
    """

    config: Mapping[str, Any]
    family: str
    prediction: Prediction
    schedule: str
    weights: Mapping[str, Tensor]
    card: Card | None = None

    @classmethod
    def find(cls, store: Store, prefix: str, *, verified: bool = False) -> "StoredExpert":
        """What `write_part` wrote, its weights unread but for their digest.

        Args:
            store: where it is; of a remote one a local copy is made.
            prefix: its folder.
            verified: the weights' file was checked against a hash before, so it is not read now.

        Raises:
            StoreError: card, config or weights are missing, damaged, or not those of the card.
        """
        card = read_card(store, prefix)
        weights = FileWeights(store.path(f"{prefix}/{WEIGHTS}"))
        if not verified and digest_tensors(weights) != card.weights_sha256:
            raise StoreError(f"{store.name(prefix)}/{WEIGHTS} is not what its card says", _FIX)
        config = read_config(store, prefix, card)
        return cls(config, card.family, card.prediction, card.schedule, weights, card)

    @classmethod
    def of(cls, expert: Expert) -> "StoredExpert":
        """An expert whose network is in memory; the weights are shared with it, not copied."""
        weights = {name: value.detach() for name, value in expert.network.state_dict().items()}
        config = settings_of(expert.network)
        return cls(config, expert.family, expert.prediction, expert.schedule, weights, expert.card)

    def dtypes(self) -> set[torch.dtype]:
        """Types of its tensors' numbers."""
        weights = self.weights
        if isinstance(weights, FileWeights):
            return {spec.dtype for spec in weights.specs.values()}
        return {value.dtype for value in weights.values()}

    def network(self) -> nn.Module:
        """A network of these settings, unfilled; `StoreError` if they are not those of the weights."""
        shapes = self.weights.specs if isinstance(self.weights, FileWeights) else self.weights
        where = str(self.weights.path.parent) if isinstance(self.weights, FileWeights) else "the expert"
        return built(family(self.family).load, self.config, shapes, where)

    def expert(self) -> Expert:
        """The same with a network of its own in memory."""
        return Expert(
            filled(self.network(), dict(self.weights)), self.family, self.prediction, self.schedule, self.card
        )


class Layout:
    """Where the tensors of one architecture lie in one flat block of memory.

    Args:
        specs: the tensors.
    """

    def __init__(self, specs: Mapping[str, Spec]) -> None:
        self.specs, self.starts, self.nbytes = dict(specs), dict[str, int](), 0
        for name, spec in self.specs.items():
            self.starts[name] = self.nbytes
            self.nbytes += -(-spec.nbytes // ALIGNMENT) * ALIGNMENT

    def views(self, block: Tensor) -> dict[str, Tensor]:
        """The tensors within a block of at least `nbytes` bytes (uint8)."""
        tensors = {}
        for name, spec in self.specs.items():
            part = block[self.starts[name] : self.starts[name] + spec.nbytes]
            tensors[name] = part.view(spec.dtype).view(spec.shape)
        return tensors

    def check(self, expert: StoredExpert, name: str) -> None:
        """Refuse weights that are not those of this architecture, in name or shape."""
        there = expert.weights.keys()
        for missing in self.specs.keys() - there:
            raise StoreError(f"{name} has no tensor {missing}", _FIX)
        for unknown in there - self.specs.keys():
            raise StoreError(f"{name} has a tensor {unknown} that its network lacks", _FIX)
        for key, spec in self.specs.items():
            shape = _shape(expert.weights, key)
            if shape != spec.shape:
                raise StoreError(f"{key} of {name} has shape {shape}, its network {spec.shape}", _FIX)

    def read(self, expert: StoredExpert, block: Tensor) -> None:
        """Fill a block of the CPU with an expert's weights, converted where dtypes differ."""
        weights = expert.weights
        for key, view in self.views(block).items():
            if isinstance(weights, FileWeights):
                weights.read(key, view)
            else:
                view.copy_(weights[key])


def _shape(weights: Mapping[str, Tensor], name: str) -> tuple[int, ...]:
    return weights.specs[name].shape if isinstance(weights, FileWeights) else tuple(weights[name].shape)


def _header(path: Path, file: int) -> tuple[dict[str, Spec], dict[str, int]]:
    """Specs and first bytes of a file's tensors.

    The format is 8 bytes of length, JSON of that length, and the tensors' bytes.
    """
    size = os.fstat(file).st_size
    length = int.from_bytes(os.pread(file, 8, 0), "little")
    if size < 8 or length > min(size - 8, _LARGEST_HEADER):
        raise StoreError(f"{path} is damaged, or no safetensors", _FIX)
    specs, starts = {}, {}
    try:
        tree = read_json(os.pread(file, length, 8))
        tree.pop("__metadata__", None)
        for name, about in tree.items():
            spec = Spec(_DTYPES[about["dtype"]], tuple(map(int, about["shape"])))
            begin, end = map(int, about["data_offsets"])
            if begin < 0 or end - begin != spec.nbytes:
                raise ValueError(name)
            specs[name], starts[name] = spec, 8 + length + begin
    except (ValueError, KeyError, TypeError, AttributeError):
        raise StoreError(f"{path} is damaged, or no safetensors", _FIX) from None
    expected = max((starts[name] + specs[name].nbytes for name in specs), default=8 + length)
    if size != expected:
        raise StoreError(f"{path} has {size} bytes instead of {expected}", _FIX)
    return specs, starts
