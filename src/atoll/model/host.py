"""Experts in host memory on their way to a GPU: pinned, so that copies run beside computation."""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class HostMemory:
    """The least recently used expert makes room. For one thread.

    Args:
        places: most experts.
        size: bytes of the largest.
    """

    def __init__(self, places: int, size: int) -> None:
        self.places, self.size = places, size
        self._blocks: OrderedDict[int, tuple[Tensor, torch.cuda.Event]] = OrderedDict()

    @contextmanager
    def holding(self, number: int, read: Callable[[Tensor], None]) -> Iterator[Tensor]:
        """An expert's block; what is done with it within goes to the current stream of the GPU.

        Args:
            number: of the expert.
            read: fills a block, if the expert is not there.
        """
        if number in self._blocks:
            block, copied = self._blocks.pop(number)
        else:
            block, copied = self._room()
            try:
                read(block)
            except BaseException:
                torch.cuda.cudart().cudaHostUnregister(block.data_ptr())
                raise
        try:
            yield block
        finally:
            copied.record()
            self._blocks[number] = block, copied

    def _room(self) -> tuple[Tensor, torch.cuda.Event]:
        if len(self._blocks) < self.places:
            block = torch.empty(self.size, dtype=torch.uint8)
            # Registered, not allocated as pinned: torch rounds pinned blocks up to a power of two.
            torch.cuda.cudart().cudaHostRegister(block.data_ptr(), block.numel(), 0)
            return block, torch.cuda.Event()
        _, (block, copied) = self._blocks.popitem(last=False)
        copied.synchronize()  # the GPU may still read what was there
        return block, copied

    def clear(self) -> None:
        """Give the memory back; nothing may be on its way."""
        for block, _ in self._blocks.values():
            torch.cuda.cudart().cudaHostUnregister(block.data_ptr())
        self._blocks.clear()

    def __del__(self) -> None:
        if self._blocks:
            torch.cuda.synchronize()
            self.clear()
