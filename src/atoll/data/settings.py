"""How a data set is made and cut, as settings. Imports nothing that reads pictures or numbers."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from atoll.base.config import Config
from atoll.base.errors import ConfigError, DataError, nearest
from atoll.base.hashing import digest
from atoll.base.text import Size, parse_size, shorten

ConditionKind = Literal["text", "class", "none"]
CAPTIONS = ("text", "caption", "prompt", "txt")
"""Names of the caption's column, where none is given; the first that is there counts. `txt` is a tar's."""
FACES = {
    "DejaVuSans": "sans",
    "DejaVuSans-Bold": "sans bold",
    "DejaVuSans-Oblique": "sans oblique",
    "DejaVuSans-BoldOblique": "sans bold oblique",
    "DejaVuSerif": "serif",
    "DejaVuSerif-Bold": "serif bold",
    "DejaVuSerif-Italic": "serif italic",
    "DejaVuSerif-BoldItalic": "serif bold italic",
    "DejaVuSansMono": "mono",
    "DejaVuSansMono-Bold": "mono bold",
    "DejaVuSansMono-Oblique": "mono oblique",
    "DejaVuSansMono-BoldOblique": "mono bold oblique",
    "DejaVuSansDisplay": "sans display",
    "DejaVuSerifDisplay": "serif display",
    "STIXGeneral": "stix",
    "STIXGeneralBol": "stix bold",
    "STIXGeneralItalic": "stix italic",
    "STIXGeneralBolIta": "stix bold italic",
    "cmr10": "computer modern",
    "cmb10": "computer modern bold",
    "cmti10": "computer modern italic",
    "cmss10": "computer modern sans",
    "cmtt10": "computer modern typewriter",
    "cmmi10": "computer modern math italic",
    "cmsy10": "computer modern calligraphic",
}
"""File name and description of every face; the rest of matplotlib's hold bits of brackets, or no names."""

_CORE = "Sans Sans-Bold Sans-Oblique Serif Serif-Bold Serif-Italic SansMono SansMono-Bold"
PRESETS = {
    "core": [f"DejaVu{name}" for name in _CORE.split()],
    "dejavu": [name for name in FACES if name.startswith("DejaVu")],
    "all": list(FACES),
}


class RowOptions(Config):
    """Which column of a source holds what."""

    caption: str | None = None
    """Column of the caption; by default text, caption or prompt. Without any, and with `label` set, the
    caption is the label's number."""
    group: str | None = None
    """Column of a group; images of one group are in the same split. By default identical images are a
    group."""
    label: str | None = None
    """Column of the class label, an integer; a negative label means none."""
    id: str | None = None
    """Column of the id; by default the place in the source."""
    licence: str = "not stated"
    """Licence of the data, for the manifest and cards."""
    licence_column: str | None = None
    """Column of each image's own licence; where it is empty, `licence` holds."""
    captions: bool = False
    """Whether a row may have several captions: a list of strings, or lines of a text. The first is the main
    one."""
    image: str | None = None
    """Column of the image, or of a tar its file extension; required if there are several."""
    uncaptioned: bool = False
    """Accept images without a caption: `atoll data caption` describes them."""

    def columns(self) -> list[str | None]:
        """Names of the columns of caption, group, label and id, and those that came later and are set."""
        added = [self.licence_column] if self.licence_column else []
        return [self.caption, self.group, self.label, self.id, *added]

    def state(self) -> list[str | bool | None]:
        """What rows depend on beside the files."""
        added = [f"captions {self.captions}, image {self.image}"] if self.captions or self.image else []
        added += ["uncaptioned"] if self.uncaptioned else []
        return [*self.columns(), *added]

    def described(self, name: str, content: Any) -> dict[str, Any]:
        """What a source says of itself, with its licence and the optional columns that are asked for."""
        asked = {"licence": self.licence_column is not None, "captions": self.captions}
        columns = [name for name, is_asked in asked.items() if is_asked]
        about = {"name": name, "fingerprint": digest([content, self.state()]), "licence": self.licence}
        return {**about, **({"columns": columns} if columns else {})}

    def resolve(self, tables: Sequence[tuple[str, Sequence[str]]]) -> "RowOptions":
        """The same with the caption's column filled in, for tables (name and columns) that are read alike.

        It stays None where the label is the caption. `DataError` where a table lacks a column.
        """
        # One name for all files: captions of one file and labels of another would train two conditions.
        usual = (name for _, names in tables for name in CAPTIONS if name in names)
        options = self.model_copy(update={"caption": self.caption or next(usual, None)})
        for where, names in tables:
            for key in ("caption", "group", "label", "id", "licence_column"):
                if (name := getattr(options, key)) and name not in names:
                    what = f"data.ingest.{key}: {where} has no column {name!r}"
                    raise DataError(what, f"it has {shorten(names, 20) or 'no columns'}")
        if options.caption is None and self.label is None and not self.uncaptioned:
            where, names = tables[0]
            columns = shorten(names, 20) or "no columns"
            what = f"{where} has the columns {columns}, but none of {', '.join(CAPTIONS)}"
            fix = "set data.ingest.caption to the captions' one, or data.ingest.label to the class labels'"
            raise DataError(what, fix)
        return options


class GlyphOptions(Config):
    """Which images the source `glyphs` draws."""

    faces: str | list[str] = "core"
    """Font faces: core (8), dejavu (14), all (25), or names of matplotlib's font files without `.ttf`."""
    characters: Literal["latin", "basic", "letters", "all"] = "letters"
    """`latin` (A-Z, a-z, 0-9), `basic` (these, Greek, Russian), `letters` (every Latin, Greek and Cyrillic
    letter and 0-9) or `all` named characters."""
    limit: int | None = Field(default=None, ge=1)
    """Maximum number of images; whole characters are sampled, in every face."""
    seed: int = 0
    """Random seed of that sample."""

    @field_validator("faces")
    @classmethod
    def _known(cls, value: str | list[str]) -> str | list[str]:
        known = PRESETS if isinstance(value, str) else FACES
        for name in [value] if isinstance(value, str) else value:
            if name not in known:
                raise ValueError(f"there are no faces {name!r}; {nearest(name, known)}")
        if not value:
            raise ValueError("name at least one face")
        return value


_FIVE = [(5, 4), (3, 2), (4, 3), (16, 9), (2, 1)]
ASPECTS: dict[str, list[Size]] = {
    "eleven": [(1, 1), *_FIVE, *((height, width) for width, height in _FIVE)],
    "paper": [(1280, 720), (1200, 768), (960, 960), (768, 1200), (720, 1280)],
}
"""Named lists of aspects, width to height: those of diffusers, and of arXiv 2501.05450 (3,600 tokens)."""


class BucketConfig(Config):
    """Image sizes of aspect ratio bucketing: each image goes to the bucket with the nearest aspect ratio."""

    sizes: Literal["eleven", "paper"] | list[str] = "eleven"
    """`eleven` aspect ratios (1:2 to 2:1) or the `paper`'s five (9:16 to 16:9), each with about as many
    pixels as the square of `size`. Or sizes in pixels, such as [256x256, 320x208]."""
    multiple: int = Field(default=16, ge=1, le=8192)
    """Sides are multiples of this number of pixels: the autoencoder's factor times the largest patch."""
    min_rows: int = Field(default=256, ge=1)
    """Buckets with fewer images are merged into the nearest one; use at least the batch size."""
    max_upscale: float = Field(default=2.0, gt=0)
    """Maximum upscaling of an image; smaller images are rejected."""
    max_crop: float = Field(default=0.5, ge=0, le=1)
    """Maximum share of an image to crop away; longer images are rejected."""

    @field_validator("sizes")
    @classmethod
    def _readable(cls, value: str | list[str]) -> str | list[str]:
        if isinstance(value, str):
            return value
        sizes = [parse_size(text) for text in value]
        if not 0 < len(set(sizes)) == len(sizes):
            raise ValueError("give at least one size, each once")
        return value

    def around(self, size: int) -> list[Size]:
        """Sizes of about as many pixels as a square of `size`, as diffusers computes them.

        This is `generate_aspect_ratio_buckets` of `diffusers.training_utils`, which older versions lack.
        """
        if not isinstance(self.sizes, str):
            return [parse_size(text) for text in self.sizes]
        sizes: dict[Size, None] = {}
        for width, height in ASPECTS[self.sizes]:
            aspect = width / height
            exact = (size * size / aspect) ** 0.5
            sides = (exact * aspect, exact)
            wide, high = (max(self.multiple, round(side / self.multiple) * self.multiple) for side in sides)
            sizes[wide, high] = None
        return list(sizes)


class IngestConfig(RowOptions):
    """How a source is read and becomes a data set."""

    glyphs: GlyphOptions = Field(default_factory=GlyphOptions)
    """Which images the source `glyphs` draws."""
    size: int = Field(default=256, ge=1, le=8192)
    """Image height and width in pixels, after a central square crop. With `buckets`, the side of a square
    with as many pixels."""
    buckets: BucketConfig | None = None
    """Keep aspect ratios instead of cropping squares; `{}` uses the default buckets."""
    mode: Literal["rgb", "gray", "auto"] = "auto"
    """Channels: rgb, gray, or auto, which is gray if none of 64 images from all over the source has
    colour."""
    heldout: float = Field(default=0.05, ge=0.0, lt=1.0)
    """Share of the groups held out for validation and comparison; at least one group unless it is 0."""
    test: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Share of the groups reserved for a final test; nothing is tuned on them."""
    shard_rows: int = Field(default=1024, ge=1)
    """Rows of the source per shard."""
    seed: int = 0
    """Random seed of the splits."""

    def sizes(self) -> list[Size]:
        """Widths and heights that pictures can have."""
        return [(self.size, self.size)] if self.buckets is None else self.buckets.around(self.size)

    @model_validator(mode="after")
    def _leaves_rows(self) -> Self:
        if self.heldout + self.test >= 1:
            raise ConfigError("data.ingest: heldout and test leave nothing to train on", "lower them")
        if self.buckets is not None and isinstance(self.buckets.sizes, str) and len(self.sizes()) == 1:
            ((side, _),) = self.sizes()
            what = f"data.ingest.buckets: at size {self.size} all aspects become {side}x{side} px"
            raise ConfigError(what, f"lower data.ingest.buckets.multiple, which is {self.buckets.multiple}")
        # Networks know the positions of the square of `size`, which nobody may have thought of.
        side = round(math.sqrt(math.prod(min(self.sizes(), key=lambda size: max(size) / min(size)))))
        if "size" not in self.model_fields_set and not self.size / 1.5 <= side <= self.size * 1.5:
            raise ConfigError(f"data.ingest.size is {self.size}, buckets are of {side}", f"set it to {side}")
        return self


class SourceConfig(RowOptions):
    """One of several sources of a data set."""

    source: str
    """As `data.source` for a single source."""
    weight: float = Field(default=1.0, ge=0)
    """Sampling weight of its images, relative to 1; needs `data.weighted`."""


def check_names(sources: Mapping[str, object]) -> None:
    """Refuse names of sources that could not begin a row's id; `ConfigError`."""
    if not sources:
        raise ConfigError("data.source names no source", "write NAME: {source: FOLDER}")
    for name in sources:
        if not re.fullmatch("[A-Za-z0-9_]{1,32}", name):
            raise ConfigError(f"data.source: {name!r} cannot name a source", "use letters, digits and '_'")


class CaptionerConfig(Config):
    """What describes images that have no caption."""

    model: str = "HuggingFaceTB/SmolVLM-256M-Instruct"
    """Image-text model: a folder or a hub name that transformers loads as `AutoModelForImageTextToText`."""
    prompt: str = "Describe this image in one sentence."
    """What the model is asked, in its own chat template if it has one."""
    tokens: int = Field(default=77, ge=1, le=4096)
    """Maximum tokens of an answer."""
    batch: int = Field(default=16, ge=1)
    """Images described at once."""
    replace: bool = False
    """Also describe images that have a caption."""

    def producer(self) -> dict[str, Any]:
        """What the column of captions is known by."""
        return {"name": self.model, "prompt": self.prompt, "tokens": self.tokens, "replace": self.replace}


class DedupeConfig(Config):
    """When two images count as duplicates."""

    bits: int = Field(default=4, ge=0, le=7)
    """Maximum differing bits, of 64, between perceptual hashes for a closer comparison."""
    difference: float = Field(default=0.05, ge=0, le=1)
    """Maximum colour difference between 8 x 8 thumbnails; 1 is black against white."""
    detail: float = Field(default=0.1, ge=0, le=1)
    """Maximum brightness difference between 32 x 32 thumbnails."""
    cosine: float | None = Field(default=None, gt=0, le=1)
    """Minimum cosine similarity of features for duplicates; by default features are not compared."""


class PartitionConfig(Config):
    """How the data set is divided into clusters."""

    method: Literal["kmeans", "random", "label", "column"] = "kmeans"
    """`kmeans` on image features, by class `label`, by a `column`, or `random` as a baseline."""
    column: str | None = None
    """For `column`: a column of text or integers, such as `source`. Rows with one value stay together; values
    beyond K are merged."""
    k: int = Field(default=8, ge=1, le=4096)
    """Number of clusters and experts (K)."""
    fine: int = Field(default=1024, ge=1)
    """Number of fine centroids of the two-level k-means; at least 39 rows each."""
    encoder: str = "facebook/dinov2-base"
    """Vision encoder for the clustering features."""
    encoder_size: int | None = None
    """Input size of the encoder in pixels; by default its own."""
    fit_rows: int = Field(default=1_000_000, ge=1)
    """Maximum rows to fit k-means on, and at most 256 per fine centroid; the others are assigned."""
    capacities: tuple[float, ...] | None = None
    """Relative sizes of the clusters, such as `[8, 8, 4, 2]` for islands with so many GPUs."""
    tolerance: float = Field(default=0.02, gt=0, lt=1)
    """Allowed relative deviation from `capacities`."""
    max_share: float | None = Field(default=None, gt=0, le=1)
    """Maximum share of the training images in one cluster."""
    min_share: float | None = Field(default=None, gt=0, lt=1)
    """Minimum share of the training images in one cluster; 0.05 avoids tiny clusters."""

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        if (self.column is not None) != (self.method == "column"):
            raise ValueError("partition.column is for partition.method=column, which needs one")
        if self.capacities is not None and (len(self.capacities) != self.k or min(self.capacities) <= 0):
            raise ValueError(
                f"partition.capacities are not one positive number for each of partition.k={self.k} clusters"
            )
        most, least = self.max_share or 1.0, self.min_share or 0.0
        if most * self.k < 1:
            raise ValueError(f"partition.max_share={most:g} of {self.k} clusters does not hold all rows")
        if least * self.k > 1 or least > most:
            raise ValueError(f"partition.min_share={least:g} is more than {self.k} clusters can each hold")
        parts = [capacity / sum(self.capacities or ()) for capacity in self.capacities or ()]
        if any(part * (1 + self.tolerance) < least or part * (1 - self.tolerance) > most for part in parts):
            shares = f"{min(parts):.1%} to {max(parts):.1%} of the rows"
            raise ValueError(f"partition.capacities ask for {shares}, which min_share or max_share forbid")
        return self


def features_column(encoder_name: str) -> str:
    """Name of the column that holds the features of an encoder."""
    name = "features-" + encoder_name.replace("/", "--")
    if re.fullmatch(r"[A-Za-z0-9._-]{1,128}", name):
        return name
    return f"{re.sub('[^A-Za-z0-9._-]', '-', name)[:100]}-{digest(encoder_name)[:16]}"  # such as a folder
