"""Reports each request that has ended to observers: logs, traces."""

import asyncio
import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from rpc.frontend.errors import RequestFailed
from rpc.frontend.live import Live
from rpc.frontend.output import FinishReason
from rpc.observe.records import RequestRecord, Watcher
from scheduler.spec import Spec

log = logging.getLogger("quire.frontend")

CANCELLED = "cancelled"
RESULTS = {reason.value for reason in FinishReason} | {CANCELLED}


@dataclass(slots=True)
class RequestEnd:
    """End of a request, filled in as it comes about.

    Attributes:
        began: Arrival of the request, seconds on the monotonic clock.
        live: The live request; None where it was not submitted.
        outcome: Outcome as the metrics count it; "" before the end.
    """

    began: float
    live: Live | None = None
    outcome: str = ""


class RequestReporter:
    """Reports the ended requests of one model. An observer that raises harms no request.

    Attributes:
        watchers: Observers, called in order with the record of each ended request.
    """

    def __init__(self, model: str) -> None:
        self._model, self.watchers = model, list[Watcher]()

    @contextmanager
    def watch(self, spec: Spec, request_id: str, trace: Mapping[str, str]) -> Iterator[RequestEnd]:
        """Spans a request, and reports it when the context is left.

        Args:
            spec: The request as the client states it.
            request_id: Id of the request.
            trace: W3C headers of the call.

        Yields:
            The end of the request, for the caller to fill in. An exception gives it an outcome if it has none.
        """
        end, arrived = RequestEnd(time.monotonic()), time.time()
        try:
            yield end
        except BaseException as error:
            end.outcome = end.outcome or _outcome_of(error)
            raise
        finally:
            if self.watchers:
                self._report(self._record(end, spec, request_id, trace, arrived))

    def _report(self, record: RequestRecord) -> None:
        for watcher in self.watchers:
            try:
                watcher(record)
            except Exception:
                log.exception("the end of request %s could not be reported", record.request_id)

    def _record(
        self, end: RequestEnd, spec: Spec, request_id: str, trace: Mapping[str, str], arrived: float
    ) -> RequestRecord:
        seconds, live = time.monotonic() - end.began, end.live
        failed = end.outcome not in RESULTS
        if live is None:
            return RequestRecord(request_id, self._model, spec, end.outcome, failed, arrived, seconds, trace=trace)
        stream = live.stream
        return RequestRecord(
            request_id,
            self._model,
            spec,
            end.outcome,
            failed,
            arrived,
            seconds,
            live.moments,
            len(stream.request.prompt),
            stream.cached_tokens,
            sum(sequence.new_count for sequence in stream.sequences),
            tuple(one.finish.reason.value for one in stream.sequences if one.finish is not None),
            live.submissions,
            live.attempt,
            trace,
        )


def _outcome_of(error: BaseException) -> str:
    if isinstance(error, RequestFailed):
        return error.reason.lower()
    return CANCELLED if isinstance(error, asyncio.CancelledError | GeneratorExit) else "internal"
