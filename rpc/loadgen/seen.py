"""What a client saw of one request, and whether that was soon enough."""

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

INTERRUPTED = "INTERRUPTED"
"""The code of a request that was still running as the person stopped the load."""


@dataclass(slots=True)
class Seen:
    """Times are seconds of time.monotonic.

    due: when the request was to be sent; without a schedule, when it was. sent: when it was given to the transport.
    asked: tokens of the prompt, as far as the generator knows, and tokens to generate. times: of each message that had
    text or tokens. tokens: that were generated, as the server counts them, else the messages. prompt_tokens: as the
    server counts them, 0 where it does not say. ended: after the last message. code: of what failed, "" where nothing
    did. shared: of the prompt's tokens, with other requests. cached_tokens: of the prompt's, from the server's prefix
    cache, None where it does not say. finish: why it ended, as the server says it, in lower case; "" where it has not.
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
        """It ended, and nothing failed."""
        return self.ended > 0 and not self.code

    @property
    def timed(self) -> bool:
        """It did not fail: its tokens' times are the server's, also of what a person interrupted, as far as it got."""
        return self.ended > 0 and self.code in ("", INTERRUPTED)

    @property
    def short(self) -> bool:
        """It ended well, with another number of tokens than was asked for."""
        return self.complete and self.tokens != self.asked[1]

    @property
    def first(self) -> float | None:
        """TTFT: seconds from when it was due."""
        return self.times[0] - self.due if self.times else None

    @property
    def other(self) -> float | None:
        """TPOT: seconds of each token after the first, on average; None where there is no other one."""
        return (self.times[-1] - self.times[0]) / (self.tokens - 1) if self.times and self.tokens > 1 else None

    @property
    def whole(self) -> float:
        """E2E: seconds from when it was due to its end."""
        return self.ended - self.due

    def gaps(self) -> NDArray[np.float64]:
        """ITL: [tokens - 1] seconds before each token but the first, in no order.

        Tokens of one message came at once: one of them has the gap before the message, the others 0. Which message had
        how many makes no difference to that.
        """
        between = np.diff(np.array(self.times))
        together = max(0, self.tokens - len(self.times))
        return np.concatenate([between, np.zeros(together)])


@dataclass(frozen=True, slots=True)
class Targets:
    """Of latency, in seconds, for a request's first token and for each of its others on average; None: any. Requests
    that meet both are goodput (Zhong et al., DistServe, OSDI 2024). Raises ValueError.
    """

    first: float | None = None
    other: float | None = None

    def __post_init__(self) -> None:
        for flag, value in (("--ttft-target", self.first), ("--tpot-target", self.other)):
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{flag} is {value}, must be above 0 and finite")

    @property
    def any(self) -> bool:
        return self.first is not None or self.other is not None

    def met_by(self, seen: Seen) -> bool:
        """Never by one that failed or has no token."""
        if not seen.complete or seen.first is None:
            return False
        in_time = self.first is None or seen.first <= self.first
        return in_time and (self.other is None or seen.other is None or seen.other <= self.other)
