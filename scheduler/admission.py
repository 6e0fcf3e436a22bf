"""The door of the queue: bounds in requests, in prompt tokens and in predicted seconds.

The prediction is for refusing early what could not be started in time; the queue's own deadline is exact. It takes a
step to cost a + b x tokens, fitted to the steps that ran (least squares, older steps fading), and the queue to need its
prompt tokens computed and its outputs decoded at full batch. As long as only small steps have run b is unknown and
taken as 0: the prediction is then too low, and nobody is turned away from an idle engine.
"""

from dataclasses import dataclass

from scheduler.costs import StepCost
from scheduler.queue import Load
from scheduler.settings import QueueLimits

SMOOTHING = 0.05  # weight of the newest output length in their mean
FIRST_OUTPUT = 64.0  # tokens, until an output has ended


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request may not queue, and when it is worth another try, in seconds."""

    message: str
    retry_after: float


class Admission:
    """pool_tokens: tokens that the KV pool holds. rows: sequences that run at once. cost: of steps, as observed."""

    def __init__(self, limits: QueueLimits, pool_tokens: int, rows: int) -> None:
        self.limits = limits
        self._most_tokens = limits.pools_of_tokens * pool_tokens
        self._rows = rows
        self.cost = StepCost()
        self._output = FIRST_OUTPUT

    def observe_step(self, tokens: int, seconds: float) -> None:
        """A step computed so many tokens."""
        if tokens and seconds > 0:
            self.cost.observe(tokens, seconds)

    def observe_output(self, tokens: int) -> None:
        """A sequence ended with so many output tokens."""
        self._output += SMOOTHING * (tokens - self._output)

    def predicted_wait(self, requests: int, tokens: int) -> float:
        """Seconds until so many waiting requests with so many prompt tokens have been worked off."""
        a, b = self.cost.fit()
        decode_steps = requests * self._output / self._rows
        return tokens * b + decode_steps * (a + b * self._rows)

    def refuse(self, waiting: Load, before: Load, prompt: int, patience: float) -> Refusal | None:
        """For one more request of `prompt` tokens. waiting: what will have to wait. before: what of it starts before
        this one.
        """
        requests, tokens = waiting
        if not requests:
            return None
        wait = self.predicted_wait(*before)
        retry = min(max(wait / 2, 1.0), 30.0)
        if requests >= self.limits.requests:
            return Refusal(f"the queue is full: {requests} requests wait, the limit is {self.limits.requests}", retry)
        if tokens + prompt > self._most_tokens:
            return Refusal(
                f"the queue is full: {tokens} tokens wait, {prompt} more would pass the limit of "
                f"{self._most_tokens:.0f}",
                retry,
            )
        if wait > patience:
            return Refusal(
                f"the predicted wait is {wait:.1f} s, the request would wait at most {patience:.1f} s", retry
            )
        return None

    def refuse_tenant(self, load: Load, prompt: int) -> Refusal | None:
        """For one more request of a tenant of which so much waits."""
        share = self.limits.tenant_share
        most, most_tokens = share * self.limits.requests, share * self._most_tokens
        if load.requests < most and (not load.requests or load.tokens + prompt <= most_tokens):
            return None
        message = (
            f"the tenant's part of the queue is full: {load.requests} requests with {load.tokens} tokens wait, the "
            f"limits are {most:.0f} and {most_tokens:.0f}"
        )
        return Refusal(message, min(max(self.predicted_wait(*load) / 2, 1.0), 30.0))
