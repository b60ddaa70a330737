"""Calls of a network on a GPU as CUDA graphs: recorded once for each shape, replayed from then on.

The host starts the kernels of a call one by one, a thousand of them: PixArt-XL/2 takes 24 ms for 2 rows, and
for 16. An ensemble makes K calls of few rows where one network makes one of many. A graph starts all at once.
"""

import functools
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from threading import RLock
from weakref import WeakSet

import torch
from torch import Tensor, nn

from atoll.base.condition import Condition

Call = Callable[[Tensor, Tensor, Condition], Tensor]
MOST = 48
"""Graphs of one network; the least recently used makes room."""
COMPUTING = RLock()
"""Held while networks compute: graphs share memory, as experts may share a network, so threads take turns."""


@dataclass
class _Graph:
    inputs: list[Tensor]
    output: Tensor
    replay: Callable[[], None]

    def __call__(self, inputs: list[Tensor]) -> Tensor:
        for held, given in zip(self.inputs, inputs, strict=True):
            held[: len(given)].copy_(given)  # further rows keep what they had: nobody reads their output
        self.replay()
        return self.output[: len(inputs[0])].clone()


class Replayed:
    """A call `(x, t, cond) -> output` of a network whose rows do not depend on each other.

    On a CPU, and while gradients are recorded, it is the call itself. The network is what it computes with,
    whose weights may move between calls (`residency`); `device` is the kind of device that records.
    """

    def __init__(self, network: nn.Module, call: Call, device: str = "cuda") -> None:
        self._call, self._device = call, device
        self._graphs: OrderedDict[Hashable, _Graph | None] = OrderedDict()
        # Where they are held, as who stores weights in fewer bytes puts others in their place.
        self._held = [(m._parameters, name) for m in network.modules() for name in m._parameters]

    def __call__(self, x: Tensor, t: Tensor, cond: Condition) -> Tensor:
        if x.device.type != self._device or torch.is_grad_enabled():
            return self._call(x, t, cond)
        rows, parts = filled(len(x)), cond.parts()
        inputs = [x, t, *parts.values()]
        # A graph holds addresses: where the weights lie tells whose they are.
        weights = tuple(0 if (weight := held[n]) is None else weight.data_ptr() for held, n in self._held)
        key = (weights, rows, *parts, *((part.shape[1:], part.dtype) for part in inputs))
        graph = self._graphs.get(key)
        if graph is None:
            with torch.inference_mode(False):  # a later call writes into them, in whatever mode it has
                more = [part[-1:].expand(rows - len(x), *part.shape[1:]) for part in inputs]
                held = [torch.cat(both) for both in zip(inputs, more, strict=True)]

            def run() -> Tensor:
                return self._call(held[0], held[1], Condition(**dict(zip(parts, held[2:], strict=True))))

            if key not in self._graphs:
                # Not recorded yet: it may not come again, and libraries set themselves up in a first call.
                self._graphs[key] = None
                while len(self._graphs) > MOST:
                    self._graphs.popitem(last=False)
                return run()[: len(x)]
            try:
                with torch.cuda.device_of(x):  # a thread's current GPU may be another
                    graph = _Graph(held, *record(run))
            except RuntimeError:  # no memory for it, or a call that looks at the device's numbers
                self._graphs.clear()
                self._device = "none"
                return self._call(x, t, cond)
            self._graphs[key] = graph
        self._graphs.move_to_end(key)
        return graph(inputs)


def filled(rows: int) -> int:
    """The rows that a batch is filled up to: even, and at most an eighth more, so that shapes come again."""
    step = max(2, 1 << max(rows - 1, 8).bit_length() - 4)
    return -(-rows // step) * step


_recorded: WeakSet[torch.cuda.CUDAGraph] = WeakSet()
_stream = functools.cache(torch.cuda.Stream)  # torch's own is on the GPU that recorded first


def record(run: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
    """What a call on a GPU gives, and what computes it anew in place."""
    graph = torch.cuda.CUDAGraph()
    # All graphs compute in one pool of memory, since they run one after the other. A pool dies with its last.
    pool = next((other.pool() for other in _recorded), None)
    # The thread that brings experts may go on copying meanwhile.
    stream = _stream(torch.cuda.current_device())
    with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
        output = run()
    _recorded.add(graph)
    return output, graph.replay
