"""Step outputs taken apart by frontend, and put together where one lags."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np

from scheduler.events import Answer, End, Logprobs, PromptPart, Start, StepOutputs

T = TypeVar("T", Start, End, PromptPart)

LOCAL_BITS = 40
"""An engine that serves several frontends numbers attempts by frontend x 2^40 + the frontend's own number."""
LOCAL = 2**LOCAL_BITS - 1


def owned_by(outputs: StepOutputs, frontend: int) -> StepOutputs:
    """What is for one frontend, with its own attempt numbers. Stats and step times are for all."""
    owners = outputs.attempts >> LOCAL_BITS
    if not np.all(owners == frontend):
        mine = np.flatnonzero(owners == frontend)
        outputs = replace(
            outputs,
            attempts=outputs.attempts[mine],
            indices=outputs.indices[mine],
            positions=outputs.positions[mine],
            tokens=outputs.tokens[mine],
            logprobs=outputs.logprobs.select(mine),
        )
    return replace(
        outputs,
        attempts=outputs.attempts & LOCAL,
        starts=_local(outputs.starts, frontend),
        ends=_local(outputs.ends, frontend),
        prompt_parts=_local(outputs.prompt_parts, frontend),
        answers=tuple(_local_answer(a, frontend) for a in outputs.answers if a.ticket >> LOCAL_BITS == frontend),
    )


def _local(items: tuple[T, ...], frontend: int) -> tuple[T, ...]:
    return tuple(replace(i, attempt=i.attempt & LOCAL) for i in items if i.attempt >> LOCAL_BITS == frontend)


def _local_answer(answer: Answer, frontend: int) -> Answer:
    """Attempts of other frontends have no number here."""
    pages = answer.page_map
    if pages is not None:
        holders = tuple(
            holder
            if holder.is_step
            else replace(holder, number=holder.number & LOCAL if holder.number >> LOCAL_BITS == frontend else -1)
            for holder in pages.holders
        )
        pages = replace(pages, holders=holders)
    return replace(answer, ticket=answer.ticket & LOCAL, page_map=pages)


def merged(steps: Sequence[StepOutputs]) -> StepOutputs:
    """Joins the outputs of several steps, at least one, in order.

    Stats are the last one's. Starts age by what the steps after theirs took.
    """
    if len(steps) == 1:
        return steps[0]
    later = [sum(seconds for step in steps[i + 1 :] for seconds in step.step_seconds) for i in range(len(steps))]
    return StepOutputs(
        attempts=np.concatenate([s.attempts for s in steps]),
        indices=np.concatenate([s.indices for s in steps]),
        positions=np.concatenate([s.positions for s in steps]),
        tokens=np.concatenate([s.tokens for s in steps]),
        logprobs=Logprobs.joined([s.logprobs for s in steps]),
        starts=tuple(
            replace(start, age=start.age + more)
            for step, more in zip(steps, later, strict=True)
            for start in step.starts
        ),
        ends=tuple(end for s in steps for end in s.ends),
        prompt_parts=tuple(part for s in steps for part in s.prompt_parts),
        stats=steps[-1].stats,
        overheads=tuple(seconds for s in steps for seconds in s.overheads),
        step_seconds=tuple(seconds for s in steps for seconds in s.step_seconds),
        answers=tuple(answer for s in steps for answer in s.answers),
        names=tuple(change for s in steps for change in s.names),
    )
