"""The experts as one component of a diffusers pipeline.

diffusers takes no list of components. As `MultiControlNetModel` does, one module holds all networks.
`model_index.json` names this module by its import path, so it stays here.
"""

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import torch
from diffusers.models.modeling_utils import ModelMixin
from torch import Tensor, nn

from atoll.base.condition import Condition, Denoiser
from atoll.base.errors import AtollError, ConfigError
from atoll.model.card import Card, check_place, check_together
from atoll.model.checkpoint import Checkpoint
from atoll.model.expert import Expert, StoredExpert
from atoll.model.generation import Residency
from atoll.model.model_card import listed
from atoll.model.residency import ResidentExperts
from atoll.model.routing import PRETRAIN
from atoll.store.store import Store

logger = logging.getLogger(__name__)
PartName = int | Literal["pretrain"]
"""Number of an expert, or the network of shared pretraining."""
INNER = {
    "campaign.json": "islands/K/expert",
    "campaign.yaml": "islands/K/expert",
    "model_index.json": "experts/K",
    "island.json": "expert",
}
"""Files of folders that people take for an expert's, and where in those the expert lies."""


class ExpertBank(ModelMixin):  # type: ignore[misc]
    """K places for experts, some of which may be empty; as a sequence it is what `model.bank.Bank` takes.

    Args:
        experts: by the number of their cluster, each with its card.
        k: number of clusters; by default one more than the largest number.
        residency: how many stay on the device; the others lie where they were read from.
        pretrain: network of shared pretraining, which is always on the device.
    """

    anchor: Tensor

    def __init__(
        self,
        experts: Mapping[int, Expert | StoredExpert],
        k: int | None = None,
        residency: Residency | None = None,
        pretrain: Expert | StoredExpert | None = None,
    ) -> None:
        super().__init__()
        if not experts:
            raise ConfigError("a bank without experts", "give at least one")
        self.k = max(experts) + 1 if k is None else k
        # Changes of one network (LoRA) share it, as experts do that take turns on the device.
        share = any(_card_of(expert).base for expert in experts.values())
        limited = residency is not None and residency.limited
        self.residency = residency or Residency() if limited or share else None
        self.cards: dict[int, Card] = {}
        self.pretrain_card: Card | None = None
        self.dropped: set[int] = set()
        # Networks on the device are modules of this one; those that are brought to it are not.
        self.networks = nn.ModuleDict()
        self.loaded: dict[PartName, Expert] = {}
        self.stored: dict[int, StoredExpert] = {}
        self._resident: ResidentExperts | None = None
        # It follows `to` and `cast`, where there may be no parameter that does: experts are brought to its
        # device, in its type of numbers.
        self.register_buffer("anchor", torch.empty(0), persistent=False)
        for number in sorted(experts):
            self.add(experts[number], number)
        if pretrain is not None:
            self.pretrain_card = _card_of(pretrain)
            check_place(self.pretrain_card, PRETRAIN, "pretrain")
            check_together(self.every_card)
            self._load(PRETRAIN, pretrain)

    @property
    def present(self) -> tuple[int, ...]:
        """Numbers of the experts that are here."""
        return tuple(sorted(self.cards))

    @property
    def missing(self) -> tuple[int, ...]:
        """Numbers of the empty places."""
        return tuple(number for number in range(self.k) if number not in self.cards)

    @property
    def every_card(self) -> list[Card]:
        """Of the experts, and of shared pretraining's network."""
        return [*self.cards.values(), *([self.pretrain_card] if self.pretrain_card else [])]

    @property
    def pretrain(self) -> Denoiser | None:
        """The network of shared pretraining, which guidance's null branch may ask."""
        return None if self.pretrain_card is None else _BankExpert(self, PRETRAIN)

    def __len__(self) -> int:
        return self.k

    def __getitem__(self, number: int) -> Denoiser | None:
        if not 0 <= number < self.k:
            raise IndexError(f"there are {self.k} experts")
        return _BankExpert(self, number) if number in self.cards else None

    def forward(self, number: PartName, x_t: Tensor, t: Tensor, cond: Condition) -> Tensor:
        """Rectified-flow velocity `(B, C, H, W)` of one expert, in the type of `x_t`."""
        if number in self.loaded:
            return self.loaded[number].velocity(x_t, t, cond)
        assert number != PRETRAIN
        return self.resident()[number].velocity(x_t, t, cond)

    def prefetch(self, now: Sequence[int], next: Sequence[int] = ()) -> Sequence[int]:
        """See `dispatch.Prefetching`: those that are on the device come first."""
        return now if self.residency is None else self.resident().prefetch(now, next)

    def resident(self) -> ResidentExperts:
        """The experts within their budget, on the device where this module is now."""
        resident, place = self._resident, (self.anchor.device, self.anchor.dtype)
        # Somebody may have moved or cast the module since: what was brought lies in the wrong place then.
        if resident is None or (resident.device, resident.dtype) != place:
            self._forget()
            experts = [self.stored.get(number) for number in range(max(self.stored) + 1)]
            resident = self._resident = ResidentExperts(experts, self.residency, *place)
        return resident

    def _forget(self) -> None:
        if self._resident is not None:
            self._resident.close()
            self._resident = None

    def add(self, expert: Expert | StoredExpert | str | os.PathLike[str], number: int | None = None) -> None:
        """Put an expert into its place, which may be empty or held by an older version of it.

        Args:
            expert: with its card, or the folder of a published one (`islands/K/expert`).
            number: of its cluster; by default what its card says.

        Raises:
            ConfigError: it has no card, the router knows no such cluster, or the budget does not hold it.
            PartitionError: it was trained for another partition, latents, text encoder or cluster.
        """
        if isinstance(expert, str | os.PathLike):
            folder = Path(expert)
            for name, inner in INNER.items():
                if (folder / name).is_file():
                    what = f"{folder} is not the folder of one expert"
                    raise ConfigError(what, f"give {folder / inner}")
            folder = folder.resolve()  # what it may be a change of lies beside it
            published = Checkpoint(Store.open(folder.parent), folder.name)
            published.check()
            expert = published.expert() if self.residency is None else published.open_lazily()
        card = _card_of(expert)
        place = card.island if number is None else number
        if place is None:
            raise ConfigError(f"a {card.role} is of no cluster", "give the expert of an island")
        if not 0 <= place < self.k:
            what = f"there is no place {place} among {self.k} experts"
            raise ConfigError(what, "give its cluster's number")
        check_place(card, f"expert {place}", f"place {place}")
        check_together([*self.cards.values(), card])
        if self.residency is None:
            self._load(place, expert)
        else:
            before = dict(self.stored)
            self.stored[place] = expert if isinstance(expert, StoredExpert) else StoredExpert.of(expert)
            if not before:  # the type that all numbers of the first have
                specs = self.stored[place].specs.values()
                kinds = {spec.dtype for spec in specs if spec.dtype.is_floating_point}
                self.anchor = self.anchor.to(kinds.pop() if len(kinds) == 1 else torch.float32)
            self._forget()
            try:
                self.resident()
            except AtollError:  # a budget that does not hold it, or weights that fit no network
                self.stored = before
                raise
        self.cards[place] = card
        self.dropped.discard(place)

    def _load(self, place: PartName, expert: Expert | StoredExpert) -> None:
        loaded = expert.expert() if isinstance(expert, StoredExpert) else expert
        # A bank that was moved or cast before takes a late expert along, or a step would mix devices.
        like = next(self.parameters(), None)
        if like is not None:
            nn.Module.to(loaded.network, like.device, like.dtype)  # the class's own `to` warns
        self.networks[str(place)] = loaded.network.eval().requires_grad_(False)
        self.loaded[place] = loaded

    def drop(self, number: int) -> None:
        """Empty a place, unless it is the last one; its share goes to the others."""
        if number not in self.cards:
            raise ConfigError(f"there is no expert {number}", f"there are {listed(self.present)}")
        if len(self.cards) == 1:
            raise ConfigError(f"expert {number} is the last one", "keep it, or add another one first")
        del self.cards[number]
        self.dropped.add(number)
        if self.residency is None:
            del self.networks[str(number)], self.loaded[number]
        else:
            del self.stored[number]
            self._forget()
        self.warn_of_missing()

    def warn_of_missing(self) -> None:
        """Say loudly what is missing."""
        if self.missing:
            words = "partial ensemble: experts %s of %d are missing; their share goes to the others"
            logger.warning(words, listed(self.missing), self.k)

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """As any module's; diffusers' own warns of layers to keep in float32, of which there are none."""
        return nn.Module.to(self, *args, **kwargs)

    def network(self, number: PartName) -> nn.Module:
        """A network in memory, for as long as the caller needs it."""
        if number in self.loaded:
            return self.loaded[number].network
        assert number != PRETRAIN
        return nn.Module.to(self.stored[number].expert().network, dtype=self.anchor.dtype)

    def check_folder(self, root: Path) -> None:
        """Refuse a folder where other experts lie than were ever here: they would be lost."""
        names = [path.name for path in root.iterdir()] if root.is_dir() else []
        known = {*self.cards, *self.dropped}
        others = sorted(int(name) for name in names if name.isdecimal() and int(name) not in known)
        held = [f"experts {listed(others)}"] if others else []
        held += [PRETRAIN] if PRETRAIN in names and self.pretrain_card is None else []
        if held:
            what = f"{root} holds {' and '.join(held)}, which this pipeline does not have"
            raise ConfigError(what, "save to another folder, or remove them first")


class _BankExpert(Denoiser):
    """One place of a bank; asks through the bank's own call, so that hooks on it (offload) are obeyed."""

    def __init__(self, bank: ExpertBank, number: PartName) -> None:
        self.bank, self.number = bank, number

    def velocity(self, x_t: Tensor, t: Tensor, cond: Condition) -> Tensor:
        answer: Tensor = self.bank(self.number, x_t, t, cond)
        return answer


def _card_of(expert: Any) -> Card:
    if not isinstance(expert, Expert | StoredExpert):
        raise ConfigError(f"{expert!r} is no expert", "give the folder of one, such as islands/0/expert")
    if expert.card is None:
        raise ConfigError("an expert without a card", "give one that was published")
    return expert.card
