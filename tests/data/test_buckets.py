"""Aspect buckets: which there are, which picture goes into which, and how it is brought to its size."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from atoll.base.console import Progress
from atoll.base.errors import ConfigError, DataError
from atoll.data.dataset import BUCKETS, ROWS
from atoll.data.decode import BadImageError, cropped, decode, merged, nearest, place, square, upright_size
from atoll.data.settings import BucketConfig, IngestConfig
from atoll.data.sources.folder import FolderSource
from atoll.store.store import Store
from helpers_data import aspects, encoded, ingest, saved

WIDE = [(32, 32), (48, 24), (24, 48)]


def config(**buckets: object) -> IngestConfig:
    return IngestConfig.parse({"size": 32, "buckets": {"sizes": ["32x32", "48x24", "24x48"], **buckets}}, "")


def test_the_papers_five_are_of_3600_tokens() -> None:
    sizes = BucketConfig(sizes="paper").around(960)
    assert sizes == [(1280, 720), (1200, 768), (960, 960), (768, 1200), (720, 1280)]
    assert {width * height // 16**2 for width, height in sizes} == {3600}


@pytest.mark.slow
def test_the_arithmetic_is_that_of_diffusers() -> None:
    training = pytest.importorskip("diffusers.training_utils")
    if not hasattr(training, "generate_aspect_ratio_buckets"):
        pytest.skip("this diffusers has no buckets yet")
    pictures = np.random.default_rng(0).integers(1, 4000, (300, 2))
    for size, multiple in ((960, 16), (256, 16), (64, 8), (32, 4), (1024, 32)):
        ours = BucketConfig(multiple=multiple).around(size)
        theirs = training.generate_aspect_ratio_buckets(size, multiple)
        assert sorted(ours) == sorted((width, height) for height, width in theirs)
        same = [(width, height) for height, width in theirs]
        found = nearest(pictures[:, 0], pictures[:, 1], same).tolist()
        assert found == [training.find_nearest_bucket(h, w, theirs) for w, h in pictures.tolist()]


def test_eleven_sizes_around_256() -> None:
    wide = [(256, 256), (288, 224), (320, 208), (336, 192), (368, 176)]
    assert sorted(BucketConfig().around(256)) == sorted({*wide, *((height, width) for width, height in wide)})
    assert BucketConfig(sizes=["64x32"]).around(256) == [(64, 32)]


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(
    width=st.integers(1, 3000), height=st.integers(1, 3000), upscale=st.floats(0.5, 4), crop=st.floats(0, 1)
)
def test_a_picture_covers_its_bucket_or_is_refused(
    width: int, height: int, upscale: float, crop: float
) -> None:
    limits = BucketConfig(max_upscale=upscale, max_crop=crop)
    bucket = WIDE[int(nearest(width, height, WIDE))]
    scale = max(bucket[0] / width, bucket[1] / height)
    lost = 1 - bucket[0] * bucket[1] / (scale * scale * width * height)
    if scale > upscale or lost > crop + 1e-9:
        with pytest.raises(BadImageError) as caught:
            place((width, height), WIDE, limits)
        assert caught.value.reason == ("too small" if scale > upscale else "too long")
        return
    where = place((width, height), WIDE, limits)
    assert where.bucket == bucket and scale <= upscale and lost <= crop + 1e-6
    assert where.resized[0] >= bucket[0] and where.resized[1] >= bucket[1]
    assert where.left in ((where.resized[0] - bucket[0]) / 2 - half for half in (0, 0.5))
    assert abs(where.resized[0] / width - scale) <= 1 / width and where.left * where.top == 0


def test_cropped_is_resized_whole_and_then_cropped() -> None:
    image = decode(encoded((301, 97)))
    where = place(image.size, WIDE, BucketConfig(max_crop=1))
    whole = image.resize(where.resized, Image.Resampling.LANCZOS)
    left, top = where.left, where.top
    expected = whole.crop((left, top, left + where.bucket[0], top + where.bucket[1]))
    apart = np.abs(np.asarray(cropped(image, where), dtype=int) - np.asarray(expected, dtype=int))
    assert cropped(image, where).size == (48, 24) and apart.max() <= 1


def test_a_very_long_panorama_takes_no_memory() -> None:
    """Resized whole, as it would be without the box, it would have 2.4 billion pixels."""
    image = Image.new("L", (1_000_000, 10), 77)
    where = place(image.size, WIDE, BucketConfig(max_crop=1, max_upscale=1000))
    assert where.resized == (2_400_000, 24)
    assert cropped(image, where).size == (48, 24)


def test_small_buckets_are_merged_into_the_nearest() -> None:
    counts = {(10, 10): 50, (20, 10): 3, (10, 20): 20, (15, 10): 2}
    assert merged(counts, WIDE, 20) == [(32, 32), (24, 48)]
    assert merged(counts, WIDE, 21) == [(32, 32)]
    assert merged(counts, WIDE, 3) == WIDE, "15x10 is nearer to 48x24"
    assert merged({(20, 10): 1}, WIDE, 1000) == [(48, 24)], "one stays"
    assert merged({}, WIDE, 9) == WIDE


def turned(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


@pytest.mark.parametrize("kind", ["JPEG", "TIFF", "PNG", "WEBP"])
@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
def test_the_head_of_a_file_tells_the_upright_size(kind: str, orientation: int) -> None:
    data = saved(decode(encoded((20, 12))), kind, exif=turned(orientation))
    assert upright_size(data) == decode(data).size
    if kind != "TIFF":
        assert upright_size(data) == ((12, 20) if orientation > 4 else (20, 12))


def test_rows_keep_their_aspect(tmp_path: Path, store: Store) -> None:
    folder = aspects(tmp_path / "pictures", {(40, 40): 9, (66, 30): 7, (31, 60): 4})
    hostile = {"1-wide": (1, 300), "dot": (1, 1), "panorama": (900, 30), "small": (20, 20), "narrow": (9, 24)}
    for name, size in hostile.items():
        (folder / f"{name}.png").write_bytes(encoded(size))
        (folder / f"{name}.txt").write_text(name)
    # A tall picture that lies on its side in its file.
    decode(encoded((90, 45), seed=5)).save(folder / "rotated.jpg", exif=turned(6))
    (folder / "rotated.txt").write_text("tall")
    (folder / "broken.png").write_bytes(encoded((40, 40))[:200])
    (folder / "broken.txt").write_text("broken")
    whole = ingest(FolderSource(folder), store, "d", config(min_rows=3))
    table = whole.table().to_pylist()
    assert whole.table().column_names == [*ROWS.names, *BUCKETS]
    sizes = [(row["bucket_width"], row["bucket_height"]) for row in table]
    assert Counter(sizes) == {(32, 32): 10, (48, 24): 7, (24, 48): 5}
    assert whole.buckets is not None and [tuple(each) for each in whole.buckets.tolist()] == sizes
    assert [whole.image(row).size for row in range(len(whole))] == sizes
    by_key = {row["key"]: row for row in table}
    first = by_key["66x30-000.png"]
    # 66x30 covers 48x24 as 53x24.
    assert (first["width"], first["height"], first["crop_left"], first["crop_top"]) == (66, 30, 2, 0)
    upright = by_key["rotated.jpg"]
    assert (upright["width"], upright["height"], upright["bucket_height"]) == (45, 90, 48)
    rejects = [json.loads(line) for line in store.get("d/rejects.jsonl").decode().splitlines()]
    small = dict.fromkeys(("1-wide.png", "dot.png", "narrow.png"), "too small")
    reasons = {reject["key"]: reject["reason"] for reject in rejects}
    assert reasons == {**small, "panorama.png": "too long", "broken.png": "truncated"}
    assert "900x30 would lose 93% to fit into 48x24" in [reject["detail"] for reject in rejects]
    assert ingest(FolderSource(folder), store, "d", config(min_rows=3)).content == whole.content
    with pytest.raises(DataError, match="other settings"):
        ingest(FolderSource(folder), store, "d", config(min_rows=4))


def test_few_rows_of_an_aspect_go_where_they_lose_least(tmp_path: Path, store: Store) -> None:
    folder = aspects(tmp_path / "pictures", {(40, 40): 9, (66, 30): 7, (31, 60): 2})
    whole = ingest(FolderSource(folder), store, "d", config(min_rows=3, max_crop=0.6))
    assert whole.buckets is not None
    assert Counter(map(tuple, whole.buckets.tolist())) == {(32, 32): 11, (48, 24): 7}
    rejected = ingest(FolderSource(folder), store, "e", config(min_rows=3, max_crop=0.4))
    assert rejected.manifest.rejects == {"too long": 2}, "merged, they would lose half"


def test_a_killed_ingest_keeps_its_buckets(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The buckets are chosen once, and the shards that come later have the same."""
    folder = aspects(tmp_path / "pictures", {(40, 40): 9, (66, 30): 7})
    small = config(min_rows=3, max_crop=0.6).model_copy(update={"shard_rows": 4})
    whole = ingest(FolderSource(folder), store, "whole", small)

    def killed(self: Progress, done: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Progress, "__call__", killed)
        with pytest.raises(KeyboardInterrupt):
            ingest(FolderSource(folder), store, "killed", small)
    assert ingest(FolderSource(folder), store, "killed", small).content == whole.content


def test_squares_are_as_they_always_were(tmp_path: Path, store: Store) -> None:
    """Without `buckets` a picture has the bytes of a plain square."""
    folder = aspects(tmp_path / "pictures", {(40, 40): 3, (66, 30): 3})
    plain = IngestConfig(size=16)
    whole = ingest(FolderSource(folder), store, "d", plain)
    assert whole.buckets is None and whole.table().column_names == ROWS.names
    assert whole.manifest.config == plain.model_dump()
    assert whole.image(3).tobytes() == square(decode((folder / "66x30-000.png").read_bytes()), 16).tobytes()


@pytest.mark.parametrize(
    ("buckets", "words"),
    [
        ({"sizes": []}, "at least one size"),
        ({"sizes": ["32x32", "32x32"]}, "each once"),
        ({"sizes": ["32"]}, "'32' is no size: write width x height"),
        ({"sizes": ["0x32"]}, "'0x32' is no size"),
        ({"sizes": "seven"}, "sizes"),
        ({"sizes": ["64x64", "96x48"]}, "data.ingest.size is 256, buckets are of 64: set it to 64"),
        ({"multiple": 512}, "at size 256 all aspects become 512x512 px: lower data.ingest.buckets.multiple"),
        ({"max_crop": 2}, "max_crop"),
    ],
)
def test_wrong_settings_are_told(buckets: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        IngestConfig.parse({"buckets": buckets}, "data.ingest")
    assert words in str(caught.value)
