"""The door of the queue: bounds in requests, in prompt tokens and in predicted seconds.

The prediction is for refusing early what could not be started in time; the queue's own deadline is exact. It takes a
step to cost a + b x tokens, fitted to the steps that ran (least squares, older steps fading), and the queue to need its
prompt tokens computed and its outputs decoded at full batch. As long as only small steps have run b is unknown and
taken as 0: the prediction is then too low, and nobody is turned away from an idle engine.
"""

from dataclasses import dataclass

from scheduler.settings import QueueLimits

MEMORY = 0.98  # weight of a step against the one after it: about 50 steps count
SMOOTHING = 0.05  # weight of the newest output length in their mean
FIRST_OUTPUT = 64.0  # tokens, until an output has ended


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request may not queue, and when it is worth another try, in seconds."""

    message: str
    retry_after: float


class StepCost:
    """Fits seconds = a + b x tokens to the steps that ran."""

    def __init__(self) -> None:
        self._weight = self._n = self._t = self._nn = self._nt = 0.0

    def observe(self, tokens: int, seconds: float) -> None:
        self._weight = MEMORY * self._weight + 1
        self._n = MEMORY * self._n + tokens
        self._t = MEMORY * self._t + seconds
        self._nn = MEMORY * self._nn + tokens * tokens
        self._nt = MEMORY * self._nt + tokens * seconds

    def fit(self) -> tuple[float, float]:
        """(a, b), neither below 0; zeros before the first step."""
        if not self._weight:
            return 0.0, 0.0
        n, t = self._n / self._weight, self._t / self._weight
        variance = self._nn / self._weight - n * n
        covariance = self._nt / self._weight - n * t
        b = min(max(covariance / variance, 0.0), t / n) if variance > 1e-6 * n * n else 0.0
        return max(t - b * n, 0.0), b


class Admission:
    """pool_tokens: tokens that the KV pool holds. rows: sequences that run at once."""

    def __init__(self, limits: QueueLimits, pool_tokens: int, rows: int) -> None:
        self.limits = limits
        self._most_tokens = limits.pools_of_tokens * pool_tokens
        self._rows = rows
        self._cost = StepCost()
        self._output = FIRST_OUTPUT

    def observe_step(self, tokens: int, seconds: float) -> None:
        """A step computed so many tokens."""
        if tokens and seconds > 0:
            self._cost.observe(tokens, seconds)

    def observe_output(self, tokens: int) -> None:
        """A sequence ended with so many output tokens."""
        self._output += SMOOTHING * (tokens - self._output)

    def predicted_wait(self, requests: int, tokens: int) -> float:
        """Seconds until so many waiting requests with so many prompt tokens have been worked off."""
        a, b = self._cost.fit()
        decode_steps = requests * self._output / self._rows
        return tokens * b + decode_steps * (a + b * self._rows)

    def refuse(self, requests: int, tokens: int, prompt: int, patience: float) -> Refusal | None:
        """For one more request of `prompt` tokens. requests, tokens: what will have to wait before it."""
        if not requests:
            return None
        wait = self.predicted_wait(requests, tokens)
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
