"""Profiles keep what they were made of, and another file is refused with a reason."""

import json
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
