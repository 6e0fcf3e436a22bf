"""What is told of a request that has ended, to logs and traces. Nothing of what it said, or was told."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from scheduler.request import Chat, Spec


@dataclass(frozen=True, slots=True)
class Moments:
    """When the phases of a request ended, in seconds since its arrival.

    Attributes:
        row: An engine gave it its first batch row; None where it never did.
        first: Its first token arrived, of any of its sequences.
        last: Its last token arrived.
    """

    row: float | None = None
    first: float | None = None
    last: float | None = None

    def phases(self, end: float) -> tuple["Phase", ...]:
        """The phases that a request came to, in order, without gaps.

        The queue lasts until the batch row (preparation included), prefill until the first token, decode until the
        last. Preemptions and moves count to the phase in which they occur. A phase that the request did not complete
        lasts until `end`, when the request ended.
        """
        phases, start = [], 0.0
        for name, until in (("queue", self.row), ("prefill", self.first), ("decode", self.last)):
            phases.append(Phase(name, start, end if until is None else until))
            if until is None:
                break
            start = until
        return tuple(phases)


class Phase(NamedTuple):
    """A phase of a request: its name, and when it began and ended, in seconds since the arrival."""

    name: str
    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """What is reported of a request once it has ended.

    Attributes:
        outcome: As `quire_requests_total` counts it.
        failed: The outcome is no result.
        arrived: Seconds since the epoch.
        seconds: From the arrival to the end.
        moments: When its phases ended; None where it was not submitted to an engine.
        submissions: To engines.
        trace: W3C headers of the call.
    """

    request_id: str
    model: str
    spec: Spec = field(repr=False)
    outcome: str
    failed: bool
    arrived: float
    seconds: float
    moments: Moments | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    finish_reasons: tuple[str, ...] = ()
    submissions: int = 0
    trace: Mapping[str, str] = field(default_factory=dict)

    @property
    def operation(self) -> str:
        """As OpenTelemetry names them."""
        return "chat" if isinstance(self.spec.prompt, Chat) else "text_completion"

    @property
    def phases(self) -> tuple[Phase, ...]:
        """See `Moments.phases`; () where it was not submitted."""
        return () if self.moments is None else self.moments.phases(self.seconds)

    @property
    def first_token(self) -> float | None:
        """Seconds from the arrival to the first token."""
        return None if self.moments is None else self.moments.first


Watcher = Callable[[RequestRecord], None]
