"""Prometheus metrics, in a registry of their own, served over HTTP on a port of their own.

Delivered tokens, latencies and outcomes come from request streams; pages, queue and step time from the engine's stats.
Nothing here can raise into a step: it runs on the frontend's loop.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, disable_created_metrics

from rpc.observe.engines import EngineMetrics
from rpc.observe.families import Families
from rpc.observe.process import register_process
from rpc.observe.tenants import TenantMetrics

# Upper bounds of the histograms, in seconds. The lowest suit a model of 5 million parameters, whose tokens come 1 ms
# apart; up to 10 s each is at most 2.5 times the one before, so a quantile read from them is off by less than that.
TTFT = (
    .001, .0025, .005, .01, .02, .04, .06, .08, .1, .15, .25, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
ITL = (
    .00025, .0005, .001, .0015, .002, .003, .004, .006, .008, .01, .015, .02, .025, .05, .075, .1, .15, .2, .3, .4, .5,
    .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
)  # fmt: skip
PHASES = (
    .001, .002, .005, .01, .02, .05, .1, .2, .3, .5, .8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480,
    960, 1920, 7680,
)  # fmt: skip
WHOLE = tuple(bound for bound in PHASES if bound >= 0.01)
TOKENS = tuple(m * 10**e for e in range(6) for m in (1, 2, 5))
OUTCOMES = (
    "stop", "length", "closed", "deadline", "aborted", "cancelled", "invalid_field", "not_supported", "model_not_found",
    "no_chat_template", "chat_refused", "chat_limit", "chat_error", "no_tool_format", "grammar_unchecked",
    "request_id_live", "no_token_left", "queue_full", "queue_timeout", "slow_reader", "draining", "starting",
    "request_fault", "quarantined", "engine_failed", "internal",
)  # fmt: skip
MOVES = ("engine_lost", "drain")
SCALINGS = ("up", "down")

DENIALS = ("no_token", "no_operator", "no_policy")


@dataclass(slots=True)
class Totals:
    """Counts since the server started, for clients that ask the server itself.

    Attributes:
        prompt_tokens: Prompt tokens of requests that left the queue.
        cached_tokens: Prompt tokens whose KV the prefix cache had.
        generation_tokens: Output tokens delivered to request streams.
        first_tokens: Requests that got their first token.
        first_token_seconds: Sum of the seconds from their arrival to that token.
        ended_requests: Requests that ended.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    generation_tokens: int = 0
    first_tokens: int = 0
    first_token_seconds: float = 0.0
    ended_requests: int = 0


class Metrics:
    """All metrics of a server, with the label model_name.

    Args:
        model_name: Value of the label model_name.
        shows_engines: Metrics of engines are in the server's registry. Else the engines serve them themselves, or the
            server that owns them does.

    Attributes:
        totals: Counts for clients that ask the server itself.
        registry: Registry that the server serves.
        engines: Metrics of the engines, in `registry` only if `shows_engines`.
        make: Makes the families, and has them by name.
        tenants: Metrics by tenant.
    """

    def __init__(self, model_name: str, shows_engines: bool = True) -> None:
        self.totals = Totals()
        disable_created_metrics()  # they would double the count of series
        self.registry = CollectorRegistry()
        register_process(self.registry, model_name)
        self.engines = EngineMetrics(self.registry if shows_engines else CollectorRegistry(), model_name)
        self.make = make = Families(self.registry, model_name)
        self._wanted = make.gauge("quire_replicas_wanted", "Wanted number of engines; 0 where another server decides.")
        self._scalings = make.counters(
            "quire_replica_scalings",
            "Engines that were started or ended for the load, by direction.",
            "direction",
            SCALINGS,
        )
        self._failures = make.counter("quire_engine_failures", "Engines that died, or were lost, unasked.")
        self._moves = make.counters(
            "quire_requests_moved", "Requests that left an engine before they had ended, by cause.", "cause", MOVES
        )
        self._resubmissions = make.counter(
            "quire_request_resubmissions", "Times that a request was submitted anew, to another engine."
        )
        self._resubmitted_tokens = make.counter(
            "quire_resubmitted_tokens",
            "Tokens of requests submitted to another engine, which computes their KV or has it transferred.",
        )
        self.prompt_tokens = make.counter("quire_prompt_tokens", "Prompt tokens of requests that left the queue.")
        self.cached_tokens = make.counter("quire_prompt_tokens_cached", "Prompt tokens that the prefix cache had.")
        self._generation_tokens = make.counter("quire_generation_tokens", "Output tokens delivered to request streams.")
        self._ttft = make.histogram("quire_time_to_first_token_seconds", "Time from arrival to the first token.", TTFT)
        self._itl = make.counted("quire_inter_token_latency_seconds", "Time between two tokens of a sequence.", ITL)
        self._queue_time = make.histogram(
            "quire_request_queue_time_seconds", "Time from arrival to a batch row.", PHASES
        )
        self._prefill_time = make.histogram(
            "quire_request_prefill_time_seconds", "Time from a batch row to the first token.", PHASES
        )
        self._decode_time = make.histogram(
            "quire_request_decode_time_seconds",
            "Time from the first token to the last, of requests that ended as asked.",
            PHASES,
        )
        self._token_time = make.histogram(
            "quire_request_time_per_output_token_seconds",
            "Mean time between two tokens, of requests that ended as asked and have two.",
            ITL,
        )
        self.request_time = make.histogram("quire_e2e_request_latency_seconds", "Time from arrival to the end.", WHOLE)
        self._prompt_lengths = make.histogram("quire_request_prompt_tokens", "Prompt length.", TOKENS)
        self._denied = make.counters("quire_calls_denied", "Calls refused for their token.", "reason", DENIALS)
        self.output_tokens = make.histogram(
            "quire_request_generation_tokens", "Output length of sequences that ended as asked.", TOKENS
        )
        self._outcomes = make.counters("quire_requests", "Requests by outcome.", "outcome", OUTCOMES)
        self.tenants = TenantMetrics(make)

    def request_started(self, prompt_tokens: int, cached: int, waited: float) -> None:
        self.prompt_tokens.inc(prompt_tokens)
        self.cached_tokens.inc(cached)
        self.totals.prompt_tokens += prompt_tokens
        self.totals.cached_tokens += cached
        self._prompt_lengths.observe(prompt_tokens)
        self._queue_time.observe(waited)

    def tokens(
        self, count: int, firsts: Sequence[float], gaps: Mapping[float, int], prefills: Sequence[float] = ()
    ) -> None:
        """Counts output tokens, and observes their times.

        Args:
            count: Count of tokens.
            firsts: Seconds from each request's arrival to its first token.
            gaps: Count of tokens by the seconds since the token before in their sequence.
            prefills: Seconds from each request's admission to its first token.
        """
        self._generation_tokens.inc(count)
        self.totals.generation_tokens += count
        for seconds in firsts:
            self._ttft.observe(seconds)
            self.totals.first_tokens += 1
            self.totals.first_token_seconds += seconds
        for seconds in prefills:
            self._prefill_time.observe(seconds)
        for seconds, times in gaps.items():
            self._itl.observe(seconds, times)

    def request_ended(self, outcome: str, tenant: str) -> None:
        """Counts a request that has ended. An outcome that is none of OUTCOMES is a bug, and counts as internal."""
        known = outcome if outcome in self._outcomes else "internal"
        self._outcomes[known].inc()
        self.tenants.request_ended(tenant, known)
        self.totals.ended_requests += 1

    def call_denied(self, reason: str) -> None:
        self._denied[reason].inc()

    def decoded(self, seconds: float, each: float | None) -> None:
        """Observes the decode time of a request that ended as asked.

        Args:
            seconds: Seconds from its first token to its last.
            each: Mean seconds between two tokens of a sequence; None where no sequence has two.
        """
        self._decode_time.observe(seconds)
        if each is not None:
            self._token_time.observe(each)

    def requests_moved(self, count: int, cause: str) -> None:
        """Counts requests that left an engine before their end, by a cause of MOVES."""
        self._moves[cause].inc(count)

    def resubmitted(self, tokens: int) -> None:
        """Counts a request that is submitted to another engine, and its tokens so far."""
        self._resubmissions.inc()
        self._resubmitted_tokens.inc(tokens)

    def engine_attached(self, pages: int, engine: int = 0, page_size: int = 16) -> None:
        """Counts the start of an engine, as `EngineMetrics.attached`."""
        self.engines.attached(pages, engine, page_size)

    def engine_gone(self, engine: int) -> None:
        """Takes an engine out of the gauges; the counters keep its counts."""
        self.engines.gone(engine)

    def engine_failed(self) -> None:
        """Counts an engine that died, or was lost, unasked."""
        self._failures.inc()

    def replicas_wanted(self, count: int) -> None:
        self._wanted.set(count)

    def scaled(self, direction: str, count: int = 1) -> None:
        """Counts engines that were started or ended for the load, by a direction of SCALINGS."""
        self._scalings[direction].inc(count)

    def watch(
        self,
        replicas: Callable[[], float],
        drained: Callable[[], float],
        stalled: Callable[[], float],
        live: Callable[[], float],
        parked: Callable[[], float],
    ) -> None:
        """Adds gauges of the frontend, which are read at each scrape, on another thread.

        Args:
            replicas: Returns the count of engines that take requests.
            drained: Returns the count of drained engines.
            stalled: Returns the longest seconds that an engine has had work and no progress.
            live: Returns the count of live requests.
            parked: Returns the count of live requests that wait for an engine.
        """
        make = self.make
        make.gauge("quire_replicas", "Engines that requests can go to.", replicas)
        make.gauge("quire_replicas_drained", "Engines that an operator keeps requests from.", drained)
        make.gauge("quire_engine_stalled_seconds", "Longest time that an engine has had work and no progress.", stalled)
        make.gauge("quire_num_requests_live", "Requests that were taken and have not ended.", live)
        make.gauge("quire_num_requests_parked", "Live requests that wait for an engine.", parked)
