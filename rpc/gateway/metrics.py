"""A gateway's own metrics for Prometheus, in a registry of their own."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

from rpc.client.failures import Failure
from rpc.distribution import own_version
from rpc.gateway.stats import RequestStats

SECONDS = (
    .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300, 600,
)  # fmt: skip
CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4.encode()


class GatewayMetrics:
    """Requests, tokens, connections and failed calls of one gateway."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        Info("quire_gateway_build", "Version of the gateway.", registry=registry).info({"version": own_version()})
        self._requests = Counter(
            "quire_gateway_requests",
            "Requests that have ended, by path and HTTP status; 499: the client left before an answer.",
            ["endpoint", "status"],
            registry=registry,
        )
        self._seconds = Histogram(
            "quire_gateway_request_seconds",
            "Time from a request's headers to the end of its answer.",
            ["endpoint"],
            buckets=SECONDS,
            registry=registry,
        )
        self._first_token = Histogram(
            "quire_gateway_time_to_first_token_seconds",
            "Time from a request's headers to the first token from a server.",
            ["endpoint"],
            buckets=SECONDS,
            registry=registry,
        )
        self._prompt_tokens = Counter(
            "quire_gateway_prompt_tokens", "Prompt tokens of requests that have ended.", registry=registry
        )
        self._tokens = Counter("quire_gateway_generation_tokens", "Tokens that came from servers.", registry=registry)
        self._broken = Counter(
            "quire_gateway_broken_streams",
            "Answers that ended with an error, or whose client left, after their status was sent.",
            registry=registry,
        )
        self._upstream_errors = Counter(
            "quire_gateway_upstream_errors",
            "Calls to servers that failed, by gRPC status; a request can take several.",
            ["code"],
            registry=registry,
        )
        self._running = Gauge("quire_gateway_requests_running", "Requests that are being answered.", registry=registry)
        self._connections = Gauge("quire_gateway_open_connections", "Connections of clients.", registry=registry)

    def began(self) -> None:
        self._running.inc()

    def tokens(self, count: int) -> None:
        self._tokens.inc(count)

    def ended(self, stats: RequestStats) -> None:
        self._running.dec()
        self._requests.labels(stats.endpoint, stats.status).inc()
        self._seconds.labels(stats.endpoint).observe(stats.seconds)
        if stats.first_token is not None:
            self._first_token.labels(stats.endpoint).observe(stats.first_token)
        self._prompt_tokens.inc(stats.prompt_tokens)
        if stats.status == 200 and stats.error is not None:
            self._broken.inc()

    def call_failed(self, failure: Failure) -> None:
        self._upstream_errors.labels(failure.code.name.lower()).inc()

    def watch_connections(self, count: Callable[[], int]) -> None:
        self._connections.set_function(count)

    def page(self) -> bytes:
        """Returns all metrics in Prometheus's classic text format."""
        return generate_latest(self.registry)
