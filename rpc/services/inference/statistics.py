"""What a model has done through this protocol."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rpc.services.inference import pb
from rpc.services.inference.asking import VERSION


@dataclass(slots=True)
class Duration:
    """A count, and the nanoseconds that all of it took."""

    count: int = 0
    ns: int = 0

    def add(self, ns: int) -> None:
        self.count += 1
        self.ns += ns

    def message(self) -> pb.StatisticDuration:
        return pb.StatisticDuration(count=self.count, ns=self.ns)


@dataclass(slots=True)
class Passage:
    """A request on its way, in nanoseconds of the monotonic clock.

    Attributes:
        came: When it came.
        opened: When it was tokenized.
        served: When an engine gave it its first batch row; None where none did.
        ended: When it ended in the engine.
    """

    came: int = field(default_factory=time.monotonic_ns)
    opened: int = 0
    ended: int = 0
    served: int | None = None

    def open(self) -> None:
        self.opened = time.monotonic_ns()

    def end(self, served: float | None) -> None:
        """served: seconds of the monotonic clock."""
        self.ended, self.served = time.monotonic_ns(), None if served is None else round(served * 1e9)


@dataclass(slots=True)
class Statistics:
    """Requests by how they ended, and where the time of those that succeeded went, in Triton's words: compute_input is
    tokenizing, compute_output what followed the end. last: when the newest of these came, in milliseconds since 1970.
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
        """A request, which fails with what is raised; cancelled ones fail too."""
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
