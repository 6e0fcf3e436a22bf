"""Each frontend gets exactly its own share of an engine's steps, in order, however many of them are put together."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cache_manager.ledger import Holder, PageMap
from rpc.link import coalesce
from rpc.link.coalesce import LOCAL, LOCAL_BITS
from scheduler import events
from scheduler.events import (
    AdminAnswer,
    End,
    EndReason,
    EngineStats,
    KVEvents,
    Logprobs,
    PromptPart,
    Start,
    StepOutputs,
)
from tests.support.examples import examples
from tests.support.links import step_outputs, unlike
from tests.support.planted import plant

FRONTENDS = (1, 2, 3)
GLOBAL = st.builds(
    lambda frontend, local: frontend << LOCAL_BITS | local,
    st.sampled_from(FRONTENDS),
    st.sampled_from((0, 1, 2, LOCAL)) | st.integers(0, LOCAL),
)
STEPS = st.lists(step_outputs(GLOBAL, most_tokens=6), min_size=1, max_size=5)
few = settings(max_examples=examples(80), deadline=None)

Token = tuple[object, ...]


def tokens_of(step: StepOutputs, widths: Sequence[int]) -> list[Token]:
    """Each token with all that belongs to it, to the last bit; of its alternatives the first ones of its width."""
    logprobs = step.logprobs
    parts = (step.attempts, step.indices, step.positions, step.tokens)
    numbers = zip(*(part.tolist() for part in parts), strict=True)
    return [
        (
            *number,
            logprobs.chosen[i].tobytes(),
            int(logprobs.rank[i]),
            logprobs.top_ids[i, : widths[i]].tobytes(),
            logprobs.top[i, : widths[i]].tobytes(),
        )
        for i, number in enumerate(numbers)
    ]


def width_of(step: StepOutputs) -> int:
    return step.logprobs.top.shape[1]


def expected(steps: Sequence[StepOutputs], frontend: int) -> tuple[list[Token], list[int]]:
    """The frontend's tokens, and how many alternatives each of them has."""
    everything = [(t, width_of(s)) for s in steps for t in tokens_of(s, [width_of(s)] * len(s.attempts))]
    mine = [(t, width) for t, width in everything if t[0] >> LOCAL_BITS == frontend]
    return [(t[0] - (frontend << LOCAL_BITS), *t[1:]) for t, _ in mine], [width for _, width in mine]


def expected_starts(steps: Sequence[StepOutputs], frontend: int) -> list[Start]:
    """The frontend's, aged by what the steps after theirs took."""
    starts: list[Start] = []
    for step in steps:
        starts = [replace(start, age=start.age + sum(step.step_seconds)) for start in starts]
        mine = [start for start in step.starts if start.attempt >> LOCAL_BITS == frontend]
        starts += [replace(start, attempt=start.attempt - (frontend << LOCAL_BITS)) for start in mine]
    return starts


def check_shares(steps: Sequence[StepOutputs]) -> None:
    delivered = 0
    for frontend in FRONTENDS:
        share = coalesce.merged([coalesce.owned_by(step, frontend) for step in steps])
        tokens, widths = expected(steps, frontend)
        assert len(share.attempts) == len(tokens)
        assert tokens_of(share, widths) == tokens
        check_padding(share.logprobs, widths)
        for name in ("ends", "prompt_parts"):
            mine = [item for s in steps for item in getattr(s, name) if item.attempt >> LOCAL_BITS == frontend]
            local = tuple(replace(item, attempt=item.attempt - (frontend << LOCAL_BITS)) for item in mine)
            assert unlike(local, getattr(share, name)) == []
        check_starts(share.starts, expected_starts(steps, frontend))
        assert unlike(tuple(t for s in steps for t in s.step_seconds), share.step_seconds) == []
        assert unlike(tuple(t for s in steps for t in s.overheads), share.overheads) == []
        assert share.stats == steps[-1].stats
        dtypes = [a.dtype for a in (share.attempts, share.positions, share.tokens, share.logprobs.top)]
        assert dtypes == [np.int64, np.int32, np.int32, np.float32]
        delivered += len(share.attempts)
    assert delivered == sum(len(step.attempts) for step in steps)


def check_starts(got: Sequence[Start], expected: Sequence[Start]) -> None:
    """An age is a sum, and its last bit depends on the order in which it was added."""
    assert [(s.attempt, s.cached) for s in got] == [(s.attempt, s.cached) for s in expected]
    assert [s.age for s in got] == pytest.approx([s.age for s in expected], nan_ok=True)


def check_padding(logprobs: Logprobs, widths: list[int]) -> None:
    for i, width in enumerate(widths):
        assert (logprobs.top_ids[i, width:] == -1).all()
        assert (logprobs.top[i, width:] == -np.inf).all()


@few
@given(STEPS)
def test_each_frontend_gets_its_own_share_in_order(steps: list[StepOutputs]) -> None:
    check_shares(steps)


def started(age: float, seconds: float) -> StepOutputs:
    """A step of one start and no token."""
    return replace(events.nothing(EngineStats()), starts=(Start(1, age, 0),), step_seconds=(seconds,))


@few
@example([started(2.0**53, 0.0), started(0.0, 1.0), started(0.0, 1.0)], 2)  # 2**53 + 1 is 2**53, and 2**53 + 2 is not
@given(STEPS, st.integers(0, 5))
def test_putting_together_in_two_goes_is_the_same(steps: list[StepOutputs], cut: int) -> None:
    parts = [part for part in (steps[:cut], steps[cut:]) if part]
    at_once, in_two = coalesce.merged(steps), coalesce.merged([coalesce.merged(part) for part in parts])
    check_starts(in_two.starts, at_once.starts)
    assert unlike(replace(at_once, starts=()), replace(in_two, starts=())) == []


@few
@given(step_outputs())
def test_one_step_stays_what_it_is(step: StepOutputs) -> None:
    assert coalesce.merged([step]) is step


@few
@given(step_outputs(GLOBAL))
def test_what_is_taken_apart_is_not_changed(step: StepOutputs) -> None:
    before = replace(step, attempts=step.attempts.copy(), tokens=step.tokens.copy())
    for frontend in FRONTENDS:
        coalesce.owned_by(step, frontend)
    assert unlike(before, step) == []


def planted_step(k: int, number: int, *owners: int) -> StepOutputs:
    """A token of each owner's attempts 5 and 6, with k alternatives."""
    attempts = np.array([owner << LOCAL_BITS | local for owner in owners for local in (5, 6)], np.int64)
    n = len(attempts)
    made = np.arange(n * k, dtype=np.int32).reshape(n, k) + number
    return StepOutputs(
        attempts,
        np.arange(n, dtype=np.int32) + 2,
        np.full(n, number, np.int32),
        np.arange(n, dtype=np.int32),
        Logprobs(np.arange(n, dtype=np.float32), np.ones(n, np.int32), made, -made.astype(np.float32)),
        tuple(Start(attempt, 0.5) for attempt in attempts.tolist()),
        tuple(End(attempt, EndReason.STOP) for attempt in attempts.tolist()[::2]),
        EngineStats(steps=number),
        (float(number),),
        prompt_parts=tuple(PromptPart(attempt, number, prompt_logprobs(number)) for attempt in attempts.tolist()[1::2]),
        overheads=(number / 100,),
    )


def prompt_logprobs(number: int) -> Logprobs:
    """Makes logprobs of two tokens of a prompt, with an alternative each."""
    ids = np.full((2, 1), number, np.int32)
    return Logprobs(np.zeros(2, np.float32), np.ones(2, np.int32), ids, ids.astype(np.float32))


EXAMPLE = [planted_step(1, 1, 1, 2), planted_step(3, 2, 2, 1), planted_step(0, 3, 3, 1)]


def padded_in_front(array: np.ndarray, width: int, fill: float) -> np.ndarray:
    return np.pad(array, ((0, 0), (width - array.shape[1], 0)), constant_values=fill)


def padded_with_zeros(array: np.ndarray, width: int, fill: float) -> np.ndarray:
    return np.pad(array, ((0, 0), (0, width - array.shape[1])))


real_merged, real_owned = coalesce.merged, coalesce.owned_by
FAULTS: dict[str, tuple[str, object]] = {
    "alternatives are padded in front": ("_widened", padded_in_front),
    "alternatives are padded with token 0": ("_widened", padded_with_zeros),
    "attempts keep the engine's numbers": ("LOCAL", -1),
    "each frontend gets the first frontend's share": ("owned_by", lambda step, _: real_owned(step, 1)),
    "each frontend gets every end": ("_local", lambda items, _: items),
    "prompts' logprobs are lost": ("owned_by", lambda step, n: replace(real_owned(step, n), prompt_parts=())),
    "each frontend gets all prompts' logprobs": (
        "owned_by",
        lambda step, n: replace(real_owned(step, n), prompt_parts=step.prompt_parts),
    ),
    "steps come in reverse": ("merged", lambda steps: real_merged(steps[::-1])),
    "indices are lost": ("merged", lambda steps: replace(real_merged(steps), indices=real_merged(steps).positions * 0)),
    "only the last step is sent": ("merged", lambda steps: steps[-1]),
    "stats are the first step's": ("merged", lambda steps: replace(real_merged(steps), stats=steps[0].stats)),
    "starts do not age": (
        "merged",
        lambda steps: replace(real_merged(steps), starts=tuple(start for step in steps for start in step.starts)),
    ),
    "overheads are dropped": ("merged", lambda steps: replace(real_merged(steps), overheads=())),
    "step times are dropped": ("merged", lambda steps: replace(real_merged(steps), step_seconds=())),
}


def test_the_example_is_right_without_a_fault() -> None:
    check_shares(EXAMPLE)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    name, replacement = FAULTS[fault]
    plant(monkeypatch, events if name == "_widened" else coalesce, name, lambda _: replacement)
    with pytest.raises((AssertionError, IndexError)):
        check_shares(EXAMPLE)


def test_share_of_a_frontend_without_a_token_is_empty_and_has_the_stats() -> None:
    share = coalesce.owned_by(planted_step(2, 4, 1), 2)
    assert len(share.attempts) == len(share.starts) == len(share.ends) == 0
    assert (share.stats.steps, share.step_seconds) == (4, (4.0,))


def test_an_answer_names_no_attempts_of_other_frontends() -> None:
    pages = np.array([3], np.int32)
    holders = (
        Holder(False, 1 << LOCAL_BITS | 5, pages),
        Holder(False, 2 << LOCAL_BITS | 5, pages),
        Holder(True, 9, pages),
    )
    page_map = PageMap(16, np.zeros(1, np.uint8), np.zeros(1, np.int32), holders)
    step = replace(planted_step(0, 1, 1), answers=(AdminAnswer(1 << LOCAL_BITS | 7, 0, page_map),))
    (answer,) = coalesce.owned_by(step, 1).answers
    assert answer.page_map is not None
    assert [holder.number for holder in answer.page_map.holders] == [5, -1, 9]


def test_answers_and_kv_events_of_each_step_are_kept() -> None:
    steps = [
        replace(planted_step(0, n, 1), answers=(AdminAnswer(n),), kv_events=(KVEvents(b"", bytes([n]) * 8),))
        for n in (1, 2, 3)
    ]
    both = coalesce.merged(steps)
    assert [answer.ticket for answer in both.answers] == [1, 2, 3]
    assert [change.added[0] for change in both.kv_events] == [1, 2, 3]
