"""What a server counts, in the names that Prometheus' own rules ask for."""

from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from atoll.model.sampler import Sampler

ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)


class Metrics:
    """The counters of one server."""

    def __init__(self) -> None:
        # Not the process' own registry, in which a second server's names would clash with the first one's.
        self.registry = registry = CollectorRegistry()
        counter = partial(Counter, registry=registry)
        seconds = partial(Histogram, registry=registry, buckets=SECONDS)
        rows = partial(Histogram, registry=registry, buckets=ROWS)
        self.images = counter("atoll_images", "Pictures drawn.", ["model"])
        self.failed = counter("atoll_failed", "Requests that failed, by code.", ["code"])
        self.rejected = counter("atoll_rejected", "Requests not accepted, by reason.", ["reason"])
        self.cancelled = counter("atoll_cancelled", "Requests whose client left.", ["where"])
        self.failed_batches = counter("atoll_failed_batches", "Steps tried again row by row.")
        self.waiting = Gauge("atoll_images_waiting", "Pictures accepted and not done.", registry=registry)
        self.swaps = counter("atoll_expert_swaps", "Experts brought to the device.")
        self.moved_bytes = counter("atoll_expert_moved_bytes", "Bytes of experts brought to the device.")
        self.router = seconds("atoll_router_seconds", "To route a step's rows.")
        self.expert_rows = counter("atoll_expert_rows", "Rows of each expert.", ["expert"])
        self.expert_calls = counter("atoll_expert_calls", "Runs of each expert.", ["expert"])
        self.latency = seconds("atoll_request_seconds", "From acceptance to the last picture.")
        self.queue_wait = seconds("atoll_queue_wait_seconds", "From acceptance to the first step.")
        self.steps = seconds("atoll_denoise_step_seconds", "A step.")
        self.batch = rows("atoll_batch_rows", "Rows of a step.")
        self.per_call = rows("atoll_expert_rows_per_call", "Rows of a run of an expert.")
        self._moved = (0, 0)

    def count(self, sampler: Sampler) -> None:
        """Count who served a step."""
        if sampler.bank.router is None:
            return
        self.router.observe(sampler.routing_seconds)
        for number, rows in enumerate(sampler.calls):
            if rows:
                self.expert_rows.labels(str(number)).inc(rows)
                self.expert_calls.labels(str(number)).inc()
                self.per_call.observe(rows)

    def moved(self, swaps: int, size: int) -> None:
        """Count experts brought to the device, from their numbers and bytes since the start."""
        self.swaps.inc(swaps - self._moved[0])
        self.moved_bytes.inc(size - self._moved[1])
        self._moved = swaps, size

    def text(self) -> bytes:
        """All of them in Prometheus' text format."""
        return generate_latest(self.registry)
