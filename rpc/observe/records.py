"""The record of a request that has ended, for logs and traces.

Its `spec` has the prompt: observers write no text of it, and the output is not in the record.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from scheduler.prompts import Chat
from scheduler.spec import Spec


@dataclass(frozen=True, slots=True)
class Moments:
    """Ends of a request's phases, in seconds since its arrival.

    Attributes:
        row: Its admission, when an engine gave it its first row; None where none did.
        first: Arrival of its first token, of any of its sequences; None where none came.
        last: Arrival of its last token; None where none came.
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
    """Record of a request that has ended.

    Attributes:
        request_id: Id of the request.
        model: Name of the served model.
        spec: The request as the client stated it.
        outcome: Outcome as `quire_requests_total` counts it.
        failed: The outcome is no result.
        arrived: Arrival, in seconds since the Unix epoch.
        seconds: Seconds from the arrival to the end.
        moments: Ends of its phases; None where it was not submitted to an engine.
        prompt_tokens: Count of prompt tokens.
        cached_tokens: Prompt tokens whose KV the prefix cache had.
        completion_tokens: Count of output tokens, without those of an output prefix.
        finish_reasons: Finish reasons of the sequences that have one.
        submissions: Count of submissions to engines.
        attempt: Number of the last one, as recordings of engines have it; 0 without any.
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
    attempt: int = 0
    trace: Mapping[str, str] = field(default_factory=dict)

    @property
    def operation(self) -> str:
        """Operation as OpenTelemetry names it."""
        return "chat" if isinstance(self.spec.prompt, Chat) else "text_completion"

    @property
    def phases(self) -> tuple[Phase, ...]:
        """Phases that the request came to, see `Moments.phases`; () where it was not submitted."""
        return () if self.moments is None else self.moments.phases(self.seconds)

    @property
    def first_token(self) -> float | None:
        """Seconds from the arrival to the first token."""
        return None if self.moments is None else self.moments.first


Watcher = Callable[[RequestRecord], None]
"""An observer of ended requests."""
