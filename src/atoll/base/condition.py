"""What a denoiser is, and what it may be conditioned on."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad


@dataclass(frozen=True)
class Condition:
    """The condition of a batch; every part is optional, and all present parts share B."""

    labels: Tensor | None = None  # class labels, int64 (B,)
    text: Tensor | None = None  # text states (B, L, D)
    mask: Tensor | None = None  # which text states are real, bool (B, L); None where all are
    pooled: Tensor | None = None  # one vector per text (B, P)
    guidance: Tensor | None = None  # guidance scales (B,), where they are an input of the network

    @classmethod
    def of_text(
        cls, states: Tensor, mask: Tensor | None, pooled: int = 0, guidance: bool = False
    ) -> "Condition":
        """The condition of text states as encoders give and columns hold them.

        Args:
            states: `(B, n + L, D)`: the first n hold the pooled vector of P = `pooled` numbers, if there is
                one.
            mask: None where all are real: torch can use flash attention then.
            guidance: whether the scale is an input of the network; it is 1, as where such networks are tuned.
        """
        head, scale = -(-pooled // states.shape[-1]), states.new_ones(len(states))
        vector = states[:, :head].flatten(1)[:, :pooled] if pooled else None
        seen = None if mask is None else mask[:, head:]
        return cls(None, states[:, head:], seen, vector, scale if guidance else None)

    @property
    def real(self) -> Tensor:
        """Which text states are real, bool (B, L), where all are too."""
        assert self.text is not None
        if self.mask is not None:
            return self.mask
        return torch.ones(self.text.shape[:2], dtype=torch.bool, device=self.text.device)

    def parts(self) -> dict[str, Tensor]:
        """Those that are present, by name."""
        return {name: part for name, part in vars(self).items() if part is not None}

    @property
    def empty(self) -> bool:
        """Whether it says nothing, as that of an unconditional model."""
        return not self.parts()

    def map(self, change) -> "Condition":  # type: ignore[no-untyped-def]
        """Apply `change` to every part that is present."""
        return replace(self, **{name: change(part) for name, part in self.parts().items()})

    @property
    def rows(self) -> int:
        """B, or 1 where nothing is present."""
        return next((int(part.shape[0]) for part in self.parts().values()), 1)

    def select(self, rows: Tensor | slice | list[int]) -> "Condition":
        """Some rows of the batch, in this order."""
        return self.map(lambda part: part[rows])

    def to(self, device: torch.device | str) -> "Condition":
        """The same on another device."""
        return self.map(lambda part: part.to(device))

    def widened(self) -> "Condition":
        """The same in float32: text states lie in half, which autocast to bf16 does not concatenate."""
        return self.map(lambda part: part.float() if part.is_floating_point() else part)

    def expand(self, batch: int) -> "Condition":
        """A condition of one row, repeated for `batch` rows without copying."""
        return self.map(lambda part: part.expand(batch, *part.shape[1:]))

    def where(self, keep: Tensor, other: "Condition") -> "Condition":
        """Rows where `keep (B,)` is true from self, the rest from `other` (one row or B); text is padded."""
        mine, null = pad_text([self, other])
        null = null.expand(keep.shape[0]) if null.rows == 1 else null
        theirs = null.parts()
        both = {name: part for name, part in mine.parts().items() if name in theirs}
        rows = {name: keep.view(-1, *[1] * (part.ndim - 1)) for name, part in both.items()}
        return Condition(**{name: torch.where(rows[name], part, theirs[name]) for name, part in both.items()})


def concatenate(conditions: Sequence[Condition]) -> Condition:
    """Conditions one after the other along B, text padded to the longest."""
    parts = [condition.parts() for condition in pad_text(conditions)]
    shared = [name for name in parts[0] if all(name in others for others in parts)]
    return Condition(**{name: torch.cat([part[name] for part in parts]) for name in shared})


def pad_text(conditions: Sequence[Condition]) -> list[Condition]:
    """The same conditions with text and mask padded to one common length."""
    longest = max((c.text.shape[1] for c in conditions if c.text is not None), default=0)
    masked = any(c.text is not None and (c.mask is not None or c.text.shape[1] < longest) for c in conditions)
    padded = []
    for condition in conditions:
        text = condition.text
        if text is not None and masked:
            mask, missing = condition.real, longest - text.shape[1]
            # A mask of zeros beside the zeros: networks must not attend to what only makes batches even.
            text, mask = (pad(text, (0, 0, 0, missing)), pad(mask, (0, missing))) if missing else (text, mask)
            condition = replace(condition, text=text, mask=mask)
        padded.append(condition)
    return padded


class Denoiser(Protocol):
    """Anything that gives the flow: an expert, the ensemble, the monolith, a student."""

    def velocity(self, x_t: Tensor, t: Tensor, cond: Condition) -> Tensor:
        """`v = d x_t / dt` `(B, C, H, W)` at `x_t (B, C, H, W)` and `t (B,)`: 0 is data, 1 is noise."""
        ...
