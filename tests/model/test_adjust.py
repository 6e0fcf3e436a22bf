"""What is done to logits before a draw, against plain statements of vLLM's definitions."""

import math
from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from model.sampling import adjust
from model.sampling.sampler import SamplingRows, sample
from scheduler.controls import NO_ADJUSTMENTS, Adjustments, Controls
from scheduler.step import NO_TOKEN, Join

VOCABULARY = 12
GREEDY = Controls(0.0, 1.0, 0, 0.0, 0, 3)


@dataclass(frozen=True)
class Asking:
    """A row and the tokens that it has."""

    wanted: Adjustments
    prompt: tuple[int, ...]
    output: tuple[int, ...]
    logits: tuple[float, ...]


def plain(row: Asking) -> NDArray[np.float64]:
    """Token by token, in the order that vLLM's documents state."""
    wanted, logits = row.wanted, np.array(row.logits, np.float32).astype(np.float64)
    counts = Counter(row.output)
    for token in range(len(logits)):
        if wanted.allowed and token not in wanted.allowed:
            logits[token] = -math.inf
        if any((*row.output, token)[-len(word) :] == word for word in wanted.banned):
            logits[token] = -math.inf
        if len(row.output) < wanted.min_tokens and token in wanted.not_yet:
            logits[token] = -math.inf
        logits[token] += dict(wanted.bias).get(token, 0.0)
        if token in row.prompt or token in row.output:
            logits[token] *= 1 / wanted.repetition if logits[token] > 0 else wanted.repetition
        logits[token] -= wanted.frequency * counts[token] + wanted.presence * (counts[token] > 0)
    return logits


TOKENS = st.integers(0, VOCABULARY - 1)
IDS = st.lists(TOKENS, unique=True, max_size=4).map(tuple)
WANTED = st.builds(
    Adjustments,
    allowed=st.just(()) | st.lists(TOKENS, unique=True, min_size=1, max_size=9).map(tuple),
    banned=st.lists(st.lists(TOKENS, min_size=1, max_size=3).map(tuple), unique=True, max_size=4).map(tuple),
    not_yet=IDS,
    min_tokens=st.integers(0, 6),
    bias=st.dictionaries(TOKENS, st.sampled_from([-100.0, -1.5, 0.25, 100.0]), max_size=4).map(
        lambda biases: tuple(biases.items())
    ),
    repetition=st.sampled_from([1.0, 0.5, 1.25, 3.0]),
    frequency=st.sampled_from([0.0, -2.0, 0.5]),
    presence=st.sampled_from([0.0, 2.0, -0.5]),
)
ROWS = st.builds(
    Asking,
    st.just(NO_ADJUSTMENTS) | WANTED,
    st.lists(TOKENS, min_size=1, max_size=5).map(tuple),
    st.lists(TOKENS, max_size=8).map(tuple),
    st.lists(st.floats(-9, 9, width=32), min_size=VOCABULARY, max_size=VOCABULARY).map(tuple),
)


def joined(rows: list[Asking], drawn: int = 0) -> SamplingRows:
    """Each in its row; the last `drawn` tokens were drawn after the join."""
    controls = SamplingRows(len(rows))
    for number, row in enumerate(rows):
        known = row.output[: max(0, len(row.output) - drawn)]
        tokens = np.array((*row.prompt, *known), np.int32)
        controls.join(Join(number, tokens, len(row.prompt), replace(GREEDY, adjustments=row.wanted)))
        for token in row.output[len(known) :]:
            controls.adjusted.drew(np.array([number]), np.array([token], np.int32))
    return controls


def adjusted(rows: list[Asking], drawn: int = 0) -> NDArray[np.float32]:
    logits = torch.tensor([row.logits for row in rows], dtype=torch.float32)
    before = logits.clone()
    positions = np.array([len(row.output) for row in rows])
    found = joined(rows, drawn).adjusted.apply(logits, np.arange(len(rows)), positions)
    assert torch.equal(logits, before), "the raw logits are left as they are: logprobs come from them"
    return found.numpy()


def check(rows: list[Asking], drawn: int = 0) -> None:
    for found, row in zip(adjusted(rows, drawn), rows, strict=True):
        np.testing.assert_allclose(found, plain(row), rtol=2e-6, atol=1e-5)


@settings(max_examples=300, deadline=None)
@given(st.lists(ROWS, min_size=1, max_size=4), st.integers(0, 9))
def test_each_row_is_adjusted_as_it_asks(rows: list[Asking], drawn: int) -> None:
    """Whether the tokens came with the join (after a preemption) or were drawn since makes no difference."""
    check(rows, drawn)


@settings(max_examples=100, deadline=None)
@given(st.lists(ROWS, min_size=2, max_size=4))
def test_a_row_does_not_depend_on_the_others(rows: list[Asking]) -> None:
    together = adjusted(rows)
    for number, row in enumerate(rows):
        assert adjusted([row])[0].tobytes() == together[number].tobytes()


@settings(max_examples=200, deadline=None)
@given(st.lists(ROWS, min_size=1, max_size=4))
def test_the_draw_is_of_what_is_left(rows: list[Asking]) -> None:
    logits = torch.tensor([row.logits for row in rows], dtype=torch.float32)
    positions = np.array([len(row.output) for row in rows])
    drawn = sample(logits, joined(rows), np.arange(len(rows)), positions)
    for i, row in enumerate(rows):
        left = adjusted([row])[0]
        if np.isneginf(left).all():
            assert drawn.tokens[i] == NO_TOKEN
            continue
        token = int(left.argmax())
        assert drawn.tokens[i] == token
        raw = np.array(row.logits)
        expected = raw[token] - math.log(np.exp(raw - raw.max()).sum()) - raw.max()
        assert drawn.logprobs.chosen[i] == pytest.approx(expected, abs=1e-5), "of the raw logits"
        assert drawn.logprobs.rank[i] == 1 + (raw.astype(np.float32) > np.float32(raw[token])).sum()


def test_rows_that_ask_for_nothing_pay_nothing() -> None:
    logits = torch.zeros(3, VOCABULARY)
    assert SamplingRows(3).adjusted.apply(logits, np.arange(3), np.zeros(3, np.int64)) is logits


def test_a_row_asks_for_nothing_that_an_earlier_one_asked() -> None:
    controls = SamplingRows(1)
    for wanted in (Adjustments(allowed=(1,)), NO_ADJUSTMENTS):
        controls.join(Join(0, np.zeros(1, np.int32), 1, replace(GREEDY, adjustments=wanted)))
    assert not controls.adjusted.asking.any()


def test_sampled_tokens_follow_the_adjusted_distribution() -> None:
    """Chi-square over 20,000 seeds: a bias and a penalty shift the odds by exactly their amounts."""
    wanted = Adjustments(bias=((2, 1.0),), presence=0.7, allowed=(0, 1, 2, 3))
    row = Asking(wanted, (5,), (1,), tuple(np.linspace(1.0, -1.0, VOCABULARY).tolist()))
    n = 20_000
    controls = SamplingRows(n)
    for seed in range(n):
        drawing = Controls(1.0, 1.0, 0, 0.0, seed, adjustments=wanted)
        controls.join(Join(seed, np.array([5, 1], np.int32), 1, drawing))
    logits = torch.tensor([row.logits], dtype=torch.float32).expand(n, -1)
    drawn = sample(logits, controls, np.arange(n), np.ones(n, np.int64)).tokens
    odds = np.exp(plain(row))
    expected = n * odds / odds.sum()
    found = np.bincount(drawn, minlength=VOCABULARY)
    assert found[4:].sum() == 0
    assert ((found[:4] - expected[:4]) ** 2 / expected[:4]).sum() < 16.27, "3 degrees of freedom, 1 in 1,000"


SOME = Asking(
    Adjustments(
        allowed=tuple(range(9)),
        banned=((3, 4), (7,), (5, 6)),
        not_yet=(0,),
        min_tokens=9,
        bias=((1, 2.0),),
        repetition=1.5,
        frequency=0.5,
        presence=0.25,
    ),
    prompt=(2, 5),
    output=(1, 1, 3),
    logits=tuple(np.linspace(3.0, -3.0, VOCABULARY).tolist()),
)


def drop(name: str, value: object):  # type: ignore[no-untyped-def]
    """Rows forget this part of what is asked."""
    init = adjust._Row.__init__

    def forget(self, wanted, *rest):  # type: ignore[no-untyped-def]
        init(self, replace(wanted, **{name: value}), *rest)

    return (adjust._Row, "__init__", forget)


FAULTS = {
    **{
        f"{name} is left out": drop(name, getattr(NO_ADJUSTMENTS, name))
        for name in ("allowed", "banned", "not_yet", "min_tokens", "bias", "repetition", "frequency", "presence")
    },
    "tokens that are drawn are not counted": (adjust._Row, "_note", lambda self, token: None),
    "a word is banned from its beginning": (adjust._Row, "_ends_with", lambda self, tokens: True),
    "all penalties are left out": (adjust, "_penalise", lambda logits, which, asking: None),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_harness_catches(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check([SOME])
    monkeypatch.setattr(*FAULTS[fault])
    with pytest.raises(AssertionError):
        check([SOME])
