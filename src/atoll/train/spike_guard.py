"""Steps that would do harm are skipped: losses and gradients that are not finite, and loss spikes."""

import math
from collections import deque
from statistics import median
from typing import Any

from atoll.campaign.settings.train import GuardConfig

_SETTLED = 4  # the bound counts once the window is filled to one part in so many


class Guard:
    """A rolling bound on the loss. All ranks give it the same numbers, so they decide alike.

    The bound is robust: median + factor x 1.4826 x the median absolute deviation, and never less than
    twice the median, so that a window of nearly equal losses does not take ordinary noise for a spike.

    Args:
        config: window, factor and patience.
    """

    def __init__(self, config: GuardConfig) -> None:
        self.config = config
        self.window: deque[float] = deque(maxlen=config.window)
        self.skipped = 0
        self.in_a_row = 0

    def bound(self) -> float:
        """Largest loss that is let through now."""
        if len(self.window) < self.config.window // _SETTLED:
            return math.inf
        middle = median(self.window)
        deviation = 1.4826 * median(abs(loss - middle) for loss in self.window)
        return middle + max(middle, self.config.factor * deviation)

    def admits(self, loss: float, norm: float) -> bool:
        """Whether a step of this loss and gradient norm may change the weights; counts it if not."""
        # Skipped losses stay out of the window: a burst of them would raise the bound until it lets them
        # through.
        if math.isfinite(loss) and math.isfinite(norm) and loss <= self.bound():
            self.window.append(loss)
            self.in_a_row = 0
            return True
        self.skipped += 1
        self.in_a_row += 1
        return False

    @property
    def exhausted(self) -> bool:
        """Whether too many steps in a row were skipped to go on."""
        return self.in_a_row >= self.config.patience

    def counters(self) -> dict[str, Any]:
        """The state as plain numbers."""
        return {"window": list(self.window), "skipped": self.skipped, "in_a_row": self.in_a_row}

    def restore(self, counters: dict[str, Any]) -> None:
        """Take over a saved state."""
        self.window = deque(counters["window"], maxlen=self.config.window)
        self.skipped, self.in_a_row = counters["skipped"], counters["in_a_row"]
