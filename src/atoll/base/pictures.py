"""Pictures out of tensors, and sheets of pictures."""

import io
import os
from collections.abc import Sequence
from functools import lru_cache
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path

import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from atoll.base.errors import ConfigError

FORMATS = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG", ".webp": "WEBP"}
"""Of a picture's file, by the ending of its name."""
_LABEL, _LINES = 11, 4
"""Height of a label's letters in pixels, and most lines of a label."""


def to_images(tensor: Tensor) -> list[Image.Image]:
    """Pictures of a batch `(B, C, H, W)` in [-1, 1], C = 1 (gray) or 3 (RGB); values outside are clipped."""
    if tensor.ndim != 4 or tensor.shape[1] not in (1, 3):
        raise ValueError(f"pictures have shape (B, 1 or 3, H, W), not {tuple(tensor.shape)}")
    # A network that diverges gives NaN, which no integer stands for: its preview must not end the run.
    levels = (tensor.detach().float().cpu().nan_to_num() + 1) * 127.5
    pixels = levels.round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1)
    arrays = (pixels[..., 0] if pixels.shape[-1] == 1 else pixels).contiguous().numpy()
    return [Image.fromarray(array) for array in arrays]


def picture_place(place: str | Path) -> tuple[Path, bool]:
    """Path of a picture's file, or of a folder (whose name ends in a slash) and True; the folder is made."""
    path = Path(place)
    if str(place).endswith(os.sep) or (str(place) and path.is_dir()):
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot make {path}: {error.strerror}", "give another folder") from None
    elif path.suffix.lower() not in FORMATS:
        fix = f"end its name in {', '.join(FORMATS)}, or that of a folder in /"
        raise ConfigError(f"{path} is no name of a picture", fix)
    folder = path if path.is_dir() else path.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ConfigError(f"{folder} is no folder that can be written to", "give another one")
    return path, path.is_dir()


def png(image: Image.Image) -> bytes:
    """PNG bytes of a picture."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def grid(
    images: Sequence[Image.Image], columns: int, pad: int = 2, labels: Sequence[str] = (), scale: int = 1
) -> Image.Image:
    """Pictures in rows, RGB, in cells as large as the largest picture; every pixel `scale` times as wide.

    Labels stand below, wrapped to the cells' width; equal neighbours share one, and the last may have none.
    """
    if not images or columns < 1 or scale < 1:
        raise ValueError("a grid needs at least one picture, one column and a scale of at least 1")
    columns = min(columns, len(images))
    width = scale * max(image.width for image in images)
    height = scale * max(image.height for image in images)
    step, texts = width + pad, [*labels, *[""] * len(images)]
    # Of each row: its pictures, and the middle and the lines of every label.
    rows = []
    for start in range(0, len(images), columns):
        row, written = range(start, min(start + columns, len(images))), []
        for text, neighbours in groupby(row, key=texts.__getitem__):
            cells = [pad + (number - start) * step for number in neighbours]
            span = cells[-1] + width - cells[0]
            written.append((cells[0] + span / 2, _wrapped(text, span)))
        rows.append((row, written, max(len(lines) for _, lines in written)))
    below = [lines * (_LABEL + 3) + 2 * bool(lines) for _, _, lines in rows]
    size = columns * step + pad, sum(below) + len(rows) * (height + pad) + pad
    sheet, y = Image.new("RGB", size, "white"), pad
    draw = ImageDraw.Draw(sheet)
    for (row, written, _), room in zip(rows, below, strict=True):
        for x, number in enumerate(row):
            large = images[number].convert("RGB")
            large = large.resize((large.width * scale, large.height * scale), Image.Resampling.NEAREST)
            left = pad + x * step + (width - large.width) // 2
            sheet.paste(large, (left, y + (height - large.height) // 2))
        for middle, lines in written:
            for line, text in enumerate(lines):
                place = middle, y + height + 2 + line * (_LABEL + 3)
                draw.text(place, text, "#444444", _font(), anchor="ma")
        y += height + room + pad
    return sheet


def _wrapped(label: str, width: int) -> list[str]:
    """Lines of a label, at most `_LINES`; what is left out is an ellipsis."""
    most = width * _LINES  # no letter is narrower than a pixel
    lines = [""]
    for word in "".join(c if c.isprintable() else " " for c in label[:most]).split():
        longer = f"{lines[-1]} {word}".strip()
        if _font().getlength(longer) <= width:
            lines[-1] = longer
            continue
        lines += [""] if lines[-1] else []
        for letter in word:
            lines += [""] if _font().getlength(lines[-1] + letter) > width else []
            lines[-1] += letter
    if len(lines) > _LINES or len(label) > most:
        last = lines[_LINES - 1 :][:1] or lines[-1:]
        while last[0] and _font().getlength(last[0] + "…") > width:
            last[0] = last[0][:-1].rstrip()
        lines = [*lines[: _LINES - 1], last[0] + "…"]
    return [line for line in lines if line]


@lru_cache(maxsize=1)
def _font() -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    # DejaVu Sans, which knows most alphabets, out of matplotlib's folder; else Pillow's own.
    spec = find_spec("matplotlib")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / "mpl-data" / "fonts" / "ttf" / "DejaVuSans.ttf"
        if path.exists():
            return ImageFont.truetype(path, _LABEL, layout_engine=ImageFont.Layout.BASIC)
    return ImageFont.load_default(_LABEL)
