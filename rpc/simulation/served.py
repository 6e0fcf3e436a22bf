"""How simulated requests were served: times and counts, and the figures that are made of them."""

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from scheduler.events import EndReason, StepOutputs
from scheduler.preemption_cause import PreemptionCause

Floats = NDArray[np.float64]
Requests = NDArray[np.int64]
WHOLE = (EndReason.STOP, EndReason.LENGTH, EndReason.FINISHED)  # the last one by a stop string
REFUSED = (EndReason.QUEUE_FULL, EndReason.QUEUE_TIMEOUT)
PERCENTILES = (50, 90, 99)
NOTHING: Floats = np.empty(0)


@dataclass(frozen=True, slots=True)
class LatencyTargets:
    """Latencies that a request should keep, in seconds; None for no target.

    Attributes:
        ttft: From its arrival to its first token.
        itl: Mean time between two tokens after that.
    """

    ttft: float | None = None
    itl: float | None = None


class Ledger:
    """Books how requests are served, from the outputs of engines.

    Attributes:
        came: [n] float64. Seconds at which each request came; NaN for one that has not.
        first: [n] float64. When its first token came; NaN without one.
        last: [n] float64. When its last token came.
        tokens: [n] int64. Output tokens of all sequences.
        sequences: [n] int64. Sequences.
        reasons: Why requests ended, by number.
        cut: Requests whose client left before their end.
    """

    def __init__(self, count: int) -> None:
        """count: requests."""
        self.came, self.first, self.last = (np.full(count, np.nan) for _ in range(3))
        self.tokens, self.sequences = np.zeros(count, np.int64), np.ones(count, np.int64)
        self.cut: set[int] = set()
        self.reasons: dict[int, EndReason] = {}
        self._owner = np.arange(count)  # request of each attempt, and room for more attempts
        self._attempts = count
        self._gaps: list[Floats] = []
        self._attempts_before, self._indices_before = np.empty(0, np.int64), np.empty(0, np.int32)
        self._counted_before: tuple[Requests, Requests | int] = self._attempts_before, 0

    def again(self, request: int) -> int:
        """Opens another attempt of a request. Returns its number."""
        attempt, self._attempts = self._attempts, self._attempts + 1
        if attempt == len(self._owner):  # doubled, so that many failovers do not copy all attempts each
            self._owner = np.concatenate((self._owner, np.zeros(max(attempt, 1), self._owner.dtype)))
        self._owner[attempt] = request
        return attempt

    def request_of(self, attempt: int) -> int:
        return int(self._owner[attempt])

    def requests_of(self, attempts: Requests) -> Requests:
        """Returns the requests of attempts, [n] int64 both."""
        return attempts if self._attempts == len(self.came) else self._owner[attempts]  # first ones: equal numbers

    def arrive(self, request: int, now: float, sequences: int = 1) -> None:
        self.came[request], self.sequences[request] = now, sequences

    def take(self, outputs: StepOutputs, now: float) -> tuple[Floats, Floats]:
        """Books a step.

        Args:
            outputs: Of the step.
            now: Seconds at which they came.

        Returns:
            Seconds to the first token of requests that had none before, and seconds since the token before of others.
        """
        firsts = gaps = NOTHING
        if len(outputs.attempts):
            before = self._counted_before[0]  # these have had a token
            requests, counts = self._counted(outputs)
            gaps = now - self.last[requests]
            if requests is not before and np.count_nonzero(fresh := np.isnan(gaps)):
                self.first[requests[fresh]] = now
                firsts, gaps = now - self.came[requests[fresh]], gaps[~fresh]
            self._gaps.append(gaps)
            self.last[requests] = now
            self.tokens[requests] += counts
        for end in outputs.ends:
            self.reasons[self.request_of(end.attempt)] = end.reason
        return firsts, gaps

    def _counted(self, outputs: StepOutputs) -> tuple[Requests, Requests | int]:
        """Returns the requests that have tokens in a step, and how many tokens each."""
        # Steps of rows in lockstep have the very arrays of the step before.
        if outputs.attempts is not self._attempts_before or outputs.indices is not self._indices_before:
            self._attempts_before, self._indices_before = outputs.attempts, outputs.indices
            each = self.requests_of(outputs.attempts)
            self._counted_before = np.unique(each, return_counts=True) if _repeats(outputs) else (each, 1)
        return self._counted_before

    @property
    def ttft(self) -> Floats:
        """[n] Seconds to the first token of each request; NaN without one."""
        return self.first - self.came

    @property
    def tpot(self) -> Floats:
        """[n] Mean seconds of a token after the first one, of each request; NaN without such a token."""
        others = self.others
        found = np.full(len(others), np.nan)
        np.divide(self.last - self.first, others, out=found, where=others > 0)
        return found

    @property
    def others(self) -> Floats:
        """[n] Mean number of tokens after the first one, of the sequences of each request."""
        return np.maximum(self.tokens / self.sequences - 1, 0.0)

    @property
    def gaps(self) -> Floats:
        """Seconds between two tokens, of all requests. Tokens that came together count as one."""
        return np.concatenate(self._gaps) if self._gaps else np.empty(0)


def _repeats(outputs: StepOutputs) -> bool:
    """Whether a request may have several tokens in a step: of several sequences, or by drafts or jumps."""
    attempts = outputs.attempts.tolist()
    return any(outputs.indices.tolist()) or len(set(attempts)) < len(attempts)


@dataclass(frozen=True, slots=True, eq=False)
class Serving:
    """How a time was served.

    Attributes:
        ledger: Of its requests.
        seconds: From the first arrival to the end of the last request.
        preemptions: Sequences that lost their rows.
        hits: Prompt tokens that were in a prefix cache, of `queries` that were looked up.
        queries: See `hits`.
        busy: Seconds in which a step ran, the sum over engines.
        engine_seconds: Seconds that engines were there, the sum over engines.
        preempted: Preemptions by cause.
    """

    ledger: Ledger
    seconds: float
    preemptions: int
    hits: int
    queries: int
    busy: float
    engine_seconds: float
    preempted: Mapping[PreemptionCause, int]

    @property
    def firsts(self) -> Floats:
        """Seconds to the first token, of requests that had one."""
        return _known(self.ledger.ttft)

    @property
    def others(self) -> Floats:
        """Mean seconds of a token after the first one, of requests that had several tokens."""
        return _known(self.ledger.tpot)

    def met(self, targets: LatencyTargets) -> float:
        """Returns the share of requests that were served to their end within targets, of all that came.

        One that its client left before the end was not.
        """
        ledger = self.ledger
        whole = np.zeros(len(ledger.came), np.bool_)
        whole[[request for request, reason in ledger.reasons.items() if reason in WHOLE]] = True
        whole[list(ledger.cut)] = False
        if targets.ttft is not None:
            whole &= ledger.ttft <= targets.ttft
        if targets.itl is not None:
            whole &= ledger.last - ledger.first <= targets.itl * ledger.others + 1e-9
        return float(whole.mean()) if len(whole) else 0.0

    def digest(self) -> str:
        """Returns a hash of all times and counts: equal simulations have equal ones."""
        ledger, found = self.ledger, hashlib.sha256()
        for times in (ledger.came, ledger.first, ledger.last, ledger.tokens, ledger.gaps):
            found.update(times.tobytes())
        found.update(repr(sorted((request, reason.value) for request, reason in ledger.reasons.items())).encode())
        found.update(repr((self.preemptions, self.hits, self.queries)).encode())
        return found.hexdigest()[:16]

    def figures(self) -> dict[str, float]:
        """Returns figures by name."""
        ledger, reasons = self.ledger, list(self.ledger.reasons.values())
        whole = [one for one, reason in ledger.reasons.items() if reason in WHOLE and one not in ledger.cut]
        lasted = (ledger.last - ledger.came)[whole]
        tokens = int(ledger.tokens.sum())
        return {
            "requests": len(ledger.came),
            "refused": sum(reason in REFUSED for reason in reasons),
            "failed": sum(reason not in (*REFUSED, *WHOLE) for reason in reasons),
            "left before their end": len(ledger.cut),
            "seconds": self.seconds,
            "busy part": self.busy / self.engine_seconds if self.engine_seconds else 0.0,
            "tokens a second": tokens / self.seconds if self.seconds else 0.0,
            **percentiles("first token, s", ledger.ttft),
            **percentiles("a token after it, s", ledger.tpot),
            **percentiles("between two tokens, s", ledger.gaps),
            **percentiles("whole request, s", lasted),
            "preemptions": self.preemptions,
            **{f"preemptions, {cause}": self.preempted[cause] for cause in PreemptionCause},
            "prefix hits": self.hits / self.queries if self.queries else 0.0,
        }


def percentiles(name: str, values: Floats, wanted: Sequence[int] = PERCENTILES) -> dict[str, float]:
    """Returns percentiles by name, of the values that are known; NaN where none is."""
    known = _known(values)
    found = np.percentile(known, wanted).tolist() if len(known) else [math.nan] * len(wanted)
    return {f"{name}, p{percent}": value for percent, value in zip(wanted, found, strict=True)}


def _known(values: Floats) -> Floats:
    return values[~np.isnan(values)]


def finite(figures: Mapping[str, float]) -> dict[str, float | None]:
    """Returns figures for `json`, which has no NaN."""
    return {name: None if math.isnan(value) else value for name, value in figures.items()}


def summed(values: Iterable[tuple[int, int, int]]) -> tuple[int, int, int]:
    """Returns the sums of three counts."""
    found = np.array([*values], np.int64).reshape(-1, 3).sum(axis=0)
    return int(found[0]), int(found[1]), int(found[2])
