"""Numbers for people: one spelling for each kind."""

from collections.abc import Callable
from functools import partial

import pytest

from atoll.base.text import (
    NONE,
    count,
    duration,
    flops,
    many,
    percent,
    ratio,
    round_sig,
    sharing_sentence,
    size,
)


@pytest.mark.parametrize(
    ("write", "value", "text"),
    [
        (count, 999, "999"),
        (count, 12_345, "12.3 k"),
        (count, 2_980_000_000, "2.98 B"),
        (size, 12, "12 B"),
        (size, 1_536, "1.54 kB"),
        (size, 999_800_000, "1 GB"),
        (flops, 1.274e12, "1.27 TFLOPs"),
        (flops, 5_000, "5,000 FLOPs"),
        (flops, 999.96e9, "1.00 TFLOPs"),
        (partial(flops, like=1e12), 5e9, "0.00500 TFLOPs"),
        (partial(many, noun="image"), 1, "1 image"),
        (partial(many, noun="image"), 2_000, "2,000 images"),
        (partial(many, noun="class", nouns="classes"), 2, "2 classes"),
        (duration, 0, "0 s"),
        (duration, 1.62, "1.6 s"),
        (duration, 59.4, "59 s"),
        (duration, 185, "3 min 05 s"),
        (duration, 7_620, "2 h 07 min"),
        (duration, 4 * 86_400 + 3 * 3_600, "4 d 03 h"),
        (round_sig, 0.06161, "0.0616"),
        (round_sig, 12_345, "12,300"),
        (round_sig, 1.5e-7, "1.50e-07"),
        (percent, 0.3351, "33.5%"),
        (ratio, 0.8712, "0.87×"),
        (ratio, 1_234, "1,234×"),
        *((write, None, NONE) for write in (count, size, flops, duration, round_sig, percent, ratio)),
    ],
)
def test_a_number_is_written_as_people_read_it(
    write: Callable[[float | None], str], value: float | None, text: str
) -> None:
    assert write(value) == text


@pytest.mark.parametrize(
    ("pretrained", "checkpoint", "start"),
    [
        (0.0, False, ""),
        (0.0, True, "start from one checkpoint and then "),
        (0.5, False, "start from shared pretraining on all data (50% of the training cost) and then "),
    ],
)
def test_what_experts_have_in_common_is_one_sentence(pretrained: float, checkpoint: bool, start: str) -> None:
    assert sharing_sentence(pretrained, checkpoint) == f"The experts {start}train in isolation."
