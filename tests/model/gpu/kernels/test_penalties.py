"""Penalties by a kernel, to the bit those of torch and of a plain statement in numpy, as sequences grow."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from model.gpu import penalties
from model.gpu.draws import GpuOps, start_draws
from model.gpu.penalties import DeviceCounts, penalise
from model.sampling.builtin_processors import Penalties
from model.sampling.sampler import SamplingRows, sample
from scheduler.controls import NO_LOGITS_PARAMS, Controls, LogitsParams
from scheduler.step import Join
from tests.model.gpu.kernels.device import DEVICE, INTERPRETED

VOCABULARY = 300
AMOUNTS = st.builds(
    lambda repetition, frequency, presence: replace(
        NO_LOGITS_PARAMS, repetition=repetition, frequency=frequency, presence=presence
    ),
    st.sampled_from([1.0, 1.1, 0.7, 3.0]),
    st.sampled_from([0.0, 0.3, -1.7]),
    st.sampled_from([0.0, 0.9, -0.5]),
).filter(lambda params: params != NO_LOGITS_PARAMS)


@dataclass
class Sequence:
    """A sequence and its processor."""

    params: LogitsParams
    prompt: list[int]
    output: list[int] = field(default_factory=list)
    processor: Penalties = field(init=False)

    def __post_init__(self) -> None:
        self.resume()

    def resume(self) -> None:
        """Makes the processor anew, as after a preemption or on another engine."""
        made = Penalties.of(self.params, np.array(self.prompt, np.int32))
        assert made is not None
        self.processor = made
        for token in self.output:
            made.drew(token)

    def draw(self, token: int) -> None:
        self.output.append(token)
        self.processor.drew(token)


def plain(logits: NDArray[np.float32], sequence: Sequence) -> NDArray[np.float32]:
    """The definition, token by token, in float32."""
    params, found, counts = sequence.params, logits.copy(), Counter(sequence.output)
    repetition, frequency, presence = (
        np.float32(one) for one in (params.repetition, params.frequency, params.presence)
    )
    for token in {*sequence.prompt, *sequence.output}:
        x = found[token]
        if params.repetition != 1:
            x = x / repetition if x > 0 else x * repetition
        times = np.float32(counts[token])
        found[token] = x - frequency * times - presence * np.float32(times > 0)
    return found


def logits_of(rows: int, seed: int) -> Tensor:
    made = 5 * torch.randn((rows, VOCABULARY), generator=torch.Generator().manual_seed(seed))
    made[:, ::17] = 0.0
    made[:, 5::40] = -torch.inf
    return made


def check(sequences: list[Sequence], places: list[int], seed: int = 0, rows: int = 5) -> None:
    logits, which = logits_of(rows, seed), np.array(places)
    found, by_torch = logits.to(DEVICE).clone(), logits.clone()
    processors = [one.processor for one in sequences]
    penalise(found, which, processors, which)
    Penalties.apply_rows(by_torch, which, processors, which)
    expected = logits.numpy().copy()
    for place, sequence in zip(places, sequences, strict=True):
        expected[place] = plain(expected[place], sequence)
    assert found.cpu().numpy().tobytes() == by_torch.numpy().tobytes()
    np.testing.assert_array_equal(found.cpu().numpy(), expected)


TOKENS = st.integers(0, VOCABULARY - 1) | st.integers(0, 6)  # some of them often
EVENTS = st.sampled_from(["draw", "draw", "draw", "again", "several", "resume", "new", "swap", "away"])


@settings(max_examples=15 if INTERPRETED else 200, deadline=None)
@given(st.lists(AMOUNTS, min_size=3, max_size=3), st.data())
def test_sequences_that_come_go_and_change_places(amounts: list[LogitsParams], data: st.DataObject) -> None:
    """Before each step a row draws one token or several, is resumed, replaced, moved, or left out."""
    prompts = st.lists(TOKENS, min_size=1, max_size=8)
    running = [Sequence(one, data.draw(prompts)) for one in amounts]
    for step in range(6):
        left = list[int]()
        for i in range(len(running)):
            event = data.draw(EVENTS)
            if event == "draw":
                running[i].draw(data.draw(TOKENS))
            elif event == "several":
                for token in data.draw(st.lists(TOKENS, min_size=2, max_size=4)):
                    running[i].draw(token)
            elif event == "resume":
                running[i].resume()
            elif event == "new":
                running[i] = Sequence(amounts[i], data.draw(prompts))
            elif event == "swap":
                running[i], running[0] = running[0], running[i]
            elif event == "away":
                left.append(i)
        shown = [one for i, one in enumerate(running) if i not in left]
        if shown:
            check(shown, sorted(data.draw(st.permutations(range(5)))[: len(shown)]), step)


def test_more_tokens_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(penalties, "ROOM", 4)
    monkeypatch.setattr(penalties, "BLOCK", 16)
    long, short = (Sequence(replace(NO_LOGITS_PARAMS, repetition=1.3, frequency=0.1), prompt) for prompt in ([1], [2]))
    for token in range(0, 40, 2):
        long.draw(token % 30)
        check([short, long], [1, 4], token)


def test_a_sequence_twice_in_a_step_and_a_step_that_is_computed_again() -> None:
    """Samples n > 1 share no processor, but one may be applied to several rows."""
    one = Sequence(replace(NO_LOGITS_PARAMS, repetition=0.8, presence=0.4), [3, 4])
    for token in (3, 9, 9, 250):
        one.draw(token)
        check([one, one], [0, 3])
        check([one], [2])


def test_no_token_has_occurred() -> None:
    check([Sequence(replace(NO_LOGITS_PARAMS, presence=0.4), [3, 4])], [1])


def counted(monkeypatch: pytest.MonkeyPatch, target: Any, name: str) -> list[Any]:
    """Lists calls of a function."""
    calls, call = list[Any](), getattr(target, name)

    def noted(*arguments: Any) -> Any:
        calls.append(arguments)
        return call(*arguments)

    monkeypatch.setattr(target, name, noted)
    return calls


def test_a_step_is_one_transfer_and_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many rows have penalties and however many tokens; counts are copied once."""
    copies, moves = counted(monkeypatch, DeviceCounts, "of"), counted(monkeypatch, penalties, "on_device")
    kernel, launches = penalties.penalise_rows, list[tuple[int, ...]]()

    class Launches:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            launches.append(grid)
            return kernel[grid]

    monkeypatch.setattr(penalties, "penalise_rows", Launches())
    rows, steps = 9, 4
    running = [Sequence(replace(NO_LOGITS_PARAMS, repetition=1.1), list(range(row, 100 + row))) for row in range(rows)]
    for step in range(steps):
        check(running, list(range(rows)), step, rows)
        for one in running:
            one.draw(step * 7)
    assert (len(copies), len(moves)) == (rows, steps)
    assert launches == [(rows, 1)] * steps
    assert {moved.size for _, moved in moves} == {rows * penalties.COLUMNS.value}


def test_draws_with_penalties_are_those_of_torch() -> None:
    """As the engine draws: rows join, draw, and leave for others, beside rows without penalties."""
    controls, n = SamplingRows(4), 4
    params = replace(NO_LOGITS_PARAMS, repetition=1.2, frequency=0.4, presence=0.6, bias=((3, 4.0),))
    rows, random = np.arange(n), np.random.default_rng(0)
    for step in range(5):
        for row in range(n) if step == 0 else [step % n]:
            tokens = random.integers(0, VOCABULARY, 30).astype(np.int32)
            own = NO_LOGITS_PARAMS if row == 2 else params
            controls.join(Join(row, tokens, 20, Controls(0.8, 1.0, 0, 0.0, row, logits_params=own)))
        logits = logits_of(n, step)
        expected = sample(logits.clone(), controls, rows, rows)
        found = start_draws(logits.to(DEVICE), controls, rows, rows).fetch()
        again = sample(logits.to(DEVICE), controls, rows, rows, GpuOps())
        assert found.tokens.tolist() == expected.tokens.tolist() == again.tokens.tolist()
        controls.processors.drew(rows, found.tokens)


def test_the_law_sees_a_token_that_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = penalties.penalise_rows

    class Forgetful:
        def __getitem__(self, grid: Any) -> Callable[..., None]:
            def launch(*arguments: Any, **constants: Any) -> None:
                arguments[1][:, penalties.PLACE.value] = -1
                kernel[grid](*arguments, **constants)

            return launch

    monkeypatch.setattr(penalties, "penalise_rows", Forgetful())
    one = Sequence(replace(NO_LOGITS_PARAMS, presence=0.4), [3, 4])
    check([one], [0])
    one.draw(7)
    with pytest.raises(AssertionError):
        check([one], [0])
