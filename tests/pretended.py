"""A CUDA device that is not there: a plugin under which `tests/gpu` runs on a CPU.

    make test-pretended

Tensors say `cuda:0` and hold numbers in the CPU's memory. What CUDA refuses is refused: tensors of two
devices in one operation, a look at the numbers while a graph is recorded. What makes the host wait for the
device is counted by the line of the package that asked: `WAITS`. It computes what the CPU computes, so it
tells nothing of a GPU's numbers, kernels or memory.

Loaded before the package, since functions are decorated with `torch.inference_mode` as it is imported.
"""

import contextlib
import sys
import threading
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

CUDA, BARE, CPU = torch.device("cuda:0"), torch.device("cuda"), torch.device("cpu")
WAITS: Counter[str] = Counter()
"""How often the host waited, by operation and line of the package."""
COPIES: Counter[str] = Counter()
"""Copies from the host's memory to the device's, by line of the package."""
BYTES: Counter[str] = Counter()
"""What they moved, likewise."""
PAGEABLE: Counter[str] = Counter()
"""Copies from memory that is not pinned: the driver takes them twice."""
LOOKS = {"_local_scalar_dense", "nonzero", "equal", "is_nonzero", "_unique2", "unique_dim"}
LOOKS |= {"masked_select", "bincount"}
"""Operations whose result is, or has the shape of, numbers on the device."""
MOVES = {"copy_", "_to_copy", "_foreach_copy_", "set_"}
TO, TENSOR = torch.Tensor.to, torch.tensor
recording = threading.local()


def caller() -> str:
    """The innermost line of the package that is being run."""
    frame: Any = sys._getframe()
    while frame is not None and "/src/atoll/" not in frame.f_code.co_filename:
        frame = frame.f_back
    if frame is None:
        return "elsewhere"
    return f"{frame.f_code.co_filename.rpartition('/src/atoll/')[2]}:{frame.f_lineno}"


def waits(operation: str) -> None:
    """Count a wait of the host; refused while a graph is recorded, as CUDA does."""
    if getattr(recording, "on", False):
        raise RuntimeError(f"{operation}: operation not permitted when stream is capturing")
    WAITS[f"{operation} {caller()}"] += 1


class Pretended(Tensor):
    """A tensor that says that it is on a GPU; `raw` is where its numbers are."""

    raw: Tensor

    @staticmethod
    def __new__(cls, raw: Tensor) -> "Pretended":
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, raw.size(), strides=raw.stride(), storage_offset=raw.storage_offset(), dtype=raw.dtype,
            layout=raw.layout, device="meta", requires_grad=False,
        )  # fmt: skip
        made.raw = raw
        return made  # type: ignore[no-any-return]

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return CUDA

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        return self.detach()

    @data.setter
    def data(self, value: "Pretended") -> None:
        torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        self.raw = value.raw

    def data_ptr(self) -> int:
        return self.raw.data_ptr()

    def tolist(self) -> Any:
        waits("tolist")
        return self.raw.tolist()

    def record_stream(self, stream: Any) -> None: ...

    def numpy(self, *_: Any, **__: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    __array__ = numpy

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Pretended({self.raw})"

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (TO, _to) and len(args) == 2 and isinstance(args[1], Pretended):
            return args[0].to(CUDA, args[1].dtype)  # torch itself reads "like this one" off the wrapper
        if function is torch.Tensor.new_tensor:
            return torch.tensor(args[1], dtype=args[0].dtype, device=CUDA)
        if function is torch.nn.functional.one_hot:  # compares with numbers that it would make there, too
            return Pretended(function(args[0].raw, *args[1:], **(kwargs or {})))
        if function in (torch.Tensor.__getitem__, torch.Tensor.__setitem__):
            # Torch would make a list a tensor where the wrapper says that it is: on the meta device, empty.
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            there = (torch.tensor(part, device=CUDA) if isinstance(part, list) else part for part in index)
            args = (args[0], tuple(there), *args[2:])
        with torch._C.DisableTorchFunctionSubclass():  # what comes to the CPU stays a plain tensor
            return function(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return computed(function, args, kwargs or {})


class Device(TorchDispatchMode):
    """Sees what is made on the device, too."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return computed(function, args, kwargs or {})


def computed(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """An operation on the CPU; what it gives is where its tensors are, or where it was asked for."""
    name, leaves = function.overloadpacket.__name__, tree_leaves((args, kwargs))
    mine = [leaf for leaf in leaves if isinstance(leaf, Pretended)]
    # A number without dimensions may come from the CPU: CUDA takes it along with the kernel.
    others = [
        leaf for leaf in leaves
        if isinstance(leaf, Tensor) and not isinstance(leaf, Pretended) and leaf.dim() and leaf.device == CPU
    ]  # fmt: skip
    to = kwargs.get("device")
    to = None if to is None else torch.device(to)
    if (
        to is not None
        and to.type == "meta"
        and (mine or name == "scalar_tensor" or (args and isinstance(args[0], list) and not args[0]))
    ):
        to = CUDA  # torch itself takes a wrapper's tensors for ones on the meta device
    if mine and any(leaf.device.type == "meta" for leaf in leaves if type(leaf) is Tensor):
        if any(leaf.dim() for leaf in mine):
            raise RuntimeError(f"{name}: a tensor without numbers at {caller()}")
        there = tree_map(_raw, (args, kwargs))  # FLOPs are counted there; only scalars are ours
        return function(*there[0], **there[1])
    if mine and others and name not in MOVES:
        indexed = name in ("index", "index_put", "index_put_") and isinstance(args[0], Pretended)
        if not indexed:
            shapes = [(tuple(leaf.shape), str(leaf.device)) for leaf in leaves if isinstance(leaf, Tensor)]
            raise RuntimeError(f"{name}: expected all tensors on one device, found {shapes} at {caller()}")
        waits("index on the cpu")
    if mine and name in LOOKS:
        waits(name)
    known = {id(tensor.raw): tensor for tensor in mine}
    args, kwargs = tree_map(_raw, (args, kwargs))
    if to is not None and to.type == "cuda":
        kwargs["device"] = CPU
    elif to is not None:
        kwargs["device"] = to
    if kwargs.get("pin_memory"):
        kwargs["pin_memory"] = False
    result = function(*args, **kwargs)
    there = bool(mine) if to is None else to.type == "cuda"
    if name in ("copy_", "_to_copy"):
        source = bool(mine) and (name == "_to_copy" or len(mine) == 2 or id(args[0]) not in known)
        if name == "copy_":
            there = id(args[0]) in known
        if source and not there:
            waits("to the cpu")
        elif there and not source:
            COPIES[where := caller()] += 1
            copied = args[0] if name == "_to_copy" else args[1]
            BYTES[where] += copied.numel() * copied.element_size()
            if not hasattr(copied, "pinned"):
                PAGEABLE[where] += 1
            # Asked not to wait, the host stages what is not pinned, and goes on.
            if not (kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2])):
                waits("to the device")
    if not there:
        return result
    return tree_map(lambda leaf: _wrapped(leaf, known), result)


def _raw(leaf: Any) -> Any:
    return leaf.raw if isinstance(leaf, Pretended) else leaf


def _wrapped(leaf: Any, known: dict[int, Pretended]) -> Any:
    if not isinstance(leaf, Tensor) or isinstance(leaf, Pretended):
        return leaf
    return known[id(leaf)] if id(leaf) in known else Pretended(leaf)


class _Quiet:
    """A stream, an event, the driver: nothing to do on a CPU."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __enter__(self) -> "_Quiet":
        return self

    def __exit__(self, *_: Any) -> None: ...

    def __getattr__(self, name: str) -> Callable[..., int]:
        return lambda *_, **__: 0


def _record(run: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
    recording.on = True
    try:
        output = run()
    finally:
        recording.on = False

    def again() -> None:
        output.copy_(run())

    return output, again


def _inference_mode(mode: Any = True) -> Any:
    # Wrappers cannot be inference tensors.
    if callable(mode):
        return torch.no_grad()(mode)
    return torch.no_grad() if mode else contextlib.nullcontext()


def _to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    # Torch would ask the driver for the number that "cuda" lacks.
    def numbered(leaf: Any) -> Any:
        return CUDA if isinstance(leaf, str | torch.device) and leaf in ("cuda", BARE) else leaf

    args, kwargs = tree_map(numbered, (args, kwargs))
    return TO(self, *args, **kwargs)


def _tensor(data: Any, *, device: Any = None, **kwargs: Any) -> Tensor:
    # Torch would fill it on the CPU and copy it where no mode sees that.
    made = TENSOR(data, **kwargs)
    return made if device is None else made.to(device)


def _pinned(self: Tensor, *_: Any) -> Tensor:
    made = self.clone()
    made.pinned = True  # type: ignore[attr-defined]
    return made


def pretend() -> None:
    """Put the device there, for the rest of the process."""
    torch.Tensor.to = _to  # type: ignore[method-assign,assignment]
    torch.Tensor.pin_memory = _pinned  # type: ignore[method-assign,assignment]
    torch.tensor = _tensor  # type: ignore[assignment]
    torch.inference_mode = _inference_mode  # type: ignore[misc,assignment]
    for name, value in {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_properties": lambda *_: SimpleNamespace(
            name="pretended", total_memory=80 * 2**30, major=9, minor=0
        ),
        "get_rng_state": lambda *_: torch.get_rng_state(),
        "set_rng_state": lambda state, *_: torch.set_rng_state(state),
        "_lazy_init": lambda: None,
        # A function or class for each: the compiler knows every one of torch.cuda's by itself.
        **{name: lambda *_: None for name in ("set_device", "synchronize", "empty_cache")},
        **{
            name: type(name, (_Quiet,), {})
            for name in ("Stream", "Event", "current_stream", "stream", "cudart")
        },
    }.items():
        setattr(torch.cuda, name, value)
    # The mode is a thread's own: data, experts and requests have theirs.
    run = threading.Thread.run

    def run_pretending(self: threading.Thread) -> None:
        with Device():
            run(self)

    threading.Thread.run = run_pretending  # type: ignore[method-assign]


def pytest_collection_finish() -> None:
    """All that the tests import is there by now: from here on the device is, too."""
    from atoll.model import replay

    replay.record = _record
    Device().__enter__()


pretend()
