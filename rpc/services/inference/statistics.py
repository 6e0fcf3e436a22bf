"""Statistics of the requests that came by this protocol."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rpc.services.inference import pb
from rpc.services.inference.asking import VERSION


@dataclass(slots=True)
class Duration:
    """A count of events, and the sum of their nanoseconds."""

    count: int = 0
    ns: int = 0

    def add(self, ns: int) -> None:
        self.count += 1
        self.ns += ns

    def message(self) -> pb.StatisticDuration:
        return pb.StatisticDuration(count=self.count, ns=self.ns)


@dataclass(slots=True)
class Passage:
    """Times of a request, in nanoseconds of the monotonic clock.

    Attributes:
        came: Its arrival.
        opened: End of its tokenization.
        served: Its admission, when an engine gave it its first row; None where none did.
        ended: Its end in the engine.
    """

    came: int = field(default_factory=time.monotonic_ns)
    opened: int = 0
    ended: int = 0
    served: int | None = None

    def open(self) -> None:
        self.opened = time.monotonic_ns()

    def end(self, served: float | None) -> None:
        """Notes the request's end in the engine, and its admission, in seconds of the monotonic clock."""
        self.ended, self.served = time.monotonic_ns(), None if served is None else round(served * 1e9)


@dataclass(slots=True)
class Statistics:
    """Counts and times of requests, under Triton's names.

    Attributes:
        success: Requests that succeeded.
        fail: Requests that failed, cancelled ones included.
        queue: Waits of successful requests for their first row.
        compute_input: Their tokenization.
        compute_infer: Their time from the first row to the end in the engine.
        compute_output: Their time from the end in the engine to the end of the answer.
        last: Arrival of the newest successful request, in milliseconds since the Unix epoch.
    """

    success: Duration = field(default_factory=Duration)
    fail: Duration = field(default_factory=Duration)
    queue: Duration = field(default_factory=Duration)
    compute_input: Duration = field(default_factory=Duration)
    compute_infer: Duration = field(default_factory=Duration)
    compute_output: Duration = field(default_factory=Duration)
    last: int = 0

    @contextmanager
    def counted(self) -> Iterator[Passage]:
        """Counts a request by the end of the block: any exception is a failure, a cancellation too."""
        came, passage = time.time_ns() // 10**6, Passage()
        try:
            yield passage
        except BaseException:
            self.fail.add(time.monotonic_ns() - passage.came)
            raise
        self._add(passage, time.monotonic_ns())
        self.last = max(self.last, came)

    def _add(self, passage: Passage, now: int) -> None:
        served = passage.opened if passage.served is None else passage.served
        waited = min(max(served, passage.opened), passage.ended) - passage.opened
        self.success.add(now - passage.came)
        self.queue.add(waited)
        self.compute_input.add(passage.opened - passage.came)
        self.compute_infer.add(passage.ended - passage.opened - waited)
        self.compute_output.add(now - passage.ended)

    def message(self, model: str) -> pb.ModelStatistics:
        return pb.ModelStatistics(
            name=model,
            version=VERSION,
            last_inference=self.last,
            inference_count=self.success.count,
            execution_count=self.success.count,
            inference_stats=pb.InferStatistics(
                success=self.success.message(),
                fail=self.fail.message(),
                queue=self.queue.message(),
                compute_input=self.compute_input.message(),
                compute_infer=self.compute_infer.message(),
                compute_output=self.compute_output.message(),
            ),
        )
