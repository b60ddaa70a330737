"""The experts as one component of a diffusers pipeline.

diffusers takes no list of components. As `MultiControlNetModel` does, one module holds all networks and
writes a folder for each. `model_index.json` names this module by its import path, so it stays here.
"""

import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

from diffusers.models.modeling_utils import ModelMixin
from torch import Tensor, nn

from atoll.base.condition import Condition, Denoiser
from atoll.base.errors import ConfigError, StoreError
from atoll.export.offload import OffloadedExperts
from atoll.model.card import Card, check_place, check_together
from atoll.model.checkpoint import Checkpoint
from atoll.model.expert import Expert
from atoll.model.folder import EXPERTS, ExpertIndex
from atoll.model.model_card import listed
from atoll.model.opened import Chosen, read_index, select_experts
from atoll.model.routing import PRETRAIN
from atoll.model.settings import Residency
from atoll.model.stored import REMEDY, StoredExpert
from atoll.store.store import Store

logger = logging.getLogger(__name__)
PartName = int | Literal["pretrain"]
"""Number of an expert, or the network of shared pretraining."""


class ExpertBank(ModelMixin):  # type: ignore[misc]
    """K places for experts, some of which may be empty.

    As a sequence it is what a `Bank` takes: `len(bank)` is K and `bank[k]` a denoiser. In an empty
    place stands another expert; the ensemble gives it no weight.

    Args:
        experts: by the number of their cluster, each with its card.
        k: number of clusters; by default one more than the largest number.
        residency: how many stay on the device; the others lie where they were read from. None for all, which
            are then modules of this one.
        pretrain: network of shared pretraining, with its card; it is always on the device.

    Raises:
        ConfigError: no expert, or one without a card.
        PartitionError: experts that do not belong together, or one in the place of another.
    """

    def __init__(
        self,
        experts: Mapping[int, Expert | StoredExpert],
        k: int | None = None,
        residency: Residency | None = None,
        pretrain: Expert | None = None,
    ) -> None:
        super().__init__()
        if not experts:
            raise ConfigError("a bank without experts", "give at least one")
        self.k = max(experts) + 1 if k is None else k
        self.cards: dict[int, Card] = {}
        self.dropped: set[int] = set()
        self.networks = nn.ModuleDict()
        self.offloaded = OffloadedExperts(residency) if residency is not None and residency.limited else None
        for number in sorted(experts):
            self.add(experts[number], number)
        self.pretrain_card = None if pretrain is None else pretrain.card
        if pretrain is not None:
            if pretrain.card is None:
                raise ConfigError("a network without a card", "give one that was published")
            check_place(pretrain.card, PRETRAIN, "pretrain")
            check_together(self.every_card)
            self._put(PRETRAIN, pretrain)

    @property
    def present(self) -> tuple[int, ...]:
        """Numbers of the experts that are here, in order."""
        return tuple(sorted(self.cards))

    @property
    def every_card(self) -> list[Card]:
        """Cards of the experts, and of shared pretraining's network."""
        return [*self.cards.values(), *([self.pretrain_card] if self.pretrain_card else [])]

    @property
    def pretrain(self) -> Denoiser | None:
        """The network of shared pretraining, which guidance's null branch may ask."""
        return None if self.pretrain_card is None else _BankExpert(self, PRETRAIN)

    @property
    def missing(self) -> tuple[int, ...]:
        """Numbers of the empty places."""
        return tuple(number for number in range(self.k) if number not in self.cards)

    def __len__(self) -> int:
        return self.k

    def __getitem__(self, number: int) -> Denoiser:
        if not 0 <= number < self.k:
            raise IndexError(f"there are {self.k} experts")
        return _BankExpert(self, number if number in self.cards else self.present[0])

    def forward(self, number: PartName, x_t: Tensor, t: Tensor, cond: Condition) -> Tensor:
        """Rectified-flow velocity `(B, C, H, W)` of one expert, in the type of `x_t`.

        The network sees its own type of numbers; what is before and after it keeps that of the state.
        """
        if self.offloaded is not None and number != PRETRAIN:
            return self.offloaded.velocity(number, x_t, t, cond)
        card = self.pretrain_card if number == PRETRAIN else self.cards[number]
        assert card is not None
        network = self.networks[str(number)]
        expert = Expert(network, card.family, card.prediction, card.schedule, card)
        kind = next((p.dtype for p in network.parameters() if p.is_floating_point()), x_t.dtype)
        return expert.velocity(x_t.to(kind), t, cond).to(x_t.dtype)

    def prefetch(self, now: Sequence[int], next: Sequence[int] = ()) -> Sequence[int]:
        """See `dispatch.Prefetching`: those that are on the device come first."""
        return now if self.offloaded is None else self.offloaded.experts().prefetch(now, next)

    def add(self, expert: Expert | StoredExpert | str | os.PathLike[str], number: int | None = None) -> None:
        """Put an expert into its place, which may be empty or held by an older version of it.

        Args:
            expert: with its card, or the folder of a published one (`islands/K/expert`).
            number: of its cluster; by default what its card says.

        Raises:
            ConfigError: it has no card, or the router knows no such cluster.
            PartitionError: it was trained for another partition, latents, text encoder or cluster.
            StoreError: its weights are not those of its card, or are no safetensors.
        """
        if isinstance(expert, str | os.PathLike):
            expert = read_expert(_folder_of(Path(expert)), stored=self.offloaded is not None)
        if not isinstance(expert, Expert | StoredExpert):
            raise ConfigError(f"{expert!r} is no expert", "give the folder of one, such as islands/0/expert")
        if expert.card is None:
            raise ConfigError("an expert without a card", "give one that was published")
        place = expert.card.island if number is None else number
        if place is None:
            raise ConfigError(f"a {expert.card.role} is of no cluster", "give the expert of an island")
        if not 0 <= place < self.k:
            raise ConfigError(
                f"there is no place {place} among {self.k} experts", "give its cluster's number"
            )
        check_place(expert.card, f"expert {place}", f"place {place}")
        check_together([*self.cards.values(), expert.card])
        if self.offloaded is not None:
            self.offloaded.put(place, expert if isinstance(expert, StoredExpert) else StoredExpert.of(expert))
        else:
            self._put(place, expert.expert() if isinstance(expert, StoredExpert) else expert)
        self.cards[place] = expert.card
        self.dropped.discard(place)

    def _put(self, place: PartName, expert: Expert) -> None:
        like = next(self.parameters(), None)
        if like is not None:
            nn.Module.to(expert.network, like.device, like.dtype)  # the class's own `to` warns
        self.networks[str(place)] = expert.network.eval().requires_grad_(False)

    def drop(self, number: int) -> None:
        """Empty a place; its share goes to the others.

        Raises:
            ConfigError: there is no such expert, or it is the last one.
        """
        if number not in self.cards:
            raise ConfigError(f"there is no expert {number}", f"there are {listed(self.present)}")
        if len(self.cards) == 1:
            raise ConfigError(f"expert {number} is the last one", "keep it, or add another one first")
        del self.cards[number]
        self.dropped.add(number)
        if self.offloaded is not None:
            self.offloaded.put(number, None)
        else:
            del self.networks[str(number)]
        self.tell()

    def tell(self) -> None:
        """Say loudly what is missing."""
        if self.missing:
            logger.warning(
                "partial ensemble: experts %s of %d are missing; their share goes to the others",
                listed(self.missing),
                self.k,
            )

    def save_pretrained(
        self,
        save_directory: str | os.PathLike[str],
        safe_serialization: bool = True,
        variant: str | None = None,
        **kwargs: Any,
    ) -> None:
        """Write `experts.json` and a folder for every expert; what lies there unchanged is left alone.

        What was dropped is removed there too.

        Args:
            save_directory: of this component.
            safe_serialization: safetensors is the only form.
            variant: there are none.

        Raises:
            ConfigError: there lie experts that the bank does not have.
        """
        if not safe_serialization or variant is not None:
            raise ConfigError("experts are saved as safetensors without variants", "leave these options out")
        root = Path(save_directory)
        self.check_folder(root)
        files = Store.open(root, create=True)
        (root / EXPERTS).unlink(missing_ok=True)
        for number, card in self.cards.items():
            self.cards[number] = Checkpoint(files, str(number)).save(self._network(number), card)
        for number in self.dropped:
            shutil.rmtree(root / str(number), ignore_errors=True)
        if self.pretrain_card is not None:
            self.pretrain_card = Checkpoint(files, PRETRAIN).save(self.networks[PRETRAIN], self.pretrain_card)
        files.put_json(EXPERTS, ExpertIndex.of(self.k, self.cards, self.pretrain_card).to_json())

    def check_folder(self, root: Path) -> None:
        """Refuse a folder where other experts lie than were ever here: they would be lost."""
        names = [path.name for path in root.iterdir()] if root.is_dir() else []
        known = {*self.cards, *self.dropped}
        others = sorted(int(name) for name in names if name.isdecimal() and int(name) not in known)
        held = [f"experts {listed(others)}"] if others else []
        held += [PRETRAIN] if PRETRAIN in names and self.pretrain_card is None else []
        if held:
            raise ConfigError(
                f"{root} holds {' and '.join(held)}, which this pipeline does not have",
                "save to another folder, or remove them first",
            )

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """As any module's; diffusers' own warns of layers to keep in float32, of which there are none."""
        return nn.Module.to(self, *args, **kwargs)

    def _network(self, number: int) -> nn.Module:
        """One expert's network in memory, for as long as the caller needs it."""
        if self.offloaded is None:
            return self.networks[str(number)]
        return nn.Module.to(self.offloaded.stored[number].expert().network, dtype=self.offloaded.dtype)

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | os.PathLike[str],
        experts: Chosen = "auto",
        residency: Residency | None = None,
        **kwargs: Any,
    ) -> Self:
        """Read what `save_pretrained` wrote.

        Args:
            pretrained_model_name_or_path: folder of this component.
            experts: numbers of those to load; `auto` for all there are.
            residency: how many stay on the device; the others are checked, and read when wanted.
            kwargs: `torch_dtype` is the type of the networks; what else diffusers passes is not needed.

        Raises:
            ConfigError: an expert that is not there.
            StoreError: a file is missing, damaged or no safetensors.
        """
        root = Path(pretrained_model_name_or_path)
        index = read_index(root)
        numbers = select_experts(experts, index.numbers)
        limited = residency is not None and residency.limited
        loaded = {n: read_expert(root / str(n), stored=limited) for n in numbers}
        pretrain = read_expert(root / PRETRAIN, stored=False) if PRETRAIN in index.experts else None
        assert not isinstance(pretrain, StoredExpert)
        bank = cls(loaded, index.k, residency, pretrain)
        kind = kwargs.get("torch_dtype") or kwargs.get("dtype")
        return bank if kind is None else nn.Module.to(bank, dtype=kind)


class _BankExpert(Denoiser):
    """One place of a bank; asks through the bank's own call, so that hooks on it (offload) are obeyed."""

    def __init__(self, bank: ExpertBank, number: PartName) -> None:
        self.bank, self.number = bank, number

    def velocity(self, x_t: Tensor, t: Tensor, cond: Condition) -> Tensor:
        answer: Tensor = self.bank(self.number, x_t, t, cond)
        return answer


def read_expert(folder: Path, *, stored: bool) -> Expert | StoredExpert:
    """A published expert, checked; as `stored` its weights stay where they are."""
    if not folder.is_dir():
        raise StoreError(f"{folder} is missing", REMEDY)
    checkpoint = Checkpoint(Store.open(folder))
    checkpoint.check()
    return checkpoint.open_lazily() if stored else checkpoint.expert()


def _folder_of(folder: Path) -> Path:
    """A folder that may be an expert's; those that hold experts and routers are told apart from it."""
    for name, fix in (
        ("campaign.json", "islands/K/expert"),
        ("campaign.yaml", "islands/K/expert"),
        ("model_index.json", "experts/K"),
        ("island.json", "expert"),
    ):
        if (folder / name).is_file():
            raise ConfigError(f"{folder} is not the folder of one expert", f"give {folder / fix}")
    if (folder / "card.json").is_file() and Checkpoint(Store.open(folder), ".").card.role == "router":
        raise ConfigError(f"{folder} is a router's", "give the folder of an expert")
    return folder
