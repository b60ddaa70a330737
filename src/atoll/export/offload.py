"""Experts of a bank that are brought to the device when they are wanted, within a budget."""

import torch
from torch import Tensor, nn

from atoll.base.condition import Condition
from atoll.base.errors import ConfigError
from atoll.model.residency import ResidentExperts
from atoll.model.settings import Residency
from atoll.model.stored import StoredExpert


class OffloadedExperts(nn.Module):
    """What stands in a bank for the networks that are not loaded.

    It follows `to`: experts run on its device, in its type of numbers.

    Args:
        residency: how many stay on the device.
    """

    anchor: Tensor

    def __init__(self, residency: Residency) -> None:
        super().__init__()
        self.residency = residency
        self.stored: dict[int, StoredExpert] = {}
        self._resident: ResidentExperts | None = None
        self.register_buffer("anchor", torch.empty(0), persistent=False)

    @property
    def dtype(self) -> torch.dtype:
        """Type of the experts' numbers."""
        return self.anchor.dtype

    def put(self, number: int, expert: StoredExpert | None) -> None:
        """Set or remove an expert; those that are on the device are brought anew.

        Raises:
            ConfigError: the budget does not hold it; nothing has changed then.
        """
        before = dict(self.stored)
        self.stored.pop(number, None)
        if expert is not None:
            self.stored[number] = expert
            if not before:
                self.anchor = self.anchor.to(_kind(expert))
        self.close()
        try:
            self.experts()
        except ConfigError:
            self.stored = before
            raise

    def experts(self) -> ResidentExperts:
        """The experts on the device where this module is."""
        resident = self._resident
        if resident is None or (resident.device, resident.dtype) != (self.anchor.device, self.dtype):
            self.close()
            places = [self.stored.get(number) for number in range(max(self.stored) + 1)]
            resident = ResidentExperts(places, self.residency, self.anchor.device, self.dtype)
            self._resident = resident
        return resident

    def velocity(self, number: int, x_t: Tensor, t: Tensor, cond: Condition) -> Tensor:
        """Rectified-flow velocity `(B, C, H, W)` of one expert, in the type of `x_t`."""
        return self.experts().velocity(number, x_t.to(self.dtype), t, cond).to(x_t.dtype)

    def close(self) -> None:
        """Give the device's memory back; experts that are wanted afterwards are brought again."""
        if self._resident is not None:
            self._resident.close()
            self._resident = None


def _kind(expert: StoredExpert) -> torch.dtype:
    """The type of an expert's numbers, where all have the same; float32 otherwise."""
    kinds = {kind for kind in expert.dtypes() if kind.is_floating_point}
    return kinds.pop() if len(kinds) == 1 else torch.float32
