"""What the server counts, for Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.responses import Response


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

    def answer(self) -> Response:
        """All of them, as Prometheus reads them."""
        return Response(generate_latest(self.registry), media_type=CONTENT_TYPE_PLAIN_0_0_4)
