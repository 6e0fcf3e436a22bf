"""Tells whoever wants to know of each request that has ended: logs, traces."""

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
from scheduler.request import Spec

log = logging.getLogger("quire.frontend")

CANCELLED = "cancelled"
RESULTS = {reason.value for reason in FinishReason} | {CANCELLED}


@dataclass(slots=True)
class Ending:
    """What is known of a request by its end.

    Attributes:
        began: When it came, on the monotonic clock.
        live: None where it was not submitted.
        outcome: "" as long as it has none.
    """

    began: float
    live: Live | None = None
    outcome: str = ""


class Watching:
    """Of the requests of one model. A watcher that fails harms no request."""

    def __init__(self, model: str) -> None:
        self._model, self.watchers = model, list[Watcher]()

    @contextmanager
    def watch(self, spec: Spec, request_id: str, trace: Mapping[str, str]) -> Iterator[Ending]:
        """Around all of a request. trace: as in `RequestRecord`."""
        ending, arrived = Ending(time.monotonic()), time.time()
        try:
            yield ending
        except BaseException as error:
            ending.outcome = ending.outcome or _outcome_of(error)
            raise
        finally:
            if self.watchers:
                self._tell(self._record(ending, spec, request_id, trace, arrived))

    def _tell(self, record: RequestRecord) -> None:
        for watcher in self.watchers:
            try:
                watcher(record)
            except Exception:
                log.exception("the end of request %s could not be told", record.request_id)

    def _record(
        self, ending: Ending, spec: Spec, request_id: str, trace: Mapping[str, str], arrived: float
    ) -> RequestRecord:
        seconds, live = time.monotonic() - ending.began, ending.live
        failed = ending.outcome not in RESULTS
        if live is None:
            return RequestRecord(request_id, self._model, spec, ending.outcome, failed, arrived, seconds, trace=trace)
        stream = live.stream
        return RequestRecord(
            request_id,
            self._model,
            spec,
            ending.outcome,
            failed,
            arrived,
            seconds,
            live.moments,
            len(stream.request.prompt),
            stream.cached_tokens,
            sum(sequence.new_count for sequence in stream.sequences),
            tuple(one.finish.reason.value for one in stream.sequences if one.finish is not None),
            live.submissions,
            trace,
        )


def _outcome_of(error: BaseException) -> str:
    if isinstance(error, RequestFailed):
        return error.reason.lower()
    return CANCELLED if isinstance(error, asyncio.CancelledError | GeneratorExit) else "internal"
