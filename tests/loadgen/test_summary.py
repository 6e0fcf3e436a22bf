"""Figures of a load, against plain statements of what they are."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpc.loadgen.drive import LoadRun
from rpc.loadgen.machine import Effort
from rpc.loadgen.observation import INTERRUPTED, Observation, Targets
from rpc.loadgen.report import rows
from rpc.loadgen.summary import percentiles, summary


def seen(
    due: float, times: list[float], code: str = "", tokens: int | None = None, sent: float | None = None
) -> Observation:
    made = len(times) if tokens is None else tokens
    end = times[-1] if times else due
    return Observation(due, (10, made), due if sent is None else sent, times, made, 0, end, code)


@given(st.lists(st.floats(0, 1000), min_size=1, max_size=50))
def test_percentiles_are_numpys(values: list[float]) -> None:
    found = percentiles(values)
    for name, value in {"mean": np.mean(values), "max": max(values)}.items():
        assert found[name] == pytest.approx(1000 * value, abs=1e-3)
    for p in (50, 90, 95, 99):
        assert found[f"p{p}"] == pytest.approx(1000 * np.percentile(values, p), abs=1e-3)


def test_no_values_have_no_percentiles() -> None:
    assert percentiles([]) == {}


@given(st.lists(st.integers(1, 4), min_size=1, max_size=12))
def test_gaps_are_those_of_tokens_that_come_with_their_messages(sizes: list[int]) -> None:
    times = np.cumsum(np.arange(1, len(sizes) + 1) / 10).tolist()
    arrived = np.repeat(times, sizes)  # of each token
    one = seen(0.0, times, tokens=sum(sizes))
    assert sorted(one.gaps()) == pytest.approx(sorted(np.diff(arrived)))
    if sum(sizes) > 1:
        assert one.other == pytest.approx(np.mean(np.diff(arrived)))


def test_targets_are_met_by_whole_requests() -> None:
    targets = Targets(first=1.0, other=0.1)
    assert targets.met_by(seen(5.0, [6.0, 6.1, 6.15, 6.2])), "0.1 s a token on average"
    assert targets.met_by(seen(5.0, [5.5]))
    assert not targets.met_by(seen(5.0, [6.01, 6.02])), "the first one is late"
    assert not targets.met_by(seen(5.0, [5.5, 5.7])), "the other one is late"
    assert not targets.met_by(seen(5.0, [5.1, 5.2], "UNAVAILABLE"))
    assert not targets.met_by(seen(5.0, []))
    assert Targets(first=200.0).met_by(seen(5.0, [99.0, 199.0])), "the other tokens may take any time"


def test_goodput_is_of_targets_and_there_is_none_without_them() -> None:
    run = LoadRun(False, [seen(5.0, [6.0, 6.1])], 0.0, 10.0)
    without, with_one = summary(run, Targets()), summary(run, Targets(other=0.2))
    assert (without["goodput"], without["goodput_per_second"]) == (None, None)
    assert (with_one["goodput"], with_one["goodput_per_second"]) == (1, 0.1)
    assert "Goodput" not in dict(rows(without))
    assert dict(rows(with_one))["Goodput"] == "100.0%, 0.1 requests/s"


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_targets_that_are_none_are_refused(value: float) -> None:
    with pytest.raises(ValueError, match="--ttft-target is "):
        Targets(first=value)
    with pytest.raises(ValueError, match="--tpot-target is "):
        Targets(other=value)


def test_all_requests_are_accounted_for() -> None:
    run = LoadRun(scheduled=True, begin=100.0, end=110.0, effort=Effort([0.001] * 10, cpu=1.0, loop=0.5, seconds=10.0))
    run.seen = [
        seen(100.0, [101.0, 101.5, 102.0], sent=100.25),
        seen(103.0, [103.5, 104.0], tokens=4),
        seen(104.0, [], "UNAVAILABLE"),
        seen(104.5, [105.0], "UNAVAILABLE"),
        seen(105.0, [106.0, 106.25], INTERRUPTED),
        seen(105.0, [], INTERRUPTED),
    ]
    run.seen[1].asked, run.seen[1].prompt_tokens = (10, 5), 12
    result = summary(run, Targets(first=0.6))
    counts = ("requests", "ok", "failed", "short", "interrupted", "input_tokens", "output_tokens", "messages")
    assert [result[name] for name in counts] == [4, 2, 2, 1, 2, 22, 7, 5]
    assert result["error_rate"] == 0.5
    assert {code: error["count"] for code, error in result["errors"].items()} == {"UNAVAILABLE": 2}
    assert (result["requests_per_second"], result["output_tokens_per_second"]) == (0.2, 0.7)
    assert (result["goodput"], result["goodput_per_second"]) == (0.25, 0.1)
    assert (result["ttft_ms"]["max"], result["ttft_ms"]["mean"]) == (1000, 833.333), "interrupted, too"
    assert result["itl_ms"]["mean"] == pytest.approx((500 + 500 + 500 + 0 + 0 + 250) / 6, abs=0.001)
    assert result["e2e_ms"]["max"] == 2000
    assert result["tpot_ms"]["max"] == 500
    assert result["generator"]["sent_late_ms"]["max"] == 250
    assert result["generator"]["cpu_us_per_token"] == pytest.approx(1e6 / 10, abs=0.01)


def test_interrupting_a_server_that_is_behind_does_not_make_it_look_quick() -> None:
    """The requests that were still running were the slow ones."""

    def of(quick: int, slow: int, waiting: int, refused: int = 0) -> dict:
        run = LoadRun(scheduled=True, begin=0.0, end=60.0, stopped=True)
        run.seen += [seen(0.0, [0.1, 0.2]) for _ in range(quick)]
        run.seen += [seen(0.0, [30.0, 33.0], INTERRUPTED) for _ in range(slow)]
        run.seen += [seen(0.0, [], INTERRUPTED) for _ in range(waiting)]
        run.seen += [seen(0.0, [], "RESOURCE_EXHAUSTED") for _ in range(refused)]
        for one in run.seen:
            one.ended = one.ended or 60.0
        return summary(run, Targets())

    result = of(quick=10, slow=30, waiting=20, refused=5000)
    assert (result["ok"], result["interrupted"]) == (10, 50)
    assert (result["ttft_ms"]["p50"], result["itl_ms"]["p50"]) == (30_000, 3_000)
    assert result["e2e_ms"]["max"] == 200, "of those that ended"
    whole, first = result["warnings"]
    assert "50 of 60 requests that did not fail were still running" in whole
    assert "TPOT and E2E are of those that had ended" in whole
    assert "too low" in whole
    assert "tokens a second leave out the others'" in whole
    assert "20 of 60 requests had no token yet" in first
    assert "TTFT" in first
    assert [len(of(*many)["warnings"]) for many in ((60, 0, 0), (96, 4, 0), (96, 2, 2), (80, 20, 0))] == [0, 0, 0, 1]


def cached(prompt: int, cached_tokens: int | None, shared: int = 0) -> Observation:
    one = seen(0.0, [0.1])
    one.prompt_tokens, one.cached_tokens, one.shared = prompt, cached_tokens, shared
    return one


def test_what_came_from_the_prefix_cache_is_said() -> None:
    def of(*requests: Observation) -> tuple[object, object, list[str]]:
        result = summary(LoadRun(False, list(requests), 0.0, 1.0), Targets())
        return result["cached_input_tokens"], result["cached_share"], result["warnings"]

    assert of(cached(100, None)) == (None, None, []), "the server does not say"
    assert of(cached(100, 0), cached(100, 0)) == (0, 0.0, [])
    assert of(cached(100, 48, shared=50), cached(100, 0, shared=50)) == (48, 0.24, []), "the load repeats that much"
    assert of(cached(100, 4), cached(100, None)) == (4, 0.04, []), "of those of which the server says it"
    text = LoadRun(False, [cached(125, 70, shared=5)], 0.0, 1.0, exact=False)
    text.seen[0].asked = (10, 1)
    assert summary(text, Targets())["warnings"] == [], "half of the prompt is shared, of about as many tokens as asked"
    tokens, share, (warning,) = of(cached(100, 80, shared=20), cached(100, 0, shared=100))
    assert (tokens, share) == (80, 0.4)
    assert "40% of the prompts' tokens came from the server's prefix cache" in warning
    assert "30% more than" in warning


def test_lengths_of_prompts_are_the_servers_counts_or_said_to_be_unknown() -> None:
    def of(counted: tuple[int, ...], exact: bool) -> tuple[dict, str, list[str]]:
        run = LoadRun(False, [cached(count, None) for count in counted], 0.0, 1.0, exact=exact)
        result = summary(run, Targets())
        return result["prompt_lengths"], dict(rows(result))["Tokens of a prompt"], result["warnings"]

    asked = {"mean": 10.0, "min": 10, "max": 10}
    assert of((10, 10), True) == ({"asked": asked, "counted": asked}, "10", [])
    counted = {"mean": 12.5, "min": 9, "max": 16}
    assert of((9, 16), False) == ({"asked": asked, "counted": counted}, "12.5 (9 to 16), asked for 10", [])
    assert of((0, 0), True) == ({"asked": asked, "counted": None}, "not counted by the server, asked for 10", [])
    lengths, row, (warning,) = of((0, 0), False)
    assert (lengths["counted"], row) == (None, "not counted by the server, asked for 10")
    assert "the server does not count the prompts' tokens" in warning
    nothing = summary(LoadRun(False, [], 0.0, 1.0), Targets())
    assert (nothing["prompt_lengths"], "Tokens of a prompt" in dict(rows(nothing))) == (None, False)


def test_a_generator_that_limits_says_so() -> None:
    def said(effort: Effort, sent: float = 0.0) -> list[str]:
        run = LoadRun(True, [seen(0.0, [0.1], sent=sent)], 0.0, 1.0, effort)
        return summary(run, Targets())["generator"]["warnings"]

    assert said(Effort([0.001], 1.0, 0.7, 1.0)) == []
    assert "busy 90%" in said(Effort([0.001], 1.0, 0.9, 1.0))[0]
    assert "sent requests up to 50.0 ms late" in said(Effort([0.001], 0.1, 0.1, 1.0), sent=0.05)[0]
    assert "read answers up to 30.0 ms late" in said(Effort([0.03], 0.1, 0.1, 1.0))[0]
    assert said(Effort([0.009], 0.1, 0.1, 1.0)) == [], "a tenth of the first token's time is small"
