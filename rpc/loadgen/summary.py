"""Computes the figures of a load, and warnings about them."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from rpc.loadgen.drive import LoadRun
from rpc.loadgen.machine import Effort
from rpc.loadgen.observation import INTERRUPTED, Observation, Targets

POINTS = (50, 90, 95, 99)
BUSY = 0.8  # share of a core above which the generator's one thread limits the load
UNEXPLAINED = 0.05  # share of prompt tokens; a warning follows if more unexpectedly came from the prefix cache
TEXT_SPREAD = 1.25  # largest ratio of the token counts of two texts with equal numbers of words
MANY_STOPPED = 0.05  # share of the requests that did not fail
LATE, LATE_SHARE = 0.005, 0.1  # seconds, and share of the median TTFT: a warning follows if lags exceed both


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Returns mean, `POINTS` and maximum in milliseconds, interpolated linearly like numpy; {} without values."""
    if not len(values):
        return {}
    points = dict(zip((f"p{p}" for p in POINTS), np.percentile(values, POINTS), strict=True))
    figures = {"mean": np.mean(values), **points, "max": np.max(values)}
    return {name: round(1000 * float(value), 3) for name, value in figures.items()}


def summary(run: LoadRun, targets: Targets) -> dict[str, Any]:
    """Returns the figures of a load.

    Rates cover the time from the start of the load to the end of its last request. Latencies are of requests that did
    not fail; TTFT and E2E begin when a request was due (`rpc.loadgen.drive`).

    Interrupted requests count in `interrupted`, TTFT and ITL alone. For a server that falls behind, the requests that
    had ended were the quick ones. Goodput is None without a target.
    """
    seen = [one for one in run.seen if one.ended and one.code != INTERRUPTED]
    done = [one for one in seen if one.complete]
    seconds = max(run.end - run.begin, 1e-9)
    met = sum(targets.met_by(one) for one in seen)
    timed = [one for one in run.seen if one.timed]
    warm = [one for one in run.warm_up if one.code != INTERRUPTED]
    cached, notes = _cached(done, run.exact)
    lengths = _lengths(done)
    if lengths is not None and lengths["counted"] is None and not run.exact:
        notes.append(
            "the server does not count the prompts' tokens: input tokens are as asked for, text is about as long"
        )
    return {
        "requests": len(seen),
        "ok": len(done),
        "failed": len(seen) - len(done),
        "short": sum(one.short for one in done),
        "interrupted": len(run.seen) - len(seen),
        "errors": _errors(seen),
        "error_rate": round((len(seen) - len(done)) / max(1, len(seen)), 6),
        "seconds": round(seconds, 3),
        "requests_per_second": round(len(done) / seconds, 3),
        "input_tokens": sum(_prompt(one) for one in done),
        "output_tokens": sum(one.tokens for one in done),
        "input_tokens_per_second": round(sum(_prompt(one) for one in done) / seconds, 2),
        "output_tokens_per_second": round(sum(one.tokens for one in done) / seconds, 2),
        "messages": sum(len(one.times) for one in done),
        "input_tokens_asked": sum(one.asked[0] for one in done),
        "prompt_lengths": lengths,
        **cached,
        "ttft_ms": percentiles([one.first for one in timed if one.first is not None]),
        "itl_ms": percentiles(_all_gaps(timed)),
        "tpot_ms": percentiles([one.other for one in done if one.other is not None]),
        "e2e_ms": percentiles([one.whole for one in done]),
        "goodput": round(met / max(1, len(seen)), 6) if targets.any else None,
        "goodput_per_second": round(met / seconds, 3) if targets.any else None,
        "warm_up": {"requests": len(warm), "errors": _errors(warm)},
        "warnings": [*_not_warm(warm), *notes, *_interrupted(timed)],
        "generator": generator(run, seen),
    }


def generator(run: LoadRun, seen: Sequence[Observation]) -> dict[str, Any]:
    """Returns the generator's lateness in sending, its event loop's lateness, and its use of CPU."""
    effort, tokens = run.effort, sum(one.tokens for one in run.seen)
    late = [one.sent - one.due for one in seen if one.sent] if run.scheduled else []
    return {
        "sent_late_ms": percentiles(late),
        "loop_late_ms": percentiles(effort.lags),
        "loop_busy": round(effort.loop / max(effort.seconds, 1e-9), 4),
        "cpu_cores": round(effort.cpu / max(effort.seconds, 1e-9), 4),
        "cpu_us_per_token": round(1e6 * effort.cpu / max(1, tokens), 2),
        "warnings": warnings(effort, late, [one.first for one in seen if one.first is not None]),
    }


def warnings(effort: Effort, late: Sequence[float], firsts: Sequence[float]) -> list[str]:
    """Returns reasons why the figures may be the generator's or its machine's, and not the server's."""
    found = []
    busy = effort.loop / max(effort.seconds, 1e-9)
    if busy > BUSY:
        found.append(f"the generator's thread was busy {busy:.0%} of the time: it limits what is measured")
    bound = max(LATE, LATE_SHARE * float(np.median(firsts)) if len(firsts) else 0.0)
    for what, lags in (("sent requests", late), ("read answers", effort.lags)):
        if len(lags) and (p99 := float(np.percentile(lags, 99))) > bound:
            found.append(f"the generator {what} up to {1000 * p99:.1f} ms late (p99), which the latencies have in them")
    return found


def _lengths(done: Sequence[Observation]) -> dict[str, Any] | None:
    """Returns tokens of prompts, requested and by the server's count; None without requests.

    The server's count is None if it does not count.
    """

    def spread(tokens: Sequence[int]) -> dict[str, float] | None:
        if not tokens:
            return None
        return {"mean": round(sum(tokens) / len(tokens), 1), "min": min(tokens), "max": max(tokens)}

    counted = [one.prompt_tokens for one in done if one.prompt_tokens]
    return {"asked": spread([one.asked[0] for one in done]), "counted": spread(counted)} if done else None


def _cached(done: Sequence[Observation], exact: bool) -> tuple[dict[str, Any], list[str]]:
    """Returns the prompt tokens from the server's prefix cache, None if it does not count, and warnings about them."""

    def shared(one: Observation) -> float:
        """Returns the largest number of tokens in common; for text it is an estimate with a margin."""
        return one.shared if exact else TEXT_SPREAD * one.shared * _prompt(one) / max(1, one.asked[0])

    known = [(one.cached_tokens, shared(one), _prompt(one)) for one in done if one.cached_tokens is not None]
    if not known:
        return {"cached_input_tokens": None, "cached_share": None}, []
    cached, tokens = sum(one[0] for one in known), max(1, sum(one[2] for one in known))
    unexplained = sum(max(0.0, had - repeated) for had, repeated, _ in known) / tokens
    notes = []
    if unexplained > UNEXPLAINED:
        notes.append(
            f"{cached / tokens:.0%} of the prompts' tokens came from the server's prefix cache, {unexplained:.0%} more "
            "than this load repeats: it has seen these prompts before, and first tokens are sooner than for new ones"
        )
    return {"cached_input_tokens": cached, "cached_share": round(cached / tokens, 6)}, notes


def _not_warm(seen: Sequence[Observation]) -> list[str]:
    failed = [one for one in seen if not one.complete]
    if not failed:
        return []
    first = f"{failed[0].code}: {failed[0].message}"
    return [f"{len(failed)} of {len(seen)} requests of the warm-up failed, so it may not be warm: {first}"]


def _interrupted(seen: Sequence[Observation]) -> list[str]:
    """Returns warnings that latencies of a stopped load are too low. `seen` are requests that did not fail."""
    stopped = [one for one in seen if one.code == INTERRUPTED]
    if len(stopped) <= MANY_STOPPED * len(seen):
        return []
    notes = [
        f"{len(stopped)} of {len(seen)} requests that did not fail were still running as the load was stopped: "
        "TPOT and E2E are of those that had ended, the quick ones, and too low; "
        "tokens a second leave out the others', too"
    ]
    waiting = sum(not one.times for one in stopped)
    if waiting > MANY_STOPPED * len(seen):
        notes.append(f"{waiting} of {len(seen)} requests had no token yet, so TTFT is too low as well")
    return notes


def _prompt(seen: Observation) -> int:
    return seen.prompt_tokens or seen.asked[0]


def _all_gaps(seen: Sequence[Observation]) -> Sequence[float]:
    return np.concatenate([one.gaps() for one in seen]) if seen else []  # type: ignore[return-value]


def _errors(seen: Sequence[Observation]) -> dict[str, dict[str, Any]]:
    """Returns count and first message of each error code."""
    counts = Counter(one.code for one in seen if one.code)
    first = {one.code: one.message for one in reversed(seen) if one.code}
    return {code: {"count": count, "message": first[code]} for code, count in counts.most_common()}
