"""Pictures out of tensors, and sheets of pictures."""

import io
from collections.abc import Sequence
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

_LABEL = 11
"""Height of a label's letters in pixels."""


def to_images(tensor: Tensor) -> list[Image.Image]:
    """Pictures of a batch `(B, C, H, W)` in [-1, 1], C = 1 (gray) or 3 (RGB); values outside are clipped."""
    if tensor.ndim != 4 or tensor.shape[1] not in (1, 3):
        raise ValueError(f"pictures have shape (B, 1 or 3, H, W), not {tuple(tensor.shape)}")
    # A network that diverges gives NaN, which no integer stands for: its preview must not end the run.
    levels = (tensor.detach().float().cpu().nan_to_num() + 1) * 127.5
    pixels = levels.round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1)
    arrays = (pixels[..., 0] if pixels.shape[-1] == 1 else pixels).contiguous().numpy()
    return [Image.fromarray(array) for array in arrays]


def png(image: Image.Image) -> bytes:
    """PNG bytes of a picture."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def grid(
    images: Sequence[Image.Image],
    columns: int,
    pad: int = 2,
    background: str = "white",
    labels: Sequence[str] | None = None,
    scale: int = 1,
) -> Image.Image:
    """Pictures in rows, RGB, in cells as large as the largest picture; every pixel `scale` times as wide.

    A label is a line below its picture, cut to the cell's width; fewer labels than pictures is fine.
    """
    if not images or columns < 1 or scale < 1:
        raise ValueError("a grid needs at least one picture, one column and a scale of at least 1")
    columns = min(columns, len(images))
    width = scale * max(image.width for image in images)
    height = scale * max(image.height for image in images)
    step_x, step_y = width + pad, height + pad + (_LABEL + 5 if labels else 0)
    rows = -(-len(images) // columns)
    sheet = Image.new("RGB", (columns * step_x + pad, rows * step_y + pad), background)
    draw = ImageDraw.Draw(sheet)
    for index, image in enumerate(images):
        x, y = pad + index % columns * step_x, pad + index // columns * step_y
        large = image.convert("RGB").resize(
            (image.width * scale, image.height * scale), Image.Resampling.NEAREST
        )
        sheet.paste(large, (x + (width - large.width) // 2, y + (height - large.height) // 2))
        if labels and index < len(labels) and labels[index]:
            text = _cut(labels[index], width)
            draw.text((x + width / 2, y + height + 2), text, "#444444", _font(), anchor="ma")
    return sheet


def _cut(label: str, width: int) -> str:
    text = "".join(c if c.isprintable() else " " for c in label[: width + 1])
    text = " ".join(text.split())
    if len(label) <= width and _font().getlength(text) <= width:
        return text
    while text and _font().getlength(text + "…") > width:
        text = text[:-1].rstrip()
    return text + "…" if text else ""


@lru_cache(maxsize=1)
def _font() -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    # DejaVu Sans, which knows most alphabets, out of matplotlib's folder; else Pillow's own.
    spec = find_spec("matplotlib")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / "mpl-data" / "fonts" / "ttf" / "DejaVuSans.ttf"
        if path.exists():
            return ImageFont.truetype(path, _LABEL, layout_engine=ImageFont.Layout.BASIC)
    return ImageFont.load_default(_LABEL)
