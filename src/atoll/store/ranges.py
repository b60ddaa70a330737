"""A remote object as a file: read a range at a time, so that neither memory nor disk ever holds all of it."""

import io
import time
from collections.abc import Callable
from typing import Any, BinaryIO

from atoll.base.errors import StoreError

PAUSES = (0.1, 0.5)
"""Seconds before a remote store is asked again for what it gave half of."""
BUFFER = 4 * 2**20
"""Bytes that are asked for at once where an object is read from front to back."""


class _Ranges(io.RawIOBase):
    def __init__(self, fetch: Callable[[int, int], bytes], size: int) -> None:
        self._fetch, self._size, self._place = fetch, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._size}[whence]
        if start + offset < 0:
            raise ValueError(f"{start + offset} lies before the file")
        self._place = start + offset
        return self._place

    def readinto(self, buffer: Any) -> int:
        stop = min(self._place + len(buffer), self._size)
        if stop <= self._place:
            return 0
        start, count = self._place, stop - self._place
        # obstore asks again where a request fails, but not where only a part of the body arrives.
        for pause in (*PAUSES, None):
            try:
                data = self._fetch(start, stop)
                if len(data) == count:
                    buffer[:count], self._place = data, stop
                    return count
            except StoreError as error:
                if pause is None or type(error) is not StoreError:  # those of its own kinds stay as they are
                    raise
            time.sleep(pause or 0)
        raise StoreError(f"bytes {start} to {stop} arrive torn", "run the command again")


def reader(fetch: Callable[[int, int], bytes], size: int, buffer: int = BUFFER) -> BinaryIO:
    """A seekable file whose ranges `fetch(start, stop)` gives, again where it fails or gives too little."""
    # Buffered: readers of tar and parquet make thousands of small reads, and each would be a request.
    return io.BufferedReader(_Ranges(fetch, size), buffer)
