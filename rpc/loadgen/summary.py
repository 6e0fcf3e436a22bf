"""The figures of a load."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from rpc.loadgen.drive import Run
from rpc.loadgen.machine import Effort
from rpc.loadgen.seen import INTERRUPTED, Seen, Targets

POINTS = (50, 90, 95, 99)
BUSY = 0.8  # of a core, from which the generator's one thread is what limits
UNEXPLAINED = 0.05  # of the prompts' tokens: more that came from the prefix cache and should not is too much
TEXT_SPREAD = 1.25  # tokens of some text, by those of other text of as many words
MANY_STOPPED = 0.05  # of the requests that did not fail
LATE, LATE_SHARE = 0.005, 0.1  # seconds, and of the median TTFT: later than both is too late


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """In milliseconds: the mean, POINTS and the largest, between values linearly as numpy does; {} of no values."""
    if not len(values):
        return {}
    points = dict(zip((f"p{p}" for p in POINTS), np.percentile(values, POINTS), strict=True))
    figures = {"mean": np.mean(values), **points, "max": np.max(values)}
    return {name: round(1000 * float(value), 3) for name, value in figures.items()}


def summary(run: Run, targets: Targets) -> dict[str, Any]:
    """Rates are of the time from the start of the load to the end of its last request. Latencies are of requests that
    ended well; TTFT and E2E from when a request was due (`rpc.loadgen.drive`). Requests that a person interrupted count
    in `interrupted`, in TTFT and in ITL, and nowhere else: of a server that falls behind, those that ended were quick.
    Goodput is None without a target: it would be no more than what ended well.
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


def generator(run: Run, seen: Sequence[Seen]) -> dict[str, Any]:
    """How late it sent what had a time, how late its event loop was, and how busy it was."""
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
    """Why the figures may be those of the generator, or of its machine, and not the server's."""
    found = []
    busy = effort.loop / max(effort.seconds, 1e-9)
    if busy > BUSY:
        found.append(f"the generator's thread was busy {busy:.0%} of the time: it limits what is measured")
    bound = max(LATE, LATE_SHARE * float(np.median(firsts)) if len(firsts) else 0.0)
    for what, lags in (("sent requests", late), ("read answers", effort.lags)):
        if len(lags) and (p99 := float(np.percentile(lags, 99))) > bound:
            found.append(f"the generator {what} up to {1000 * p99:.1f} ms late (p99), which the latencies have in them")
    return found


def _lengths(done: Sequence[Seen]) -> dict[str, Any] | None:
    """Tokens of a prompt, as asked for and as the server counts them, None where it does not; None of no requests."""

    def spread(tokens: Sequence[int]) -> dict[str, float] | None:
        if not tokens:
            return None
        return {"mean": round(sum(tokens) / len(tokens), 1), "min": min(tokens), "max": max(tokens)}

    counted = [one.prompt_tokens for one in done if one.prompt_tokens]
    return {"asked": spread([one.asked[0] for one in done]), "counted": spread(counted)} if done else None


def _cached(done: Sequence[Seen], exact: bool) -> tuple[dict[str, Any], list[str]]:
    """What the server's prefix cache had of the prompts, None where it does not say, and warnings about it."""

    def shared(one: Seen) -> float:
        """Text that requests have in common may have some more tokens than it should."""
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


def _not_warm(seen: Sequence[Seen]) -> list[str]:
    failed = [one for one in seen if not one.complete]
    if not failed:
        return []
    first = f"{failed[0].code}: {failed[0].message}"
    return [f"{len(failed)} of {len(seen)} requests of the warm-up failed, so it may not be warm: {first}"]


def _interrupted(seen: Sequence[Seen]) -> list[str]:
    """Why latencies of a load that a person stopped are too low. seen: those that did not fail."""
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


def _prompt(seen: Seen) -> int:
    return seen.prompt_tokens or seen.asked[0]


def _all_gaps(seen: Sequence[Seen]) -> Sequence[float]:
    return np.concatenate([one.gaps() for one in seen]) if seen else []  # type: ignore[return-value]


def _errors(seen: Sequence[Seen]) -> dict[str, dict[str, Any]]:
    """By code: how many, and what the first one said."""
    counts = Counter(one.code for one in seen if one.code)
    first = {one.code: one.message for one in reversed(seen) if one.code}
    return {code: {"count": count, "message": first[code]} for code, count in counts.most_common()}
