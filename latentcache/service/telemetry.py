"""What the server counts, for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector
from starlette.responses import Response
from typing_extensions import override

if TYPE_CHECKING:
    from latentcache.service.miss_encoder import EncoderCounts


class Telemetry:
    """The counters of one server. Other parts of the server register theirs in `registry`."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "latentcache_requests",
            "Requests, by route, method and status.",
            ["route", "method", "status"],
            registry=self.registry,
        )
        self.seconds = Histogram(
            "latentcache_request_seconds", "Time until a request was answered whole.", ["route"], registry=self.registry
        )
        self.sent_bytes = Counter("latentcache_sent_bytes", "Bytes of bodies sent.", registry=self.registry)
        self.received_bytes = Counter("latentcache_received_bytes", "Bytes of bodies received.", registry=self.registry)
        self.hits = Counter("latentcache_hits", "Requested entries that were there.", registry=self.registry)
        self.misses = Counter("latentcache_misses", "Requested entries that were not there.", registry=self.registry)
        self.damaged = Counter("latentcache_damaged", "Requested entries that were damaged.", registry=self.registry)
        self.added = Counter("latentcache_added", "Entries that were added.", registry=self.registry)
        self.in_progress = Gauge("latentcache_requests_in_progress", "Requests under way.", registry=self.registry)

    def watch_encoder(self, counts: Callable[[], EncoderCounts]) -> None:
        """Also answer with what an encoder counts."""
        self.registry.register(EncoderCollector(counts))

    def answer(self) -> Response:
        """All of them, as Prometheus reads them."""
        return Response(generate_latest(self.registry), media_type=CONTENT_TYPE_PLAIN_0_0_4)


class EncoderCollector(Collector):
    """What the encoder counts."""

    def __init__(self, counts: Callable[[], EncoderCounts]):
        self._counts = counts

    @override
    def collect(self) -> Iterator[Metric]:
        counts = self._counts()
        for name, value, what in (
            ("hits", counts.num_hits, "Entries requested of the encoder that were there."),
            ("misses", counts.num_misses, "Entries requested of the encoder that were not there."),
            ("entries", counts.num_encoded, "Entries encoded."),
            ("failures", counts.num_failed, "Entries that could not be encoded."),
            ("turned_away", counts.num_turned_away, "Requests that found no room in the queue."),
        ):
            yield CounterMetricFamily(f"latentcache_encoder_{name}", what, value)
        waiting = "Entries that wait or are being encoded."
        yield GaugeMetricFamily("latentcache_encoder_queue", waiting, counts.num_waiting)
        loaded = GaugeMetricFamily("latentcache_encoder_loaded", "Whether encoders are on the device.", labels=["kind"])
        for kind in ("text", "image"):
            loaded.add_metric([kind], float(kind in counts.loaded))
        yield loaded
