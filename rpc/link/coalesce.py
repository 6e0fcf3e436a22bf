"""Splits step outputs by frontend, and merges the outputs of several steps for a frontend that lags."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np

from scheduler.events import AdminAnswer, End, Logprobs, PromptPart, Start, StepOutputs

T = TypeVar("T", Start, End, PromptPart)

LOCAL_BITS = 40
"""An engine that serves several frontends numbers attempts by frontend x 2^40 + the frontend's own number."""
LOCAL = 2**LOCAL_BITS - 1


def owned_by(outputs: StepOutputs, frontend: int) -> StepOutputs:
    """Returns the part of a step's outputs that is for one frontend.

    Attempts and tickets are the frontend's own numbers. Stats, step times and KV events go to all frontends.
    """
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


def _local_answer(answer: AdminAnswer, frontend: int) -> AdminAnswer:
    """Returns an answer under the frontend's own ticket; attempts of other frontends become -1 in its page map."""
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

    Stats are those of the last step. A start's age grows by the duration of the steps after it.
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
        kv_events=tuple(change for s in steps for change in s.kv_events),
    )
