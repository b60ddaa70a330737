"""How good the router's posterior is at every time: accuracy, likelihood, calibration.

The router answers p(k | x_t, t, c). The exact mixture needs that very number and not only the right order
(DDM, eq. 4), and `once` draws from it at t = 1, so calibration counts beside accuracy.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from atoll.base.table import finite
from atoll.campaign.diagnosed import ReliabilityRow, RouterClusterRow, RouterRow
from atoll.measure.moments import Means

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
        # Bins are (i / M, (i + 1) / M], so that an answer of certainty 1 is in the last one.
        where = (confidence * self.bins).ceil().long().sub(1).clamp(0, self.bins - 1)
        parts = (torch.ones_like(confidence), confidence, right, confidence * (1 - confidence))
        for total, part in zip(self._binned, parts, strict=True):
            total.scatter_add_(1, where, part)
        for number, temperature in enumerate(TEMPERATURES):
            cooled = (logits.double() / temperature).log_softmax(-1)
            self._tempered[:, number] -= cooled.gather(-1, index)[..., 0].sum(1)

    def by_time(self) -> list[RouterRow]:
        """The router at every time, over all rows."""
        whole = self._rows.pooled(range(self.k))
        beside = self._beside.pooled(range(self.k))
        entropy = -float(torch.special.xlogy(self.prior, self.prior).sum())
        rows = []
        for number, t in enumerate(self.times):
            count, nll, nll_se = whole.cells(number, 0)
            _, accuracy, accuracy_se = whole.cells(number, 1)
            best = int(self._tempered[number].argmin())
            _, confidence, right, variance = self._binned[:, number]
            rows.append(
                RouterRow(
                    t=t,
                    rows=count,
                    nll=nll,
                    nll_se=nll_se,
                    accuracy=accuracy,
                    accuracy_se=accuracy_se,
                    confidence=float(confidence.sum() / count),
                    ece=float((confidence - right).abs().sum() / count),
                    ece_chance=float((variance * 2 / math.pi).sqrt().sum() / count),
                    temperature=TEMPERATURES[best],
                    nll_tempered=finite(self._tempered[number, best] / count),
                    prior_nll=beside.cells(0)[1],
                    prior_accuracy=beside.cells(1)[1],
                    prior_entropy=entropy,
                )
            )
        return rows

    def by_cluster(self) -> list[RouterClusterRow]:
        """The same by the cluster that rows belong to."""
        rows = []
        for number, t in enumerate(self.times):
            for cluster in range(self.k):
                moments = self._rows.of(cluster)
                count, nll, nll_se = moments.cells(number, 0)
                _, accuracy, accuracy_se = moments.cells(number, 1)
                rows.append(
                    RouterClusterRow(
                        t=t,
                        cluster=cluster,
                        rows=count,
                        nll=nll,
                        nll_se=nll_se,
                        accuracy=accuracy,
                        accuracy_se=accuracy_se,
                    )
                )
        return rows

    def reliability(self) -> list[ReliabilityRow]:
        """Confidence against accuracy in bins of confidence; no empty bins."""
        return [
            ReliabilityRow(
                t=t,
                low=place / self.bins,
                high=(place + 1) / self.bins,
                rows=int(count),
                confidence=confidence / count,
                accuracy=right / count,
            )
            for number, t in enumerate(self.times)
            for place, (count, confidence, right, _) in enumerate(self._binned[:, number].T.tolist())
            if count
        ]
