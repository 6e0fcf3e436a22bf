"""Settings of the scheduler and the limits that every request is checked against."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """max_batched_tokens: token budget of a step. max_sequences: rows that run at once. prefill_chunk: most prompt
    tokens of one request in a step. steps_in_flight: how many steps may be launched before the first is collected.
    """

    max_batched_tokens: int = 512
    max_sequences: int = 256
    prefill_chunk: int | None = None
    steps_in_flight: int = 1

    def __post_init__(self) -> None:
        if self.max_sequences < 1:
            raise ValueError(f"--max-sequences is {self.max_sequences}, must be at least 1")
        if self.max_batched_tokens < self.max_sequences:
            raise ValueError(
                f"--max-batched-tokens is {self.max_batched_tokens}, must be at least --max-sequences "
                f"({self.max_sequences}), so that every running sequence can take one token a step"
            )
        if self.prefill_chunk is not None and self.prefill_chunk < 1:
            raise ValueError(f"--prefill-chunk is {self.prefill_chunk}, must be at least 1")
        if not 1 <= self.steps_in_flight <= 2:
            raise ValueError(f"--steps-in-flight is {self.steps_in_flight}, must be 1 or 2")


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """Bounds of the waiting queue. requests: how many may wait. pools_of_tokens: prompt tokens that may wait, as a
    multiple of what the KV pool holds. wait: seconds that a request may wait, predicted or real.
    """

    requests: int = 1024
    pools_of_tokens: float = 8.0
    wait: float = 30.0

    def __post_init__(self) -> None:
        if self.requests < 1:
            raise ValueError(f"--max-queue is {self.requests}, must be at least 1")
        if not self.wait > 0:
            raise ValueError(f"--max-queue-time is {self.wait}, must be above 0 seconds")


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Most that one request may ask for, whatever the model."""

    stop_strings: int = 4
    stop_string_bytes: int = 128
    stop_token_ids: int = 64
    top_logprobs: int = 20
    batch_requests: int = 1024
    request_id_bytes: int = 128
