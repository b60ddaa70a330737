"""How good the router's posterior is at every time: accuracy, likelihood, calibration.

The router answers p(k | x_t, t, c). The exact mixture needs that very number and not only the right order
(DDM, eq. 4), and `once` draws from it at t = 1, so calibration counts beside accuracy.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from atoll.campaign.results import Table
from atoll.measure.diagnosis.running_stats import Means
from atoll.measure.table import Cell, finite

TEMPERATURES = tuple(2 ** (i / 8) for i in range(-24, 25))
"""Tried for the best one: 1/8 to 8 in steps of an eighth of an octave."""


class Calibration:
    """The router's answers on rows whose cluster is known, collected batch by batch.

    Args:
        times: T times that it was asked at.
        prior: share of every cluster in the training rows `(K,)`: what one knows without looking.
        bins: of confidence, of equal width.
    """

    def __init__(self, times: Sequence[float], prior: Tensor, bins: int) -> None:
        self.times, self.prior, self.bins = list(times), prior.double() / prior.sum(), bins
        self.k = len(prior)
        self._rows = Means(self.k, (len(times), 2))
        self._beside = Means(self.k, (2,))
        # Of every bin of confidence: rows, confidence, right answers, and their variance if calibrated.
        self._binned = torch.zeros(4, len(times), bins, dtype=torch.float64)
        self._tempered = torch.zeros(len(times), len(TEMPERATURES), dtype=torch.float64)

    def add(self, logits: Tensor, clusters: Tensor) -> None:
        """The logits `(T, B, K)` of rows of these clusters `(B,)`."""
        logp = logits.double().log_softmax(-1)
        index = clusters.expand(len(self.times), -1)[..., None]
        loss = -logp.gather(-1, index)[..., 0]
        confidence, answer = logp.exp().max(-1)
        right = (answer == clusters).double()
        self._rows.add(torch.stack([loss, right], -1).transpose(0, 1), clusters)
        guess = (clusters == self.prior.argmax()).double()
        self._beside.add(torch.stack([-self.prior.log()[clusters], guess], -1), clusters)
        self._bin(confidence, right)
        for number, temperature in enumerate(TEMPERATURES):
            cooled = (logits.double() / temperature).log_softmax(-1)
            self._tempered[:, number] -= cooled.gather(-1, index)[..., 0].sum(1)

    def _bin(self, confidence: Tensor, right: Tensor) -> None:
        # Bins are (i / M, (i + 1) / M], so that an answer of certainty 1 is in the last one.
        where = (confidence * self.bins).ceil().long().sub(1).clamp(0, self.bins - 1)
        parts = (torch.ones_like(confidence), confidence, right, confidence * (1 - confidence))
        for total, part in zip(self._binned, parts, strict=True):
            total.scatter_add_(1, where, part)

    def by_time(self) -> Table:
        """The router at every time, over all rows.

        nll: mean of -log p(own cluster), nats; nll_se its standard error. accuracy: share of rows whose own
        cluster is the likeliest. confidence: mean probability of the likeliest; above the accuracy it is too
        sure. ece: expected calibration error, the mean over bins of |accuracy - confidence|, weighted by
        their rows (Guo et al. 2017, arXiv 1706.04599). ece_chance: what a perfectly calibrated router would
        get from so few rows (bins' normal approximation: sqrt(2 / pi) of a standard deviation each); an ece
        near it says nothing against the router. temperature: the one of `TEMPERATURES` that the logits,
        divided by it, are likeliest at (same paper), and nll_tempered what that gives; chosen on these rows.
        prior_nll, prior_accuracy: of the training shares as everybody's answer; prior_entropy: of these
        shares, what prior_nll is where the rows are shared out alike.
        """
        columns = (
            "t", "rows", "nll", "nll_se", "accuracy", "accuracy_se", "confidence", "ece", "ece_chance",
            "temperature", "nll_tempered", "prior_nll", "prior_accuracy", "prior_entropy",
        )  # fmt: skip
        whole = self._rows.pooled(range(self.k))
        beside = self._beside.pooled(range(self.k))
        entropy = -float(torch.special.xlogy(self.prior, self.prior).sum())
        rows: list[list[Cell]] = []
        for number, t in enumerate(self.times):
            count, nll, nll_se = whole.cells(number, 0)
            _, accuracy, accuracy_se = whole.cells(number, 1)
            best = int(self._tempered[number].argmin())
            sums = self._binned[:, number]
            rows.append(
                [
                    t, count, nll, nll_se, accuracy, accuracy_se,
                    float(sums[1].sum() / count),
                    float((sums[1] - sums[2]).abs().sum() / count),
                    float((sums[3] * 2 / math.pi).sqrt().sum() / count),
                    TEMPERATURES[best], finite(self._tempered[number, best] / count),
                    beside.cells(0)[1], beside.cells(1)[1], entropy,
                ]
            )  # fmt: skip
        return Table.of(columns, rows)

    def by_cluster(self) -> Table:
        """The same by the cluster that rows belong to; accuracy is then the share that is found (recall)."""
        columns = ("t", "cluster", "rows", "nll", "nll_se", "accuracy", "accuracy_se")
        rows: list[list[Cell]] = []
        for number, t in enumerate(self.times):
            for cluster in range(self.k):
                cells = self._rows.of(cluster)
                rows.append([t, cluster, *cells.cells(number, 0), *cells.cells(number, 1)[1:]])
        return Table.of(columns, rows)

    def reliability(self) -> Table:
        """Confidence against accuracy in bins of confidence (the reliability diagram); no empty bins."""
        columns = ("t", "low", "high", "rows", "confidence", "accuracy")
        rows: list[list[Cell]] = []
        for number, t in enumerate(self.times):
            for place, (count, sure, right, _) in enumerate(self._binned[:, number].T.tolist()):
                if count:
                    ends = (place / self.bins, (place + 1) / self.bins)
                    rows.append([t, *ends, int(count), sure / count, right / count])
        return Table.of(columns, rows)
