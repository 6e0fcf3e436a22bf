"""The bound on reasoning against its plain statement, and with the other controls of a request."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model.sampling.builtin_processors import BUILT_IN, LATEST, ReasoningLimit
from model.sampling.processor_rows import ProcessorRows
from scheduler.controls import Controls, LogitsParams
from scheduler.step import Join
from tests.support.planted import plant

VOCABULARY = 8
NO_PROMPT = np.zeros(0, np.int32)


def reasoning_of(tokens: list[int], begin: list[int], end: list[int], reasons: bool, again: bool) -> int:
    """Tokens of all reasoning in an output, those of its end not counted."""
    total, start = 0, 0
    for at in range(1, len(tokens) + 1):
        marker = end if reasons else begin
        if at - start >= len(marker) and tokens[at - len(marker) : at] == marker:
            if reasons:
                total += at - start - len(marker)
            elif not again and at > len(marker) + LATEST:
                continue  # text about reasoning
            reasons, start = not reasons, at
    return total + len(tokens) - start if reasons else total


MARKERS = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=3)


@settings(max_examples=100)  # with fewer a planted fault may not show
@given(MARKERS, MARKERS, st.integers(0, 6), st.booleans(), st.booleans(), st.integers(0, 2**32 - 1))
def test_it_ends_in_time(begin: list[int], end: list[int], most: int, reasons: bool, again: bool, seed: int) -> None:
    chance, tokens = np.random.default_rng(seed), list[int]()
    params = LogitsParams(
        reasoning_tokens=most, reasoning_begin=tuple(begin), reasoning_end=tuple(end), reasons=reasons,
        reasons_again=again,
    )  # fmt: skip
    limit = ReasoningLimit.of(params, NO_PROMPT)
    assert limit is not None
    for position in range(60):
        logits = limit.apply(torch.zeros(VOCABULARY), position)
        allowed = torch.nonzero(logits > -torch.inf).flatten().tolist()
        assert len(allowed) in (1, VOCABULARY)
        tokens.append(int(chance.choice(allowed)))
        limit.drew(tokens[-1])
    assert reasoning_of(tokens, begin, end, reasons, again) <= most + len(end) - 1


def test_its_end_is_drawn_though_another_control_forbids_it() -> None:
    rows = ProcessorRows(2)
    for row, bound in enumerate((2, -1)):
        params = LogitsParams(
            allowed=(3, 4), reasoning_tokens=bound, reasoning_begin=(1,), reasoning_end=(2,), reasons=True
        )
        controls = Controls(1.0, 1.0, 0, 0.0, 0, logits_params=params)
        rows.join(Join(row=row, controls=controls, tokens=np.array([3, 4], np.int32), prompt_count=0))
    changed = rows.apply(torch.zeros(2, VOCABULARY), np.array([0, 1]), np.array([2, 2]))
    assert torch.nonzero(changed[0] > -torch.inf).flatten().tolist() == [2]
    assert torch.nonzero(changed[1] > -torch.inf).flatten().tolist() == [3, 4]


def test_a_constraint_may_forbid_its_end_for_a_while() -> None:
    """Within a character of several tokens: the character is completed, and then the end is drawn."""
    params = LogitsParams(
        reasoning_tokens=0, reasoning_begin=(1,), reasoning_end=(2,), reasons=True, grammar="some"
    )  # fmt: skip
    limit = ReasoningLimit.of(params, NO_PROMPT)
    assert limit is not None
    logits = torch.arange(VOCABULARY).float()
    logits[5] = -torch.inf
    changed = limit.apply(logits.clone(), 0)
    assert torch.softmax(changed, -1)[2] == 1.0
    changed[2] = -torch.inf
    logits[2] = -torch.inf
    assert torch.equal(changed, logits), "the model's own preference"
    nothing = limit.apply(torch.full((VOCABULARY,), -torch.inf), 0)
    assert torch.nonzero(nothing > -torch.inf).flatten().tolist() == [2]


def test_without_a_bound_there_is_none() -> None:
    assert ReasoningLimit.of(LogitsParams(), NO_PROMPT) is None
    assert BUILT_IN[-1] is ReasoningLimit


def test_harness_catches_a_bound_that_counts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, ReasoningLimit, "drew", lambda _: lambda limit, token: None)
    with pytest.raises(AssertionError):
        test_it_ends_in_time()
