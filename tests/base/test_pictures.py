import numpy as np
import pytest
import torch
from PIL import Image

from atoll.base.pictures import grid, to_images


def test_to_images_maps_the_range() -> None:
    tensor = torch.tensor([-1.0, 1.0, 0.0, 3.0, -3.0, float("nan")]).view(6, 1, 1, 1)
    assert [image.getpixel((0, 0)) for image in to_images(tensor)] == [0, 255, 128, 255, 0, 128]
    colour = to_images(torch.tensor([1.0, -1.0, 0.0]).view(1, 3, 1, 1).expand(1, 3, 2, 5).bfloat16())[0]
    assert (colour.mode, colour.size, colour.getpixel((4, 1))) == ("RGB", (5, 2), (255, 0, 128))
    with pytest.raises(ValueError, match="1 or 3"):
        to_images(torch.zeros(1, 4, 2, 2))


def test_every_picture_lies_in_its_cell() -> None:
    sheet = grid([Image.new("RGB", (4, 4), (n, n, n)) for n in range(1, 8)], columns=3, pad=2, scale=3)
    assert sheet.size == (3 * 14 + 2, 3 * 14 + 2)
    pixels = np.asarray(sheet)
    for n in range(7):
        x, y = 2 + n % 3 * 14, 2 + n // 3 * 14
        assert (pixels[y : y + 12, x : x + 12] == n + 1).all()
    assert tuple(pixels[-1, -1]) == (255, 255, 255)


def test_a_label_is_whole_and_once_for_neighbours() -> None:
    words, images = "a red circle on blue ground", [Image.new("RGB", (64, 64), "black")] * 4
    heights = [grid(images, 4, labels=[words] * 4), grid(images, 4, labels=[words, "b", words, "b"])]
    plain = grid(images, 4).height
    assert [sheet.height - plain for sheet in heights] == [16, 44]  # a line, and three of one picture's width


@pytest.mark.parametrize(
    "label", ["short", "x" * 100_000, "two\nlines\0", "🙂" * 50, "", "\u202eabc", "αβγ, serif"]
)
def test_labels_stay_below_their_cell(label: str) -> None:
    images = [Image.new("RGB", (32, 16), "black")] * 3
    plain = np.asarray(grid(images, columns=3, pad=4, labels=["", "", ""]))
    sheet = np.asarray(grid(images, columns=3, pad=4, labels=["", label]))
    assert sheet.shape[1] == plain.shape[1] and sheet.shape[0] - plain.shape[0] <= 4 * 16
    plain = np.pad(plain, ((0, len(sheet) - len(plain)), (0, 0), (0, 0)), constant_values=255)
    changed = np.argwhere((sheet != plain).any(-1))
    if label.startswith(("short", "x", "two", "α")):
        assert len(changed)
    if len(changed):
        top, left = changed.min(0)
        _, right = changed.max(0)
        assert top >= 4 + 16
        assert left >= 4 + 36 - 1
        assert right <= 4 + 36 + 32 + 1
