"""Heads on a reader's state: a score of the whole, scores along a tree, and a vote on three of them.

After HumanAesExpert (Liao et al. 2025, arXiv 2503.23907). Widths, activations and the vote's form are not
published; these are ours.
"""

import torch
from torch import Tensor, nn

from atoll.curate.aesthetics.scale import Scale


class ExpertHead(nn.Module):
    """Scores of every dimension along the scale's tree: connections that are not in it do not exist.

    A leaf sees the reader's state, any other dimension the scores of its parts and nothing else.
    """

    def __init__(self, scale: Scale, width: int) -> None:
        super().__init__()
        self.parts, self.order = scale.parts, scale.upwards
        self.nodes = nn.ModuleList(nn.Linear(len(parts) or width, 1) for parts in scale.parts)
        for parts, node in zip(scale.parts, self.nodes, strict=True):
            if parts:  # at first the mean of the parts
                assert isinstance(node, nn.Linear)
                nn.init.constant_(node.weight, 1 / len(parts))
                nn.init.zeros_(node.bias)

    def forward(self, state: Tensor) -> Tensor:
        """Scores `(B, N)` of states `(B, W)`."""
        scores: dict[int, Tensor] = {}
        for number in self.order:
            parts = self.parts[number]
            below = torch.cat([scores[part] for part in parts], dim=1) if parts else state
            scores[number] = self.nodes[number](below)
        return torch.cat([scores[number] for number in range(len(self.parts))], dim=1)


class Heads(nn.Module):
    """The regression head and the expert head."""

    def __init__(self, scale: Scale, width: int) -> None:
        super().__init__()
        self.regression, self.expert = nn.Linear(width, 1), ExpertHead(scale, width)


class MetaVoter(nn.Module):
    """One score of three: those of the language model, the regression head and the expert head's whole.

    At first their mean; a small network learns what to add, on rows that the heads have not seen.
    """

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.change = nn.Sequential(nn.Linear(3, width), nn.GELU(), nn.Linear(width, 1))
        self.shares = nn.Parameter(torch.full((3,), 1 / 3))
        last = self.change[2]
        assert isinstance(last, nn.Linear)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)

    def forward(self, scores: Tensor) -> Tensor:
        """Scores `(B,)` of `(B, 3)`."""
        voted: Tensor = scores @ self.shares + self.change(scores)[:, 0]
        return voted
