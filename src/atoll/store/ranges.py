"""A remote object by its ranges: one at a time, as a file, or many at once, for all of it soon."""

import io
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, BinaryIO

from atoll.base.errors import StoreError

PAUSES = (0.1, 0.5)
"""Seconds before a remote store is asked again for what it gave half of."""
BUFFER = 4 * 2**20
"""Bytes that are asked for at once where an object is read from front to back."""
PART = 64 * 2**20
"""Bytes of a part of a large object, in memory at once: S3 takes 10,000 of them, and so objects of 640 GB."""
STREAMS = 8
"""Parts under way at once: one stream of S3 brings some 90 MB a second."""
Fetch = Callable[[int, int], bytes]


class _Ranges(io.RawIOBase):
    def __init__(self, fetch: Fetch, size: int) -> None:
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
        count = stop - self._place
        buffer[:count], self._place = _whole(self._fetch, self._place, stop), stop
        return count


def _whole(fetch: Fetch, start: int, stop: int) -> bytes:
    # obstore asks again where a request fails, but not where only a part of the body arrives.
    for pause in (*PAUSES, None):
        try:
            data = fetch(start, stop)
            if len(data) == stop - start:
                return data
        except StoreError as error:
            if pause is None or type(error) is not StoreError:  # those of its own kinds stay as they are
                raise
        time.sleep(pause or 0)
    raise StoreError(f"bytes {start} to {stop} arrive torn", "run the command again")


def parts(fetch: Fetch, size: int, use: Callable[[int, bytes], Any]) -> list[Any]:
    """What `use` makes of each part of an object, given its start and bytes; several are fetched at once."""

    def part(start: int) -> Any:
        return use(start, _whole(fetch, start, min(start + PART, size)))

    with ThreadPoolExecutor(max_workers=STREAMS) as pool:
        return [*pool.map(part, range(0, size, PART))]


def reader(fetch: Fetch, size: int, buffer: int = BUFFER) -> BinaryIO:
    """A seekable file whose ranges `fetch(start, stop)` gives, again where it fails or gives too little."""
    # Buffered: readers of tar and parquet make thousands of small reads, and each would be a request.
    return io.BufferedReader(_Ranges(fetch, size), buffer)
