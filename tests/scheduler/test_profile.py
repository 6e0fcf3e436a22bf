"""Profiles keep what they were made of, and another file is refused with a reason."""

import json
import math
import re
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from scheduler.profile import Profile, read_profile, shipped_profiles
from scheduler.step_costs import StepCosts, StepWork
from scheduler.step_time import StepTime

COSTS = StepCosts(0.01, 0.001, 1e-6, 1e-4, 1e-9)
SLICES = np.array([[0, 100, 1], [1, 7, 1], [2, 32, 64], [3, 0, 10]], np.int32)


def test_a_shipped_profile_is_read_as_it_was_written() -> None:
    assert shipped_profiles()
    for name in shipped_profiles():
        profile = read_profile(name)
        assert (profile.name, bool(profile.source)) == (name, True)
        assert Profile.from_json(json.loads(json.dumps(profile.to_json()))) == profile
        assert profile.longest <= profile.context


def test_seconds_of_a_step_are_the_sum_of_its_parts() -> None:
    """Against the formula, spelled out."""
    seen = 101 + 8
    pairs = sum(range(33, 33 + 64)) + sum(range(1, 11))
    expected = 0.01 + 2 * 0.001 + seen * 1e-6 + 74 * 1e-4 + pairs * 1e-9
    assert COSTS.seconds(SLICES) == pytest.approx(expected)
    assert COSTS.faster(2.0).seconds(SLICES) == pytest.approx(expected / 2)


def test_learned_costs_predict_as_what_learned_them() -> None:
    rng, time = np.random.default_rng(1), StepTime(1.0)
    for _ in range(50):
        starts, counts = rng.integers(0, 500, 12), np.where(rng.random(12) < 0.7, 1, rng.integers(2, 90, 12))
        slices = np.stack((np.arange(12), starts, counts), 1).astype(np.int32)[: rng.integers(1, 12)]
        time.observe(slices, COSTS.seconds(slices))
    assert time.costs().seconds(SLICES) == pytest.approx(time.expected(StepWork.of(SLICES)))
    for name, value in asdict(time.costs()).items():
        assert value == pytest.approx(getattr(COSTS, name), rel=1e-3)


CURVE = ((2, 0.01), (8, 0.04), (9, 0.03), (16, 0.1))


@pytest.mark.parametrize(("tokens", "expected"), [(1, 0.01), (16, 0.1), (17, 0.11), (100, 0.1 + 84 * 0.01)])
def test_a_curve_goes_on_as_at_its_ends(tokens: int, expected: float) -> None:
    assert replace(COSTS, curve=CURVE).seconds_of(StepWork(prefill=tokens)) == pytest.approx(
        COSTS.seconds_of(StepWork(prefill=tokens)) + expected
    )


def test_a_curve_is_linear_between_its_points() -> None:
    """Against numpy's interpolation; decodes count as prefilled tokens do."""
    alone = StepCosts(0.0, 0.0, 0.0, 0.0, 0.0, CURVE)
    places, heights = zip(*CURVE, strict=True)
    for tokens in range(1, 17):
        expected = np.interp(tokens, places, heights)
        assert alone.seconds_of(StepWork(tokens // 2, prefill=tokens - tokens // 2)) == pytest.approx(expected)
        assert alone.faster(2.0).seconds_of(StepWork(tokens)) == pytest.approx(expected / 2)
    falling = StepCosts(0.0, 0.0, 0.0, 0.0, 0.0, ((1, 0.02), (2, 0.01)))
    assert falling.seconds_of(StepWork(9)) == 0.0, "no step takes less than no time"


@pytest.mark.parametrize(
    "curve", [((1, 0.1),), ((1, 0.1), (1, 0.2)), ((0, 0.1), (1, 0.2)), ((1, -0.1), (2, 0.1)), ((1, 0.1), (2, math.nan))]
)
def test_another_curve_is_refused(curve: tuple[tuple[int, float], ...]) -> None:
    with pytest.raises(ValueError, match=r"costs\.curve"):
        replace(COSTS, curve=curve)


@pytest.mark.parametrize("curve", [7, [7], [[1, 0.1, 2], [2, 0.1]], [[1.5, 0.1], [2, 0.1]], [[1, "a"], [2, 0.1]]])
def test_another_curve_in_a_file_is_refused(curve: object) -> None:
    values = asdict(COSTS) | {"curve": curve}
    with pytest.raises(ValueError, match=r"costs\.curve must be a list of at most 64 pairs: tokens, seconds"):
        StepCosts.from_json(values)


def test_costs_are_read_as_they_were_written() -> None:
    for costs in (COSTS, replace(COSTS, curve=CURVE)):
        assert StepCosts.from_json(json.loads(json.dumps(asdict(costs)))) == costs
    del (older := asdict(COSTS))["curve"]
    assert StepCosts.from_json(older) == COSTS


@pytest.mark.parametrize("change", [{"fixed": -1.0}, {"decode": float("nan")}, {"pair": float("inf")}])
def test_costs_are_times(change: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"costs.{next(iter(change))}"):
        replace(COSTS, **change)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "line 1"),
        ("[]", "no profile"),
        ('{"format": "quire-profile", "version": 2}', "no profile"),
        ('{"format": "quire-profile", "version": 1}', "KeyError: 'name'"),
    ],
)
def test_another_file_is_refused_by_name(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=said) as raised:
        read_profile(path)
    assert str(path) in str(raised.value)


def test_an_unknown_name_is_told_the_known_ones() -> None:
    with pytest.raises(FileNotFoundError, match=r"llama-3\.1-8b-h100"):
        read_profile("nothing")


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("eviction",), "best"), (("pages",), "400"), (("pages",), 2.5), (("pages",), True), (("pages",), None),
        (("pages",), 10**12), (("host_slots",), 2.5), (("host_slots",), 10**12), (("prefix_cache",), "no"),
        (("settings", "max_sequences"), 2.5), (("settings", "max_batched_tokens"), 10**18),
        (("settings", "max_batched_tokens"), float("nan")), (("settings", "prefill_chunk"), 10**18),
        (("settings", "other"), 1), (("queue", "requests"), float("nan")), (("queue", "wait"), "long"),
        (("layout", "element_bytes"), -2), (("layout", "page_size"), "16"),
    ],
)  # fmt: skip
def test_each_field_of_the_blueprint_is_checked(tmp_path: Path, place: tuple[str, ...], value: object) -> None:
    values = read_profile("llama-3.1-8b-h100").to_json()
    part = values["blueprint"]
    for name in place[:-1]:
        part = part[name]
    part[place[-1]] = value
    path = tmp_path / "other.json"
    path.write_text(json.dumps(values))
    with pytest.raises(ValueError, match=re.escape(str(path))):
        read_profile(path)
