"""Observations of one request by its client, and targets of latency."""

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

INTERRUPTED = "INTERRUPTED"
"""Code of a request that was still running when a person stopped the load."""


@dataclass(slots=True)
class Observation:
    """Times and counts of one request. Times are seconds of time.monotonic.

    Attributes:
        due: Time at which the request was due; without a schedule, at which it began.
        asked: Tokens of the prompt, as far as the generator knows, and tokens to generate.
        sent: Time at which the transport got it.
        times: Arrival of each message with text or tokens.
        tokens: Generated tokens by the server's count; the number of messages if the server does not count.
        prompt_tokens: Prompt tokens by the server's count; 0 if it does not count.
        ended: Time after the last message; 0 before it.
        code: Code of the failure; "" without one.
        message: Message of the failure.
        shared: Tokens at the prompt's front that other requests have too.
        cached_tokens: Prompt tokens from the server's prefix cache; None if it does not count.
        finish: The server's finish reason in lower case; "" before the end.
    """

    due: float
    asked: tuple[int, int]
    sent: float = 0.0
    times: list[float] = field(default_factory=list)
    tokens: int = 0
    prompt_tokens: int = 0
    ended: float = 0.0
    code: str = ""
    message: str = ""
    shared: int = 0
    cached_tokens: int | None = None
    finish: str = ""

    @property
    def complete(self) -> bool:
        """Whether the request ended without a failure."""
        return self.ended > 0 and not self.code

    @property
    def timed(self) -> bool:
        """Whether the request did not fail, so that its tokens' times count. An interrupted one counts so far."""
        return self.ended > 0 and self.code in ("", INTERRUPTED)

    @property
    def short(self) -> bool:
        """Whether the request ended without a failure, but with another number of tokens than requested."""
        return self.complete and self.tokens != self.asked[1]

    @property
    def first(self) -> float | None:
        """TTFT: seconds from `due` to the first message; None before it."""
        return self.times[0] - self.due if self.times else None

    @property
    def other(self) -> float | None:
        """TPOT: average seconds of each token after the first; None without a second token."""
        return (self.times[-1] - self.times[0]) / (self.tokens - 1) if self.times and self.tokens > 1 else None

    @property
    def whole(self) -> float:
        """E2E: seconds from `due` to the end."""
        return self.ended - self.due

    def gaps(self) -> NDArray[np.float64]:
        """Returns ITL: [tokens - 1] seconds before each token but the first, in no order.

        Tokens of one message came at once: one of them has the gap before the message, the others 0. So only the
        number of tokens and of messages matters.
        """
        between = np.diff(np.array(self.times))
        together = max(0, self.tokens - len(self.times))
        return np.concatenate([between, np.zeros(together)])


@dataclass(frozen=True, slots=True)
class Targets:
    """Targets of latency in seconds. Requests that meet both are goodput (Zhong et al., DistServe, OSDI 2024).

    Attributes:
        first: Target of TTFT; None sets none.
        other: Target of TPOT; None sets none.

    Raises:
        ValueError: A target is not above 0 and finite.
    """

    first: float | None = None
    other: float | None = None

    def __post_init__(self) -> None:
        for flag, value in (("--ttft-target", self.first), ("--tpot-target", self.other)):
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{flag} is {value}, must be above 0 and finite")

    @property
    def any(self) -> bool:
        """Whether there is a target."""
        return self.first is not None or self.other is not None

    def met_by(self, seen: Observation) -> bool:
        """Returns whether a request met the targets. One that failed or has no token never does."""
        if not seen.complete or seen.first is None:
            return False
        in_time = self.first is None or seen.first <= self.first
        return in_time and (self.other is None or seen.other is None or seen.other <= self.other)
