"""Pages that two rows share, and a page that is copied before one of them writes to it: plans made by hand."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from model.forward import ForwardBatch, ForwardOutput
from scheduler.controls import Controls
from scheduler.step import Join, StepPlan
from tests.model.test_parity import random_prompts
from tests.support.engines import Rig, make_rig

PAGE = 4
GREEDY = Controls(0.0, 1.0, 0, 0.0, 0)


def plan(
    step: int,
    slices: Sequence[tuple[int, int, int]],
    joins: Sequence[tuple[int, list[int]]] = (),
    grown: Sequence[tuple[int, int, int, int]] = (),
    copies: Sequence[tuple[int, int]] = (),
) -> StepPlan:
    """Every row draws."""
    ends = np.cumsum([count for _, _, count in slices]) - 1
    logits = np.stack((ends, [row for row, _, _ in slices]), axis=1).astype(np.int32)
    arrays = [np.array(part, np.int32).reshape(-1, n) for part, n in ((grown, 4), (copies, 2), (slices, 3))]
    joined = tuple(Join(row, np.array(tokens, np.int32), len(tokens), GREEDY) for row, tokens in joins)
    none = np.empty(0, np.int32)
    return StepPlan(step, none, joined, arrays[0], arrays[1], none, none, none, arrays[2], logits, none.reshape(0, 2))


class Watched:
    """A rig's runner, whose logits are kept as they come."""

    def __init__(self, rig: Rig) -> None:
        self.runner, self.logits = rig.loaded.runner, list[torch.Tensor]()
        forward = self.runner.model.forward
        watched = self

        class Model:
            def forward(self, batch: ForwardBatch) -> ForwardOutput:
                output = forward(batch)
                watched.logits.append(output.logits)
                return output

        self.runner.model = Model()

    def step(self, step: StepPlan) -> tuple[list[bytes], list[int]]:
        """Logits of the rows that draw, and what they drew."""
        self.runner.launch(step)
        result = self.runner.collect()
        assert not result.faults
        return [row.numpy().tobytes() for row in self.logits[-1]], result.tokens.tolist()


@pytest.fixture
def runner(tiny: Path) -> Watched:
    return Watched(make_rig(tiny, PAGE, 64, poison=False))


def alone(directory: Path, tokens: list[int]) -> bytes:
    """The logits after these tokens, computed in one piece."""
    pages = [(0, 0, index, index) for index in range(-(-len(tokens) // PAGE))]
    (logits,), _ = Watched(make_rig(directory, PAGE, 64, poison=False)).step(
        plan(0, [(0, 0, len(tokens))], [(0, tokens)], pages)
    )
    return logits


def fork(runner: Watched, prompt: list[int], other: int, copies: Sequence[tuple[int, int]]) -> list[tuple]:
    """Row 0 draws from the prompt of 10 tokens, on pages 0 to 2; row 1 goes on from it with the token `other`, on
    pages 0, 1 and 3. Two steps of both at once: what each row has read, and its logits.
    """
    _, (drawn,) = runner.step(plan(0, [(0, 0, 10)], [(0, prompt)], [(0, 0, index, index) for index in range(3)]))
    forked = [(0, 1, index, page) for index, page in enumerate((0, 1, 3))]
    seen = [([*prompt, drawn], [*prompt, other])]
    step = plan(1, [(0, 10, 1), (1, 10, 1)], [(1, [*prompt, other])], forked, copies)
    out = []
    for step_ in (step, plan(2, [(0, 11, 1), (1, 11, 1)])):
        logits, tokens = runner.step(step_)
        out += [(row, logit) for row, logit in zip(seen[-1], logits, strict=True)]
        seen.append(tuple([*row, token] for row, token in zip(seen[-1], tokens, strict=True)))
    return out


@pytest.fixture
def prompt() -> list[int]:
    return random_prompts([10], seed=41)[0]


def test_a_row_that_was_forked_gives_the_logits_of_one_that_was_not(
    tiny: Path, runner: Watched, prompt: list[int]
) -> None:
    """The copy comes before the step is computed: else the fork would read what the parent writes in that step, and
    what it writes itself would be lost.
    """
    for tokens, logits in fork(runner, prompt, 7, copies=[(2, 3)]):
        assert logits == alone(tiny, tokens)


def test_a_copy_that_is_left_out_shows(tiny: Path, runner: Watched, prompt: list[int]) -> None:
    parent, child, *_ = fork(runner, prompt, 7, copies=[])
    assert parent[1] == alone(tiny, parent[0])
    assert child[1] != alone(tiny, child[0])


def test_a_copy_after_the_step_shows(
    tiny: Path, runner: Watched, prompt: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = runner.runner.launch

    def late(step: StepPlan) -> None:
        launch(replace(step, copies=step.copies[:0]))
        with torch.inference_mode():
            runner.runner.attention.copy(step.copies)

    monkeypatch.setattr(runner.runner, "launch", late)
    later = fork(runner, prompt, 7, copies=[(2, 3)])[2:]
    assert [logits == alone(tiny, tokens) for tokens, logits in later] == [True, False]


def test_several_children_of_one_page(tiny: Path, runner: Watched, prompt: list[int]) -> None:
    runner.step(plan(0, [(0, 0, 10)], [(0, prompt)], [(0, 0, index, index) for index in range(3)]))
    others = [(row, [*prompt, 20 + row]) for row in (1, 2, 3)]
    forked = [(0, row, index, page) for row, _ in others for index, page in enumerate((0, 1, 2 + row))]
    copies = [(2, 2 + row) for row, _ in others]
    logits, _ = runner.step(plan(1, [(row, 10, 1) for row, _ in others], others, forked, copies))
    assert logits == [alone(tiny, tokens) for _, tokens in others]
