"""Counts the requests of a frontend as they end: outcomes, times, and tokens for each tenant's bill."""

import asyncio
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from types import MappingProxyType

from rpc.frontend.errors import RequestFailed
from rpc.frontend.live import Live
from rpc.frontend.reporting import CANCELLED, RequestReporter
from rpc.observe.exemplars import exemplar_of
from rpc.observe.metrics import Metrics
from scheduler.spec import Spec

NO_TRACE: Mapping[str, str] = MappingProxyType({})


class Accounting:
    """Counts each request once, by how far it came.

    Args:
        metrics: Gets the counts.
        reporter: Reports requests that have ended.
    """

    def __init__(self, metrics: Metrics, reporter: RequestReporter) -> None:
        self._metrics, self._reporter = metrics, reporter

    def refused(self, failure: RequestFailed, tenant: str) -> RequestFailed:
        """Counts a request that ended before it was submitted. Returns the failure, to be raised."""
        self._metrics.request_ended(failure.reason.lower(), tenant)
        return failure

    def turned_away(
        self, failure: RequestFailed, request_id: str, tenant: str, trace: Mapping[str, str] = NO_TRACE
    ) -> RequestFailed:
        """Counts and reports a request that cannot even be read. Returns the failure, to be raised."""
        with suppress(RequestFailed), self._reporter.watch(Spec("", tenant=tenant), request_id, trace):
            raise self.refused(failure, tenant)
        return failure

    @contextmanager
    def counting_cancel(self, tenant: str) -> Iterator[None]:
        """Counts a request whose caller leaves before it was submitted."""
        try:
            yield
        except asyncio.CancelledError:
            self._metrics.request_ended(CANCELLED, tenant)
            raise

    def ended(self, live: Live, failure: RequestFailed | None, trace: Mapping[str, str]) -> str:
        """Counts a request that was submitted.

        Args:
            live: The request, which no engine has any more.
            failure: The caller's own failure, before that of the request.
            trace: W3C headers of the call.

        Returns:
            The outcome, as the metrics count it.
        """
        stream = live.stream
        failure = failure or stream.failure
        if failure is not None:
            outcome = failure.reason.lower()
        elif stream.ended and (first := stream.sequences[0].finish) is not None:
            outcome = first.reason.value
            self._count_result(live)
        else:
            outcome = CANCELLED
        self._metrics.request_ended(outcome, stream.spec.tenant)
        self._count_tokens(live)
        self._metrics.request_time.observe(time.monotonic() - live.started, exemplar_of(trace))
        return outcome

    def _count_result(self, live: Live) -> None:
        for sequence in live.stream.sequences:
            self._metrics.output_tokens.observe(sequence.new_count)
        if (decoding := live.decoding) is not None:
            self._metrics.decoded(*decoding)

    def _count_tokens(self, live: Live) -> None:
        """Counts the request's tokens for its tenant's bill."""
        stream = live.stream
        prompt = 0 if live.served is None else len(stream.request.prompt)  # a prompt that was never computed is free
        generated = sum(sequence.new_count for sequence in stream.sequences)
        self._metrics.tenants.tokens(stream.spec.tenant, prompt, stream.cached_tokens, generated)
