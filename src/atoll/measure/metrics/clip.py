"""The CLIP score: how well pictures fit their captions (Hessel et al. 2021, with weight 100)."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from atoll.encoders.vision import ClipEncoder, VisionEncoder
from atoll.measure.metrics.metric import How, Metric, Value
from atoll.measure.pictures import F32, F64, Features


class ClipScore(Metric):
    """Mean of 100 max(cos, 0) between a picture's and its caption's embedding."""

    names = ("clip-score",)
    only = "clip"
    captions = True

    def label(self, name: str, how: How) -> str:
        return "CLIP score"

    def settings(self, name: str, how: How) -> dict[str, Any]:
        return {"scale": 100.0}

    def score(self, encoder: VisionEncoder, features: F32, captions: list[str]) -> F64:
        """Of every picture and its caption `(N,)`."""
        assert isinstance(encoder, ClipEncoder)  # `only`
        pictures, texts = features.astype(np.float64), encoder.texts(captions).numpy().astype(np.float64)
        lengths = np.linalg.norm(pictures, axis=1) * np.linalg.norm(texts, axis=1)
        scores: F64 = 100 * ((pictures * texts).sum(1) / lengths).clip(0)
        return scores

    def compute(self, how: How, samples: Features, reference: Features) -> Mapping[str, Value]:
        scores = samples.scores["clip-score"]
        return {"clip-score": Value(float(scores.mean()), float(scores.std(ddof=1)))}


METRICS = (ClipScore(),)
