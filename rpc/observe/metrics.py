"""Prometheus metrics, in a registry of their own, served over HTTP on a port of their own.

Delivered tokens, latencies and outcomes come from request streams; pages, queue and step time from the engine's stats.
Nothing here can raise into a step: it runs on the frontend's loop.
"""

from collections.abc import Mapping, Sequence

from rpc.observe.engines import EngineMetrics
from rpc.observe.series import Series

TTFT = (
    .001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
ITL = (
    .002, .004, .006, .008, .01, .015, .02, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40,
    80,
)  # fmt: skip
PHASES = (.3, .5, .8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)  # fmt: skip
QUEUE = (0.001, 0.005, 0.01, 0.05, 0.1, *PHASES)
TOKENS = tuple(m * 10**e for e in range(6) for m in (1, 2, 5))
OUTCOMES = (
    "stop", "length", "deadline", "aborted", "cancelled", "invalid_field", "not_supported", "model_not_found",
    "request_id_live", "no_token_left", "queue_full", "queue_timeout", "slow_reader", "draining", "starting",
    "request_fault", "quarantined", "engine_failed", "internal",
)  # fmt: skip


class Metrics:
    """All of a server's, with the label model_name. engines: those of its engines."""

    def __init__(self, model_name: str) -> None:
        series = Series(model_name)
        self.registry, self.engines = series.registry, EngineMetrics(series)
        self._prompt_tokens = series.counter("quire_prompt_tokens", "Prompt tokens of requests that left the queue.")
        self._cached_tokens = series.counter("quire_prompt_tokens_cached", "Those of them that the prefix cache had.")
        self._generation_tokens = series.counter(
            "quire_generation_tokens", "Output tokens delivered to request streams."
        )
        self._ttft = series.histogram("quire_time_to_first_token_seconds", "From arrival to the first token.", TTFT)
        self._itl = series.counted("quire_inter_token_latency_seconds", "Between two tokens of a sequence.", ITL)
        self._queue_time = series.histogram("quire_request_queue_time_seconds", "From arrival to a batch row.", QUEUE)
        self.request_time = series.histogram("quire_e2e_request_latency_seconds", "From arrival to the end.", PHASES)
        self._prompt_lengths = series.histogram("quire_request_prompt_tokens", "Prompt length.", TOKENS)
        self.output_tokens = series.histogram("quire_request_generation_tokens", "Output length.", TOKENS)
        self._outcomes = series.counters("quire_requests", "Requests by how they ended.", "outcome", OUTCOMES)

    def request_started(self, prompt_tokens: int, cached: int, waited: float) -> None:
        self._prompt_tokens.inc(prompt_tokens)
        self._cached_tokens.inc(cached)
        self._prompt_lengths.observe(prompt_tokens)
        self._queue_time.observe(waited)

    def tokens(self, count: int, firsts: Sequence[float], gaps: Mapping[float, int]) -> None:
        """So many came. firsts: seconds from a request to its first one. gaps: how many of the others came so many
        seconds after the one before.
        """
        self._generation_tokens.inc(count)
        for seconds in firsts:
            self._ttft.observe(seconds)
        for seconds, times in gaps.items():
            self._itl.observe(seconds, times)

    def request_ended(self, outcome: str) -> None:
        self._outcomes.get(outcome, self._outcomes["internal"]).inc()
