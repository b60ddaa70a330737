"""What a published part says of itself, so that parts that do not belong together are refused."""

from functools import partial
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from atoll.base.errors import ConfigError, DataError, PartitionError
from atoll.base.format import File
from atoll.encoders.registry import LatentProducer, Producer, TextProducer
from atoll.flow.settings import Prediction
from atoll.model.generation import Generation
from atoll.model.routing import LARGEST_K
from atoll.networks.settings import DataShape

WEIGHTS = "diffusion_pytorch_model.safetensors"
REMEDY = "restore it, or remove its folder to make it again: atoll assemble, train or export, or fetch it"
Count = Annotated[int, Field(ge=0, le=10**15)]
Flops = Annotated[float, Field(ge=0, le=1e32)]


def _complete(kind: type[Producer], by: dict[str, Any] | None) -> dict[str, Any] | None:
    # A producer stays a dictionary in the card: what the type does not name has to survive a copy.
    try:
        return None if by is None else {**by, **kind.parse(by, "it").model_dump(exclude_none=True)}
    except ConfigError as error:
        raise ValueError(error.what) from None


def check_producers(
    latents: dict[str, Any], text: dict[str, Any] | None, shape: DataShape | None = None
) -> None:
    """Refuse columns that no card of this shape could name (`DataError`), before a training is spent."""
    for column, by, kind in (("latents", latents, LatentProducer), ("text", text, TextProducer)):
        try:
            _complete(kind, by)
        except ValueError as error:
            fix = "write the column again: atoll data encode"
            raise DataError(f"the producer of the column {column} is incomplete: {error}", fix) from None
    if shape is not None and shape.pooled_width != _pooled(text):
        what = f"the run is for a pooled text of {shape.pooled_width} numbers, the data have {_pooled(text)}"
        raise DataError(what, "copy the island from where the partition was made")


def _pooled(text: dict[str, Any] | None) -> int:
    return int((text or {}).get("pooled") or 0)


class Card(File):
    """`card.json` beside the weights of an expert, a router, a monolith, shared pretraining or a student."""

    FORMAT, VERSION, PLACE = "atoll/card", 2, "ROLE/expert/card.json"
    REMEDY = "publish it again, or export it again"
    role: Annotated[str, Field(pattern="^[a-z]+$")]
    """What the network is for: `expert`, `router`, or the role of a run on all the data."""
    island: Annotated[int, Field(ge=0, lt=LARGEST_K)] | None = None
    """Number of the cluster an expert was trained on."""
    family: str
    """Name of the network family, or `router`."""
    prediction: Prediction = "v"
    """What the network predicts: v, eps, x0 or score."""
    schedule: str = "rectified-flow"
    """Noise schedule it was trained on, with numbers where they are not the usual ones."""
    condition: Literal["text", "class", "none"]
    """What it is conditioned on."""
    partition: str
    """Hash of the partition; empty for a monolith trained without one."""
    latents: Annotated[dict[str, Any], AfterValidator(partial(_complete, LatentProducer))]
    """What made the latents: name, hash, shift and scale; `rounded`: its hashes in numbers of 16 bits."""
    text: Annotated[dict[str, Any] | None, AfterValidator(partial(_complete, TextProducer))] = None
    """What made the text states: name, hash, max_length; `rounded` likewise."""
    shape: DataShape
    """Channels, size, text_width, text_length, classes."""
    parameters: Count
    """Number of trainable numbers."""
    rows: Count
    """Training rows of its data."""
    samples: Count
    """Training samples seen."""
    batch: Count
    """Samples per step."""
    train_flops: Flops
    """Operations spent on training, forward and backward."""
    forward_flops: Flops
    """Operations of one evaluation of one sample."""
    sampling: dict[str, float | str] = {}
    """Steps, guidance and shift that it was trained to be sampled with, before those of any campaign."""
    config_sha256: str = ""
    """Digest of `config.json`; set when it is written."""
    weights_sha256: str = ""
    """SHA-256 of the weights' file (the averaged ones); set when it is written."""
    base: Annotated[str, Field(pattern="^([0-9a-f]{64})?$")] = ""
    """SHA-256 of the weights' file of the network that this one is a low-rank change of (LoRA), which lies
    beside it; empty for a whole network."""
    provenance: dict[str, Any]
    """Versions, machine, threads, seed, `init` and `initial_weights`, digest of the data, seconds; of a
    student also its teachers."""

    @field_validator("provenance")
    @classmethod
    def _holds_groups(cls, provenance: dict[str, Any]) -> dict[str, Any]:
        for key, group in ((key, provenance.get(key, {})) for key in ("init", "student")):
            if not (isinstance(group, dict) and isinstance(group.get("teachers", {}), dict)):
                raise ValueError(f"{key} is no group of values")
        return provenance

    @field_validator("sampling")
    @classmethod
    def _is_drawable(cls, sampling: dict[str, float | str]) -> dict[str, float | str]:
        if sampling.keys() - {"steps", "guidance", "shift"}:
            raise ValueError("it is more than steps, guidance and shift")
        try:
            Generation().with_(**sampling)
        except ConfigError as error:
            raise ValueError(error.what) from None
        return sampling

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        if self.shape.pooled_width != _pooled(self.text):
            raise ValueError("text and shape do not agree on a pooled vector")
        return self

    @property
    def title(self) -> str:
        """What it is, in words: `expert 3`, `router`."""
        return self.role if self.island is None else f"{self.role} {self.island}"


def check_together(cards: list[Card]) -> None:
    """Refuse parts of different partitions, latents, text encoders or conditions (`PartitionError`)."""
    # Parts that differ in one of these would sample all the same, and draw noise or other pictures.
    first, changes = cards[0], [card for card in cards if card.base]
    for card in changes:
        if card.base != changes[0].base:
            what = f"{card.title} is a change (LoRA) of another network than {changes[0].title}"
            raise PartitionError(f"{what} ({card.base[:12]}, {changes[0].base[:12]})", "put its own there")
    for card in cards[1:]:
        for field in ("partition", "latents", "text", "condition"):
            mine, other = getattr(first, field), getattr(card, field)
            if mine != other or (field == "latents" and first.shape.latents != card.shape.latents):
                what = f"{card.title} was made with another {field} than {first.title}"
                what += f" ({_short(other)}, {_short(mine)})"
                raise PartitionError(what, "assemble parts of one campaign only")


def check_place(card: Card, wanted: str, where: str) -> None:
    """Refuse a part that lies where `wanted` belongs, such as `expert 3` (`PartitionError`)."""
    # Nothing would fail: the router would send another expert the wrong samples.
    if card.title != wanted:
        raise PartitionError(f"{where} holds {card.title}", f"put {wanted} there")


def _short(value: Any) -> str:
    return str(value.get("name", value) if isinstance(value, dict) else value)[:12]
