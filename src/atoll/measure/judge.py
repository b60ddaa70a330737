"""Who judges a comparison: one extractor, fixed principal components, and the held-out pictures."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from atoll.base.errors import DataError
from atoll.base.rng import generator
from atoll.campaign.settings.measure import CompareConfig
from atoll.data.dataset import DataSet
from atoll.encoders.vision import VisionEncoder
from atoll.measure.features import FeatureRows, FeatureSet
from atoll.measure.frechet import Projection, frechet_distance
from atoll.measure.moments import F64
from atoll.measure.neighbours import DENSITY_K, PRECISION_K, neighbourhoods

F32 = NDArray[np.float32]


@dataclass
class Judge:
    """The extractor, its fixed components, and the reference it compares with.

    Attributes:
        encoder: gives the features.
        projection: the components that distances are taken in.
        features: of the reference, `(M, D)`; precision and recall are taken in all D dimensions.
    """

    encoder: VisionEncoder
    projection: Projection
    features: F32

    @property
    def components(self) -> int:
        """Number of principal components in use."""
        return int(self.projection.axes.shape[1])

    @classmethod
    def make(cls, encoder: VisionEncoder, dataset: DataSet, config: CompareConfig, seed: int) -> "Judge":
        """Components from training pictures; the reference is every held-out picture.

        Raises:
            DataError: there are too few held-out pictures.
        """
        train, heldout = dataset.split("train"), dataset.split("heldout")
        order = torch.randperm(len(train), generator=generator(seed, "judge")).numpy()
        rows = np.sort(train[order[: config.fit_rows]])
        components = min(config.components, min(len(heldout), len(rows)) // 2)
        if components < 1:
            raise DataError(
                f"{len(heldout)} held-out rows cannot judge", "hold out more: data.ingest.heldout"
            )
        projection = Projection.fit(_features(encoder, dataset, rows), components)
        return cls(encoder, projection, _features(encoder, dataset, heldout))

    def of(self, pictures: int) -> "Judge":
        """The judge of so many pictures: no more components than half of them."""
        few = min(self.components, pictures // 2)
        return replace(self, projection=Projection(self.projection.mean, self.projection.axes[:, :few]))

    def look(self, pictures: Sequence[Image.Image]) -> F32:
        """Features of pictures, `(N, D)`."""
        found: F32 = self.encoder.encode(pictures).numpy()
        return found

    def measure(self, features: F32) -> dict[str, float | None]:
        """`distance`, `precision` and `recall` of pictures with these features `(N, D)`.

        Precision and recall (Kynkäänniemi et al. 2019) are None where either side has too few pictures for
        balls.
        """
        found: dict[str, float | None] = {"precision": None, "recall": None}
        if min(len(features), len(self.features)) > DENSITY_K:
            near = neighbourhoods(FeatureSet.of(features).whole_rows(), self._rows)
            found = {name: near[name] for name in found}
        return {"distance": frechet_distance(self.projection(features), self._projected), **found}

    def real(self, dataset: DataSet, count: int, seed: int) -> dict[str, float | None]:
        """The same of real training pictures: what a perfect model would be given."""
        train = dataset.split("train")
        order = torch.randperm(len(train), generator=generator(seed, "floor")).numpy()
        return self.measure(_features(self.encoder, dataset, np.sort(train[order[:count]])))

    def about_neighbours(self, samples: int) -> dict[str, Any]:
        """What decides precision and recall of so many samples."""
        references, dimensions = self.features.shape
        return {
            "k": PRECISION_K,
            "dimensions": dimensions,
            "samples": samples,
            "references": references,
        }

    @cached_property
    def _projected(self) -> F64:
        return self.projection(self.features)

    @cached_property
    def _rows(self) -> FeatureRows:
        return FeatureSet.of(self.features).whole_rows()


def _features(encoder: VisionEncoder, dataset: DataSet, rows: NDArray[np.int64]) -> F32:
    chunks = [rows[i : i + 256] for i in range(0, len(rows), 256)]
    found = [encoder.encode([dataset.image(int(row)) for row in chunk]).numpy() for chunk in chunks]
    return np.concatenate(found) if found else np.empty((0, encoder.width), dtype=np.float32)
