"""What a denoiser is, and what it may be conditioned on."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class Condition:
    """The condition of a batch; every part is optional, and all present parts share B.

    Attributes:
        labels: class labels, int64 `(B,)`.
        text: text states `(B, L, D)`, with `mask`.
        mask: which text states are real, bool `(B, L)`.
        pooled: one vector per text `(B, P)`.
    """

    labels: Tensor | None = None
    text: Tensor | None = None
    mask: Tensor | None = None
    pooled: Tensor | None = None

    @property
    def empty(self) -> bool:
        """Whether it says nothing, as that of an unconditional model."""
        return all(getattr(self, f.name) is None for f in fields(self))

    def map(self, change) -> "Condition":  # type: ignore[no-untyped-def]
        """Apply `change` to every part that is present."""
        parts = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **{k: change(v) for k, v in parts.items() if v is not None})

    @property
    def rows(self) -> int:
        """B, or 1 where nothing is present."""
        present = (getattr(self, f.name) for f in fields(self))
        return next((int(part.shape[0]) for part in present if part is not None), 1)

    def take(self, numbers: Sequence[int]) -> "Condition":
        """The condition of the rows of these numbers, in this order."""
        return self.map(lambda part: part[torch.tensor(list(numbers), device=part.device)])

    def select(self, rows: Tensor | slice) -> "Condition":
        """The condition of some rows of the batch."""
        return self.map(lambda part: part[rows])

    def to(self, device: torch.device | str) -> "Condition":
        """The same on another device."""
        return self.map(lambda part: part.to(device))

    def expand(self, batch: int) -> "Condition":
        """A condition of one row, repeated for `batch` rows without copying."""
        return self.map(lambda part: part.expand(batch, *part.shape[1:]))

    def where(self, keep: Tensor, other: "Condition") -> "Condition":
        """Rows where `keep (B,)` is true from self, the rest from `other` (one row or B rows).

        Text states of different length are padded to the longer one.
        """
        mine, null = pad_text([self, other])
        batch = keep.shape[0]
        null = null.expand(batch) if null.rows == 1 else null
        pick = {}
        for field in fields(self):
            a, b = getattr(mine, field.name), getattr(null, field.name)
            if a is not None and b is not None:
                pick[field.name] = torch.where(keep.view(-1, *[1] * (a.ndim - 1)), a, b)
        return Condition(**pick)


def concatenate(conditions: Sequence[Condition]) -> Condition:
    """Conditions one after the other along B, text padded to the longest."""
    padded = pad_text(conditions)
    parts = {}
    for field in fields(Condition):
        values = [getattr(c, field.name) for c in padded]
        if all(v is not None for v in values):
            parts[field.name] = torch.cat(values)
    return Condition(**parts)


def pad_text(conditions: Sequence[Condition]) -> list[Condition]:
    """The same conditions with text and mask padded to one common length."""
    lengths = [c.text.shape[1] for c in conditions if c.text is not None]
    longest = max(lengths, default=0)
    return [_pad(c, longest) for c in conditions]


def _pad(condition: Condition, length: int) -> Condition:
    text, mask = condition.text, condition.mask
    if text is None or mask is None or text.shape[1] == length:
        return condition
    missing = length - text.shape[1]
    return replace(
        condition,
        text=torch.nn.functional.pad(text, (0, 0, 0, missing)),
        mask=torch.nn.functional.pad(mask, (0, missing)),
    )


class Denoiser(Protocol):
    """Anything that gives the flow: an expert, the ensemble, the monolith, a student."""

    def velocity(self, x_t: Tensor, t: Tensor, cond: Condition) -> Tensor:
        """The velocity `v = d x_t / dt` `(B, C, H, W)` at `x_t (B, C, H, W)`, `t (B,)` in [0, 1].

        t = 0 is data and t = 1 is noise.
        """
        ...
