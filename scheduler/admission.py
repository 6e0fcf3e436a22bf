"""The door of the queue: bounds in requests, in prompt tokens and in predicted seconds.

The prediction is outstanding work over the rate at which this engine has been computing tokens. It is an estimate for
refusing early what could not be started in time; the queue's own deadline is exact.
"""

from dataclasses import dataclass

from scheduler.settings import QueueLimits

SMOOTHING = 0.05  # weight of the newest step in the rate; about 20 steps of memory


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request may not queue, and when it is worth another try."""

    message: str
    retry_after: float


class Admission:
    """pool_tokens: tokens that the KV pool holds."""

    def __init__(self, limits: QueueLimits, pool_tokens: int) -> None:
        self.limits = limits
        self._most_tokens = limits.pools_of_tokens * pool_tokens
        self._rate: float | None = None
        self._output = 64.0

    def observe_step(self, tokens: int, seconds: float) -> None:
        """A busy step computed so many tokens."""
        if tokens and seconds > 0:
            rate = tokens / seconds
            self._rate = rate if self._rate is None else self._rate + SMOOTHING * (rate - self._rate)

    def observe_output(self, tokens: int) -> None:
        """A sequence ended with so many output tokens."""
        self._output += SMOOTHING * (tokens - self._output)

    def predicted_wait(self, requests: int, tokens: int) -> float:
        """Seconds until a queue of so many requests with so many prompt tokens has been worked off."""
        if self._rate is None:
            return 0.0
        return (tokens + requests * self._output) / self._rate

    def refuse(self, requests: int, tokens: int, prompt: int, patience: float) -> Refusal | None:
        """For one more request of `prompt` tokens behind `requests` waiting ones that have `tokens` in all."""
        wait = self.predicted_wait(requests, tokens)
        retry = min(max(wait / 2, 1.0), 30.0)
        if requests >= self.limits.requests:
            return Refusal(f"the queue is full: {requests} requests wait, the limit is {self.limits.requests}", retry)
        if requests and tokens + prompt > self._most_tokens:
            return Refusal(
                f"the queue is full: {tokens} prompt tokens wait, {prompt} more would pass the limit of "
                f"{self._most_tokens:.0f}",
                retry,
            )
        if requests and wait > patience:
            return Refusal(
                f"the predicted wait is {wait:.1f} s, the request would wait at most {patience:.1f} s", retry
            )
        return None
