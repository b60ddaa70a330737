"""Which expert sits where: on disk, in host memory, or on the device, within a budget.

There is one network per architecture. Experts share it: before one runs, the network's parameters are pointed
at its weights. Of low-rank changes of a network (LoRA) the network's own weights stay, and the changes move.
Module, parameters and shapes stay the same objects, so a compiled network is not compiled again. Weights lie
in slots, one flat block of device memory each.
"""

import contextlib
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float
from torch import Tensor, nn

from atoll.base.condition import Condition, Denoiser
from atoll.base.errors import ConfigError
from atoll.base.hashing import digest
from atoll.model.card import Card
from atoll.model.expert import Expert, FileWeights, StoredExpert
from atoll.model.generation import Residency
from atoll.model.replay import Replayed
from atoll.networks.storage import SCALE, STORED, store, write_stored

ALIGNMENT = 256  # bytes; what CUDA's allocator gives, and a multiple of what the CPU's gives


class ResidentExperts:
    """Experts of an ensemble that share a budget of device memory; use it as `Bank(experts=...)`.

    One thread at a time (`replay.COMPUTING`) chooses slots, and a worker only copies.

    Args:
        stored: by number, None where one is missing; every architecture gets a network of its own.
        dtype: of their weights; by default that of the network's class (float32).

    Attributes:
        capacity: experts that a step can use without bringing any of them twice in the next.
        place_bytes: device memory of a slot; the largest expert fills it.
    """

    def __init__(
        self,
        stored: Sequence[StoredExpert | None],
        residency: Residency | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
    ) -> None:
        self.residency, self.device, self.dtype = residency or Residency(), torch.device(device), dtype
        self._modules: dict[str, _SharedModule] = {}
        self._experts: dict[int, _ResidentSource] = {}
        self._count = len(stored)
        for number, source in enumerate(stored):
            if source is not None:
                key = digest({"family": source.family, "config": dict(source.config), "base": source.shared})
                if key not in self._modules:
                    self._modules[key] = _SharedModule(source, self.device, dtype, self.residency)
                module = self._modules[key]
                if {name: spec.shape for name, spec in source.specs.items()} != module.shapes:
                    source.network()  # refuses it, by the first tensor that is not its settings'
                how = source.family, source.prediction, source.schedule, source.card
                expert = Expert(module.network, *how, replayed=module.replayed)
                module.replayed = expert.replayed
                self._experts[number] = _ResidentSource(source, module, expert)
        if not self._experts:
            raise ConfigError("there is no expert to keep resident", "assemble one or more")
        self.place_bytes = max(expert.module.layout.nbytes for expert in self._experts.values())
        self.capacity, self._most = self.residency.places(len(self._experts), self.place_bytes)
        self._slots: list[_Slot] = []
        self._queue: deque[int] = deque()
        # One thread, of one core: torch would give it a team of threads that wait beside the step's.
        self._worker = ThreadPoolExecutor(1, "experts", torch.set_num_threads, (1,))
        self._host: HostMemory | None = None
        self._stream: torch.cuda.Stream | None = None
        if self.device.type == "cuda":
            places = self.residency.host_places(len(self._experts), self.place_bytes)
            self._host = HostMemory(places, self.place_bytes)
            self._stream = torch.cuda.Stream(self.device)
        self._clock = self.loads = self.loaded_bytes = 0

    def __len__(self) -> int:
        """K, missing ones counted."""
        return self._count

    def __getitem__(self, number: int) -> "ResidentExpert":
        """One expert as a denoiser; it is brought when it runs."""
        if not 0 <= number < self._count:
            raise IndexError(number)
        if number not in self._experts:
            raise ConfigError(f"expert {number} is missing", "publish it and assemble again")
        return ResidentExpert(self, number)

    @property
    def resident(self) -> tuple[int, ...]:
        """Numbers of experts that are on the device, or on their way."""
        return tuple(sorted(slot.number for slot in self._slots if slot.number is not None))

    @property
    def device_bytes(self) -> int:
        """Device memory that the slots take now."""
        return sum(slot.block.numel() for slot in self._slots)

    def prefetch(self, now: Sequence[int], next: Sequence[int] = ()) -> Sequence[int]:
        """See `dispatch.Prefetching`: resident experts run first, and the others are brought meanwhile."""
        ready = {slot.number for slot in self._slots if slot.pending is None or slot.pending.done()}
        order = sorted(now, key=lambda n: (n not in ready, self._holding(n) is None, n))
        self._queue = deque([*order, *(n for n in next if n not in order)])
        self._bring_ahead(None)
        return order

    def unchanged(self, card: Card) -> "Denoiser | None":
        """The network of this card, if it is the one that experts change (LoRA): a change of zeros."""
        for source in self._experts.values():
            if source.stored.shared == card.weights_sha256:
                slot = _Slot.make(source.module.layout.nbytes, self.device)
                slot.block.zero_()
                # The expert whose network this is may have learned another prediction, or schedule.
                how = card.family, card.prediction, card.schedule, card
                own = Expert(source.module.network, *how, replayed=source.module.replayed)
                return Unchanged(replace(source, expert=own), slot)
        return None

    def close(self) -> None:
        """Give all memory back. Experts that are asked afterwards are brought again."""
        for slot in self._slots:
            if slot.pending is not None:
                with contextlib.suppress(Exception):
                    slot.pending.result()
        if self._host is not None:
            torch.cuda.synchronize(self.device)
            self._host.clear()
        for module in self._modules.values():
            module.bind(None)
        self._slots.clear()
        self._queue.clear()

    def _bring(self, number: int) -> "_Slot":
        with contextlib.suppress(ValueError):
            self._queue.remove(number)
        slot = self._holding(number)
        if slot is None:
            slot = self._free(kept=())
            assert slot is not None
            self._fill(slot, number)
        if slot.pending is not None:
            try:
                slot.pending.result()
            except BaseException:
                slot.number = None  # half a copy: neither the expert that was here nor the one that comes
                raise
            finally:
                slot.pending = None
            if slot.ready is not None:
                torch.cuda.current_stream(self.device).wait_event(slot.ready)
        self._clock += 1
        slot.used = self._clock
        return slot

    def _bring_ahead(self, running: "_Slot | None") -> None:
        # Whoever is wanted earlier keeps its slot, or it would have to be brought again.
        if not self.residency.prefetch:
            return
        wanted = list(self._queue)
        for position, number in enumerate(wanted):
            if self._holding(number) is not None:
                continue
            slot = self._free({*wanted[:position]}, running)
            if slot is None:
                return
            self._fill(slot, number)

    def _holding(self, number: int) -> "_Slot | None":
        return next((slot for slot in self._slots if slot.number == number), None)

    def _free(self, kept: Sequence[int] | set[int], running: "_Slot | None" = None) -> "_Slot | None":
        empty = next((slot for slot in self._slots if slot.number is None), None)
        if empty is not None:
            return empty
        if len(self._slots) < self._most:
            self._slots.append(_Slot.make(self.place_bytes, self.device))
            return self._slots[-1]
        # The expert that is wanted last makes room, as in Belady's rule; of those unwanted the oldest first.
        wanted = {number: -position for position, number in enumerate(self._queue)}
        open_ = [slot for slot in self._slots if slot is not running and slot.number not in kept]
        return min(
            open_, key=lambda slot: (wanted.get(slot.number or 0, -len(wanted) - 1), slot.used), default=None
        )

    def _fill(self, slot: "_Slot", number: int) -> None:
        slot.number = number
        self.loads += 1
        self.loaded_bytes += self._experts[number].module.layout.nbytes
        slot.pending = self._worker.submit(self._copy, slot, number)

    def _copy(self, slot: "_Slot", number: int) -> None:
        source = self._experts[number]
        layout = source.module.layout

        def read(block: Tensor) -> None:
            layout.read(source.stored, block)

        if self._host is None or self._stream is None:
            read(slot.block)
            return
        # A stream of its own: on the default one the copy would wait for the step that it should run beside.
        with torch.cuda.stream(self._stream), self._host.holding(number, read) as block:
            assert slot.done is not None and slot.ready is not None
            self._stream.wait_event(slot.done)  # whoever ran here before has to be finished
            slot.block[: layout.nbytes].copy_(block[: layout.nbytes], non_blocking=True)
            slot.ready.record(self._stream)


@dataclass(frozen=True)
class ResidentExpert:
    """One of `ResidentExperts` as a denoiser; they do not know it, so memory is free when they are let go."""

    experts: ResidentExperts
    number: int

    def velocity(
        self, x_t: Float[Tensor, "B C H W"], t: Float[Tensor, "B"], cond: Condition
    ) -> Float[Tensor, "B C H W"]:
        """Rectified-flow velocity (see `base.condition.Denoiser`); it is brought first if it is not there."""
        # Bound before the next ones are brought: the slot of the expert that runs must not be given away.
        source, slot = self.experts._experts[self.number], self.experts._bring(self.number)
        source.module.bind(slot)
        self.experts._bring_ahead(slot)
        v = source.expert.velocity(x_t, t, cond)
        if slot.done is not None:
            # The GPU runs behind the host: whoever overwrites the slot has to wait for this event.
            slot.done.record(torch.cuda.current_stream(self.experts.device))
        return v

    @property
    def network(self) -> nn.Module:
        """The network that it runs in; after its `velocity`, with its weights."""
        return self.experts._experts[self.number].module.network


@dataclass(frozen=True)
class Unchanged(Denoiser):
    """The network that experts change (LoRA), by a slot of zeros."""

    source: "_ResidentSource"
    slot: "_Slot"

    def velocity(self, x_t: Tensor, t: Tensor, cond: Condition) -> Tensor:
        self.source.module.bind(self.slot)
        return self.source.expert.velocity(x_t, t, cond)


class Layout:
    """Where the tensors of one architecture lie in one flat block of memory."""

    def __init__(self, specs: Mapping[str, Tensor]) -> None:
        self.specs, self.starts, self.nbytes = dict(specs), dict[str, int](), 0
        for name, spec in self.specs.items():
            self.starts[name] = self.nbytes
            self.nbytes += -(-spec.nbytes // ALIGNMENT) * ALIGNMENT

    def views(self, block: Tensor) -> dict[str, Tensor]:
        """The tensors within a block of at least `nbytes` bytes (uint8)."""
        tensors = {}
        for name, spec in self.specs.items():
            part = block[self.starts[name] : self.starts[name] + spec.nbytes]
            tensors[name] = part.view(spec.dtype).view(spec.shape)
        return tensors

    def read(self, expert: StoredExpert, block: Tensor) -> None:
        """Fill a block of the CPU with an expert's weights, converted where dtypes differ."""
        weights, views = expert.weights, self.views(block)
        for key, view in views.items():
            if (scales := views.get(key + SCALE)) is not None:
                write_stored(weights[key], view, scales)
            elif key not in weights:  # scales, written with their weight
                continue
            elif isinstance(weights, FileWeights):
                weights.read(key, view)
            else:
                view.copy_(weights[key])


@dataclass(eq=False)
class _Slot:
    """One expert's room on the device."""

    block: Tensor  # the memory, uint8
    number: int | None = None  # the expert in it, or on its way into it
    pending: "Future[None] | None" = None  # its copy, until somebody has waited for it
    used: int = 0
    done: torch.cuda.Event | None = None  # the GPU has evaluated what was asked of it here
    ready: torch.cuda.Event | None = None  # the GPU has copied it
    views: dict[int, dict[str, Tensor]] = field(default_factory=dict)

    @classmethod
    def make(cls, size: int, device: torch.device) -> "_Slot":
        with torch.inference_mode(False):  # its tensors become parameters, which inference tensors cannot
            block = torch.empty(size, dtype=torch.uint8, device=device)
        if device.type != "cuda":
            return cls(block)
        done = torch.cuda.Event()
        done.record(torch.cuda.current_stream(device))  # the memory may still be in use by what had it
        return cls(block, done=done, ready=torch.cuda.Event())

    def tensors(self, layout: Layout) -> dict[str, Tensor]:
        if id(layout) not in self.views:
            with torch.inference_mode(False):
                self.views[id(layout)] = layout.views(self.block)
        return self.views[id(layout)]


class _SharedModule:
    """A network of one architecture, whose parameters point at one expert's weights at a time."""

    def __init__(
        self, stored: StoredExpert, device: torch.device, dtype: torch.dtype | None, residency: Residency
    ) -> None:
        with torch.inference_mode(False):
            self.network: nn.Module = stored.network().eval().requires_grad_(False)
            # What experts share stays here; their own lies in slots.
            own = {n: value for n, value in self.network.state_dict().items() if n not in stored.base}
            self.shapes = {name: value.shape for name, value in own.items()}
            kind_of = STORED.get(residency.dtype)
            kinds = {} if kind_of is None else store(self.network, kind_of, residency.keep)
            specs = {}
            for name, value in self.network.state_dict(keep_vars=True).items():
                if name.removesuffix(SCALE) in stored.base:
                    continue
                kind = dtype if dtype is not None and value.is_floating_point() else value.dtype
                specs[name] = value.new_empty(value.shape, dtype=kinds.get(name, kind), device="meta")
                # The module takes no memory of its own; `bind` points its parameters into a slot.
                value.data = value.data.new_empty(0)
            nn.Module.to(self.network, device=device, dtype=dtype)  # diffusers' own warns of nothing
            self.layout = Layout(specs)
            held = self.network.state_dict(keep_vars=True)
            for name, value in stored.base.items():
                if name in kinds:
                    held[name].data = torch.empty(value.shape, dtype=kinds[name], device=device)
                    held[name + SCALE].data = torch.empty(len(value), device=device)
                    write_stored(value.to(device), held[name].data, held[name + SCALE].data)
                else:
                    held[name].data.copy_(value)
            self._held: dict[str, Tensor] = {name: held[name] for name in specs}
            self._nothing = {name: value.detach() for name, value in self._held.items()}
        self._slot: _Slot | None = None
        self.replayed: Replayed | None = None

    def bind(self, slot: _Slot | None) -> None:
        """Use the weights in this slot from now on; with None they take no memory."""
        if slot is not None and slot is self._slot:
            return
        self._slot = slot
        tensors = self._nothing if slot is None else slot.tensors(self.layout)
        # `.data` is exchanged and not the parameter: compiled code holds on to the parameters themselves.
        for name, held in self._held.items():
            held.data = tensors[name]


@dataclass(frozen=True)
class _ResidentSource:
    """What is kept of one expert wherever its weights are."""

    stored: StoredExpert
    module: _SharedModule
    expert: Expert


class HostMemory:
    """Experts in host memory on their way to a GPU: pinned, so that copies run beside computation.

    The least recently used expert makes room. For one thread.
    """

    def __init__(self, places: int, size: int) -> None:
        self.places, self.size = places, size
        self._blocks: OrderedDict[int, tuple[Tensor, torch.cuda.Event]] = OrderedDict()

    @contextlib.contextmanager
    def holding(self, number: int, read: Callable[[Tensor], None]) -> Iterator[Tensor]:
        """An expert's block, which `read` fills if the expert is not there.

        What is done with it within goes to the current stream of the GPU.
        """
        if number in self._blocks:
            block, copied = self._blocks.pop(number)
        else:
            if len(self._blocks) < self.places:
                block, copied = torch.empty(self.size, dtype=torch.uint8), torch.cuda.Event()
                # Registered, not allocated as pinned: torch rounds pinned blocks up to a power of two.
                torch.cuda.cudart().cudaHostRegister(block.data_ptr(), block.numel(), 0)
            else:
                _, (block, copied) = self._blocks.popitem(last=False)
                copied.synchronize()  # the GPU may still read what was there
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

    def clear(self) -> None:
        """Give the memory back; nothing may be on its way."""
        for block, _ in self._blocks.values():
            torch.cuda.cudart().cudaHostUnregister(block.data_ptr())
        self._blocks.clear()

    def __del__(self) -> None:
        if self._blocks:
            torch.cuda.synchronize()
            self.clear()
