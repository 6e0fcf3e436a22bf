"""Backpressure: bounds of the waiting queue in requests, in prompt tokens and in predicted seconds.

The prediction serves to refuse early what could not be admitted in time; the queue's own deadline is exact. A step
costs a + b x tokens, fitted to the steps that ran (least squares, older steps fading). The queue takes the time to
compute its prompt tokens and to decode its outputs at full batch, which are taken to become as long as those of such
requests did before (`OutputLengths`). While only small steps have run b is unknown and taken as 0: the prediction is
then too low.

An idle engine refuses no request, nor does a new one by a prediction: its first steps compile and warm up, and one
that takes a second would refuse most of the first burst.
"""

from dataclasses import dataclass

from scheduler.costs import StepCost
from scheduler.output_lengths import OutputLengths
from scheduler.queue import QueueLoad
from scheduler.request import Request
from scheduler.settings import QueueLimits

FEWEST_STEPS = 32  # that have run before a prediction refuses a request


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request may not queue, and in how many seconds another try is worth while."""

    message: str
    retry_after: float


class Backpressure:
    """Refuses requests that would wait too long.

    Attributes:
        cost: Step cost, as observed.
        lengths: Output lengths, as observed.
    """

    def __init__(self, limits: QueueLimits, pool_tokens: int, rows: int) -> None:
        """Makes the bounds for a pool of `pool_tokens` tokens and `rows` sequences that run at once."""
        self.limits = limits
        self._most_tokens = limits.pools_of_tokens * pool_tokens
        self._rows = rows
        self._steps = 0
        self.cost = StepCost()
        self.lengths = OutputLengths()

    def observe_step(self, tokens: int, seconds: float) -> None:
        """Learns from a step that computed `tokens` tokens."""
        if tokens and seconds > 0:
            self._steps += 1
            self.cost.observe(tokens, seconds)

    def observe_output(self, tokens: int, request: Request | None = None) -> None:
        """Learns from a sequence of a request that ended with `tokens` output tokens."""
        self.lengths.observe(tokens, request)

    def predicted_wait(self, requests: int, tokens: int, output: float | None = None) -> float:
        """Predicts the seconds to work off waiting requests.

        Args:
            requests: Number of requests.
            tokens: Prompt tokens of all together.
            output: Mean of the output tokens that they are expected to have; None takes the mean of all requests.
        """
        a, b = self.cost.fit()
        decode_steps = requests * (self.lengths.mean if output is None else output) / self._rows
        return tokens * b + decode_steps * (a + b * self._rows)

    def predicted_run(self, request: Request) -> float:
        """Predicts the seconds from a request's first step to its last one, as long as steps take at present."""
        return len(request.prompt) * self.cost.fit()[1] + self.lengths.expected(request) * self.cost.mean

    def refuse(
        self, waiting: QueueLoad, before: QueueLoad, prompt: int, queue_timeout: float, output: float | None = None
    ) -> Refusal | None:
        """Returns why one more request may not queue, None where it may.

        Args:
            waiting: Queued requests that cannot be admitted at this moment.
            before: Requests among them that are admitted before this one.
            prompt: Prompt tokens of the request.
            queue_timeout: Seconds that the request would wait at most.
            output: As in `predicted_wait`, of the waiting requests.
        """
        requests, tokens = waiting
        if not requests:
            return None
        wait = self.predicted_wait(*before, output)
        retry = min(max(wait / 2, 1.0), 30.0)
        if requests >= self.limits.requests:
            return Refusal(f"the queue is full: {requests} requests wait, the limit is {self.limits.requests}", retry)
        if tokens + prompt > self._most_tokens:
            return Refusal(
                f"the queue is full: {tokens} tokens wait, {prompt} more would pass the limit of "
                f"{self._most_tokens:.0f}",
                retry,
            )
        if wait > queue_timeout and self._steps >= FEWEST_STEPS:
            return Refusal(
                f"the predicted wait is {wait:.1f} s, the request would wait at most {queue_timeout:.1f} s", retry
            )
        return None

    def refuse_tenant(self, load: QueueLoad, prompt: int) -> Refusal | None:
        """Returns why one more request of a tenant may not queue. load: the tenant's waiting requests."""
        share = self.limits.tenant_share
        most, most_tokens = share * self.limits.requests, share * self._most_tokens
        if load.requests < most and (not load.requests or load.tokens + prompt <= most_tokens):
            return None
        message = (
            f"the tenant's part of the queue is full: {load.requests} requests with {load.tokens} tokens wait, the "
            f"limits are {most:.0f} and {most_tokens:.0f}"
        )
        return Refusal(message, min(max(self.predicted_wait(*load) / 2, 1.0), 30.0))
