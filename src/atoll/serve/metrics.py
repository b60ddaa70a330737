"""What a server counts, in the names that Prometheus' own rules ask for."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from atoll.model.sampler import Sampler

ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)


class Metrics:
    """The counters of one server."""

    def __init__(self) -> None:
        self.registry = one = CollectorRegistry()
        self.images = Counter("atoll_images", "Pictures drawn.", ["model"], registry=one)
        self.failed = Counter("atoll_failed", "Requests that failed, by code.", ["code"], registry=one)
        self.rejected = Counter(
            "atoll_rejected", "Requests not accepted, by reason.", ["reason"], registry=one
        )
        self.cancelled = Counter("atoll_cancelled", "Requests whose client left.", ["where"], registry=one)
        self.failed_batches = Counter("atoll_failed_batches", "Steps tried again row by row.", registry=one)
        self.waiting = Gauge("atoll_images_waiting", "Pictures accepted and not done.", registry=one)
        self.swaps = Counter("atoll_expert_swaps", "Experts brought to the device.", registry=one)
        self.moved_bytes = Counter(
            "atoll_expert_moved_bytes", "Bytes of experts brought to the device.", registry=one
        )
        self._moved = (0, 0)
        self.router = Histogram(
            "atoll_router_seconds", "To route a step's rows.", registry=one, buckets=SECONDS
        )
        self.expert_rows = Counter("atoll_expert_rows", "Rows of each expert.", ["expert"], registry=one)
        self.expert_calls = Counter("atoll_expert_calls", "Runs of each expert.", ["expert"], registry=one)
        self.latency = Histogram(
            "atoll_request_seconds", "From acceptance to the last picture.", registry=one, buckets=SECONDS
        )
        self.queue_wait = Histogram(
            "atoll_queue_wait_seconds", "From acceptance to the first step.", registry=one, buckets=SECONDS
        )
        self.steps = Histogram("atoll_denoise_step_seconds", "A step.", registry=one, buckets=SECONDS)
        self.batch = Histogram("atoll_batch_rows", "Rows of a step.", registry=one, buckets=ROWS)
        self.per_call = Histogram(
            "atoll_expert_rows_per_call", "Rows of a run of an expert.", registry=one, buckets=ROWS
        )

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
