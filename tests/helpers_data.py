"""Pictures as files."""

import io

import numpy as np
from PIL import Image


def encoded(size: tuple[int, int] = (20, 12), kind: str = "PNG", mode: str = "RGB", seed: int = 0) -> bytes:
    """A file with a noise picture."""
    rng = np.random.default_rng(seed)
    pixels = rng.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(buffer, kind)
    return buffer.getvalue()
