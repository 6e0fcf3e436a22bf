"""What is told of a request that has ended, to logs and traces. Nothing of what it said, or was told."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from scheduler.request import Chat, Spec


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """outcome: as `quire_requests_total` counts it. failed: that is no result. arrived: seconds since the epoch. times:
    seconds from then until it had a batch row, its first token, its last token, where it came so far; seconds: until
    the end. submissions: to engines. trace: W3C headers that it came with.
    """

    request_id: str
    model: str
    spec: Spec = field(repr=False)
    outcome: str
    failed: bool
    arrived: float
    seconds: float
    times: Mapping[str, float] = field(default_factory=dict)
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


ROW, FIRST, LAST = "batch_row", "first_token", "last_token"
"""Names of `times`."""

Watcher = Callable[[RequestRecord], None]
