"""Changes of logits processors to logits before a draw, against plain statements of vLLM's definitions."""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from model.errors import RequestFault
from model.sampling import processor_rows
from model.sampling.builtin_processors import BUILT_IN, BannedSequences, LogitBias, MinTokens, Penalties
from model.sampling.logits_processors import LogitsProcessor, NamedFactory
from model.sampling.processor_rows import KINDS, ProcessorRows
from model.sampling.sampler import SamplingRows, sample
from model.sampling.sources import ProcessorSources
from scheduler.controls import NO_LOGITS_PARAMS, Controls, LogitsParams
from scheduler.step import NO_TOKEN, Join
from tests.support.examples import examples
from tests.support.planted import plant

VOCABULARY = 12
GREEDY = Controls(0.0, 1.0, 0, 0.0, 0, 3)


@pytest.fixture(autouse=True, scope="module")
def _deterministic() -> Iterator[None]:
    """An operation raises that may compute another thing each time on a GPU."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@dataclass(frozen=True)
class Asking:
    """A row and the tokens that it has."""

    wanted: LogitsParams
    prompt: tuple[int, ...]
    output: tuple[int, ...]
    logits: tuple[float, ...]


class LastByPosition:
    """A user's own: the last token drawn, -1 for none, gets the position as its logit."""

    def __init__(self, prompt: NDArray[np.int32]) -> None:
        self.last, self.drawn = -1, 0

    def drew(self, token: int) -> None:
        self.last, self.drawn = token, self.drawn + 1

    def apply(self, logits: Tensor, position: int) -> Tensor:
        assert position == self.drawn
        logits[self.last] = position
        return logits


def plain(row: Asking, users: bool = False) -> NDArray[np.float64]:
    """Token by token, in the order that vLLM's documents state; a user's own come last."""
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
    if users:
        logits[row.output[-1] if row.output else -1] = len(row.output)
    return logits


TOKENS = st.integers(0, VOCABULARY - 1)
IDS = st.lists(TOKENS, unique=True, max_size=4).map(tuple)
WANTED = st.builds(
    LogitsParams,
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
    st.just(NO_LOGITS_PARAMS) | WANTED,
    st.lists(TOKENS, min_size=1, max_size=5).map(tuple),
    st.lists(TOKENS, max_size=8).map(tuple),
    st.lists(st.floats(-9, 9, width=32), min_size=VOCABULARY, max_size=VOCABULARY).map(tuple),
)


def joined(rows: list[Asking], drawn: int = 0, users: bool = False) -> SamplingRows:
    """Each in its row; the last `drawn` tokens were drawn after the join."""
    controls = SamplingRows(len(rows), ProcessorSources([NamedFactory.of(LastByPosition)] if users else ()))
    for number, row in enumerate(rows):
        known = row.output[: max(0, len(row.output) - drawn)]
        tokens = np.array((*row.prompt, *known), np.int32)
        controls.join(Join(number, tokens, len(row.prompt), replace(GREEDY, logits_params=row.wanted)))
        for token in row.output[len(known) :]:
            controls.processors.drew(np.array([number]), np.array([token], np.int32))
    return controls


def adjusted(rows: list[Asking], drawn: int = 0, users: bool = False) -> NDArray[np.float32]:
    logits = torch.tensor([row.logits for row in rows], dtype=torch.float32)
    before = logits.clone()
    positions = np.array([len(row.output) for row in rows])
    found = joined(rows, drawn, users).processors.apply(logits, np.arange(len(rows)), positions)
    assert torch.equal(logits, before), "the raw logits are left as they are: logprobs come from them"
    return found.numpy()


def check(rows: list[Asking], drawn: int = 0, users: bool = False) -> None:
    for found, row in zip(adjusted(rows, drawn, users), rows, strict=True):
        np.testing.assert_allclose(found, plain(row, users), rtol=2e-6, atol=1e-5)


@settings(max_examples=examples(300), deadline=None)
@given(st.lists(ROWS, min_size=1, max_size=4), st.integers(0, 9), st.booleans())
def test_each_row_is_adjusted_as_it_asks(rows: list[Asking], drawn: int, users: bool) -> None:
    """Whether the tokens came with the join (after a preemption) or were drawn since makes no difference."""
    check(rows, drawn, users)


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(ROWS, min_size=1, max_size=3))
def test_a_built_in_one_is_a_logits_processor_as_a_users(rows: list[Asking]) -> None:
    """One after the other, each on the logits of one sequence, to the bit."""
    for found, row in zip(adjusted(rows), rows, strict=True):
        logits, prompt = torch.tensor(row.logits, dtype=torch.float32), np.array(row.prompt, np.int32)
        for kind in BUILT_IN:
            processor: LogitsProcessor | None = kind.of(row.wanted, prompt)
            if processor is not None:
                for token in row.output:
                    processor.drew(token)
                logits = processor.apply(logits, len(row.output))
        assert logits.numpy().tobytes() == found.tobytes()


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(ROWS, min_size=2, max_size=4))
def test_a_row_does_not_depend_on_the_others(rows: list[Asking]) -> None:
    together = adjusted(rows)
    for number, row in enumerate(rows):
        assert adjusted([row])[0].tobytes() == together[number].tobytes()


@settings(max_examples=examples(200), deadline=None)
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
    assert SamplingRows(3).processors.apply(logits, np.arange(3), np.zeros(3, np.int64)) is logits


def test_rows_without_processors_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """The only one of many rows that has processors is looked at."""
    looked: list[list[int]] = []
    monkeypatch.setattr(LogitBias, "apply_rows", lambda logits, rows, processors, positions: looked.append(list(rows)))
    rows = [replace(SOME, wanted=NO_LOGITS_PARAMS)] * 5 + [replace(SOME, wanted=LogitsParams(bias=((1, 2.0),)))]
    controls = joined(rows)
    assert controls.processors.asking.tolist() == [False] * 5 + [True]
    controls.processors.apply(torch.zeros(6, VOCABULARY), np.arange(6), np.full(6, 3))
    assert looked == [[5]]


def test_a_row_asks_for_nothing_that_an_earlier_one_asked() -> None:
    controls = SamplingRows(1)
    for wanted in (LogitsParams(allowed=(1,)), NO_LOGITS_PARAMS):
        controls.join(Join(0, np.zeros(1, np.int32), 1, replace(GREEDY, logits_params=wanted)))
    assert not controls.processors.asking.any()


def test_sampled_tokens_follow_the_adjusted_distribution() -> None:
    """Chi-square over 20,000 seeds: a bias and a penalty shift the odds by exactly their amounts."""
    wanted = LogitsParams(bias=((2, 1.0),), presence=0.7, allowed=(0, 1, 2, 3))
    row = Asking(wanted, (5,), (1,), tuple(np.linspace(1.0, -1.0, VOCABULARY).tolist()))
    n = 20_000
    controls = SamplingRows(n)
    for seed in range(n):
        drawing = Controls(1.0, 1.0, 0, 0.0, seed, logits_params=wanted)
        controls.join(Join(seed, np.array([5, 1], np.int32), 1, drawing))
    logits = torch.tensor([row.logits], dtype=torch.float32).expand(n, -1)
    drawn = sample(logits, controls, np.arange(n), np.ones(n, np.int64)).tokens
    odds = np.exp(plain(row))
    expected = n * odds / odds.sum()
    found = np.bincount(drawn, minlength=VOCABULARY)
    assert found[4:].sum() == 0
    assert ((found[:4] - expected[:4]) ** 2 / expected[:4]).sum() < 16.27, "3 degrees of freedom, 1 in 1,000"


SOME = Asking(
    LogitsParams(
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
    join = ProcessorRows.join

    def forget(self, one: Join) -> None:  # type: ignore[no-untyped-def]
        params = replace(one.controls.logits_params, **{name: value})  # type: ignore[arg-type]
        join(self, replace(one, controls=replace(one.controls, logits_params=params)))

    return (ProcessorRows, "join", forget)


def twice(self, row: int, token: int) -> None:  # type: ignore[no-untyped-def]
    for _, processor in self._rows[row]:
        processor.drew(token)
        processor.drew(token)


def swapped(first: type, second: type):  # type: ignore[no-untyped-def]
    """Two kinds in each other's places."""
    other = {first: second, second: first}
    return (processor_rows, "KINDS", tuple(other.get(kind, kind) for kind in KINDS))


FAULTS = {
    **{
        f"{name} is left out": drop(name, getattr(NO_LOGITS_PARAMS, name))
        for name in ("allowed", "banned", "not_yet", "min_tokens", "bias", "repetition", "frequency", "presence")
    },
    "penalties apply before the bias": swapped(LogitBias, Penalties),
    "a user's own apply before the penalties": swapped(Penalties, KINDS[-1]),
    "min_tokens forbids one token too many": (
        MinTokens, "forbidden", lambda self, position: self._ends if position <= self._least else (),
    ),
    "min_tokens forbids one token too few": (
        MinTokens, "forbidden", lambda self, position: self._ends if position < self._least - 1 else (),
    ),
    "tokens that are drawn are not counted": (Penalties, "drew", lambda self, token: None),
    "processors are told each token twice": (ProcessorRows, "_drew", twice),
    "a word is banned from its beginning": (
        BannedSequences, "forbidden", lambda self: self._always + [end for _, end in self._longer],
    ),
    "all penalties are left out": (Penalties, "apply_rows", lambda logits, rows, processors, positions: None),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_harness_catches(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the last draw that min_tokens concerns, or in the first that it does not."""
    rows = [replace(SOME, wanted=replace(SOME.wanted, min_tokens=least)) for least in (3, 4)]
    check(rows, users=True)
    target, name, wrong = FAULTS[fault]
    plant(monkeypatch, target, name, lambda _: wrong)
    with pytest.raises((AssertionError, RequestFault)):
        check(rows, users=True)
