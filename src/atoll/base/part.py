"""Which shards of a job one worker makes."""

import re
from typing import NamedTuple

from atoll.base.errors import ConfigError


class Part(NamedTuple):
    """The shards `number, number + total, ...` of a job."""

    number: int
    total: int

    @classmethod
    def parse(cls, text: str) -> "Part":
        """The part I/N, such as 2/8; `ConfigError` if it is none."""
        part = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text)
        if part is None or not int(part[2]):
            raise ConfigError(f"--part {text!r} is no part of the shards", "write I/N, such as 2/8")
        # Arrays count from 1 or from 0: only the remainder matters, and every shard has exactly one task.
        return cls(int(part[1]) % int(part[2]), int(part[2]))
