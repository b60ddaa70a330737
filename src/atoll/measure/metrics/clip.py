"""How well pictures fit their captions, by CLIP's embeddings of both."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from atoll.measure.metrics.metric import How, Metric, Value
from atoll.measure.pictures import Features

AMONG = 100
"""Captions that a picture is to find its own among."""


class Clip(Metric):
    """The CLIP score: mean of 100 max(cos, 0) of a picture and its caption (Hessel et al. 2021).

    And the share of pictures that none of `AMONG` captions fits better than their own: R-precision (Park et
    al. 2021).
    """

    names = ("clip-score", "caption-found")
    only = "clip"
    captions = True

    def label(self, name: str, how: How) -> str:
        return "CLIP score" if name == "clip-score" else f"own caption found among {min(AMONG, how.samples)}"

    def settings(self, name: str, how: How) -> dict[str, Any]:
        return {"scale": 100.0} if name == "clip-score" else {"among": min(AMONG, how.samples)}

    def compute(self, how: How, samples: Features, reference: Features) -> Mapping[str, Value]:
        assert samples.texts is not None  # `captions`
        sides = (torch.from_numpy(rows).double() for rows in (samples.rows, samples.texts))
        pictures, texts = (torch.nn.functional.normalize(rows).numpy() for rows in sides)
        scores = 100 * (pictures * texts).sum(1).clip(0)
        # In their order, which is drawn by a seed; the last ones, too few for as hard a choice, are left out.
        among, found = min(AMONG, len(texts)), list[bool]()
        for first in range(0, len(texts) - among + 1, among):
            cosines = pictures[first : first + among] @ texts[first : first + among].T
            # Equal captions are each other's own: rounding must not decide between them.
            found += (cosines.diagonal() >= cosines.max(1) - 1e-6).tolist()
        shares = {"clip-score": scores, "caption-found": np.array(found, dtype=np.float64)}
        return {name: Value(float(part.mean()), float(part.std(ddof=1))) for name, part in shares.items()}


METRICS = (Clip(),)
