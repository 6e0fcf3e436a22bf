"""Outputs of an attempt, held against those that it has to have.

Each sequence's tokens are those that it has alone, a search finds what the plain definition finds, and every end has a
reason in the workload.
"""

from dataclasses import dataclass, field

import numpy as np

from scheduler.events import End, EndReason, StepOutputs
from scheduler.request import Request
from tests.scheduler.executor import VOCABULARY, alone, candidates, law
from tests.scheduler.workloads import Arrival, Workload

REFUSED = (EndReason.QUEUE_FULL, EndReason.QUEUE_TIMEOUT)
OF_ALL = (EndReason.FAULT, EndReason.STUCK, *REFUSED)  # what ends all sequences of an attempt at once
OF_ONE = (EndReason.STOP, EndReason.LENGTH)


@dataclass
class Outcome:
    """Outputs and ends of one attempt. outputs, ends: by sequence; end: the last word."""

    arrival: Arrival
    outputs: dict[int, list[int]] = field(default_factory=dict)
    ends: dict[int, End] = field(default_factory=dict)
    age: float | None = None
    cached: int = 0
    end: End | None = None

    @property
    def tokens(self) -> list[int]:
        """Tokens of its first sequence."""
        return self.outputs.get(0, [])

    def output(self, index: int = 0) -> list[int]:
        """All that is known of a sequence's output, from any attempt."""
        return self.arrival.known(index) + self.outputs.get(index, [])

    def known(self, index: int = 0) -> list[int]:
        """All tokens of a sequence as far as they were told."""
        return self.arrival.request.prompt.tolist() + self.output(index)

    @property
    def live(self) -> list[int]:
        """Sequences that have not ended."""
        return [] if self.end is not None else [index for index in self.arrival.open if index not in self.ends]

    def take_token(self, outputs: StepOutputs, i: int) -> None:
        attempt, request = self.arrival.attempt, self.arrival.request
        index, token, probs = int(outputs.indices[i]), int(outputs.tokens[i]), outputs.logprobs
        name = f"sequence {index} of attempt {attempt}"
        law(index in self.live, f"{name} has a token after its end")
        law(self.age is not None, f"{name} has a token before its start")
        law(outputs.positions[i] == len(self.output(index)), f"{name} has a gap or a duplicate")
        if request.beam is None and not probs.rank[i]:
            law(probs.chosen[i] == 0, "a token that was not drawn has a logprob")
        elif request.beam is None:
            law(probs.chosen[i] == -token, "a token has another's logprob")
            law(probs.top_ids[i, :2].tolist() == [token, token + 1], "a token has another's alternatives")
        else:
            own = candidates(self.known(index))
            law(probs.chosen[i] == own[token], f"a token of {name} has another's logprob")
            law(probs.rank[i] == 1 + np.count_nonzero(own > own[token]), f"a token of {name} has another's rank")
            best, n = np.argsort(-own, kind="stable"), min(max(0, request.controls.top_logprobs), VOCABULARY)
            law((probs.top_ids[i, :n] == best[:n]).all(), f"a token of {name} has another's alternatives")
            law((probs.top[i, :n] == own[best[:n]]).all(), f"a token of {name} has logprobs of other alternatives")
        self.outputs.setdefault(index, []).append(token)

    def take_end(self, end: End) -> None:
        name = f"sequence {end.index} of attempt {self.arrival.attempt}, which ended with {end.reason.value}"
        law(self.end is None, f"{name}, had ended with its attempt")
        law(end.index in self.live or not self.arrival.open, f"{name}, had ended or was none")
        self.ends[end.index] = end
        left = self.live
        law(left or not end.more, f"{name}, was the last one, and more is to come")
        law(end.more or not left or end.reason not in OF_ONE, f"{name}, ends {left} too")
        law(not end.more or end.reason not in OF_ALL, f"{name}, ends only itself")
        if not end.more:
            self.end = end


def check_outcome(told: Outcome, workload: Workload, found: int = 0) -> None:
    """found: the most tokens that the attempt joined with; a fault that it would meet there another did not have."""
    arrival, end = told.arrival, told.end
    law(end is not None, f"attempt {arrival.attempt} has no end")
    assert end is not None
    name = f"attempt {arrival.attempt}, which ended with {end.reason.value}"
    if end.reason in REFUSED:
        waits = sum(len(arrival.heads) for arrival in workload.arrivals)
        bounded = workload.queue.wait < 1e9 or workload.queue.requests < waits
        law(bounded or arrival.request.queue_timeout is not None, f"{name}, was refused by a queue without bounds")
        law(told.age is None and not told.outputs, f"{name}, had started")
        law(1.0 <= end.retry_after <= 30.0, f"{name}, is told to retry after {end.retry_after}")
        law(end.message, f"{name}, is not told why")
        return
    if not arrival.open:
        law(end.reason is EndReason.FINISHED, f"{name}, had no sequence")
    elif arrival.request.beam is not None:
        _check_search(told, end, name)
    elif arrival.request.count > 1:
        _check_several(told, end, name)
    else:
        _check_one(told, end, name, found)


def _check_one(told: Outcome, end: End, name: str, found: int) -> None:
    arrival = told.arrival
    request, whole = arrival.request, arrival.output
    first_missing = len(arrival.known(0))
    stopped = bool(whole) and whole[-1] in request.stop_ids
    stuck = len(whole) < request.max_tokens and not stopped
    computed = len(request.prompt) + len(whole) - (not stuck)  # the last token is computed where another was to follow
    faults = arrival.fault is not None and arrival.fault < computed
    if faults and arrival.fault is not None and end.reason is not EndReason.FAULT:
        faults = arrival.fault >= found
    if faults and arrival.fault is not None:
        met = arrival.fault + 1 - len(request.prompt)
        if found > arrival.fault:  # another had computed that position; when this one lost its pages, it met the fault
            met = first_missing + len(told.tokens)
        whole = whole[: max(first_missing, met)]
    rest = whole[first_missing:]
    law(told.tokens == rest[: len(told.tokens)], f"{name}, has {told.tokens}, alone {rest}")
    if end.reason is EndReason.FINISHED:
        law(arrival.cancel is not None, f"{name}, was not cancelled")
        return
    law(told.tokens == rest, f"{name}, has {told.tokens}, alone {rest}")
    if faults:
        law(end.reason is EndReason.FAULT, f"{name}, has a fault")
        law(end.message, f"{name}, is not told why")
        return
    if stuck:
        law(end.reason is EndReason.STUCK, f"{name}, had nothing left to draw")
        return
    _check_last_token(end, whole, request, name)


def _check_last_token(end: End, whole: list[int], request: Request, name: str) -> None:
    stopped = whole[-1] in request.stop_ids
    law(end.reason is (EndReason.STOP if stopped else EndReason.LENGTH), f"{name}, ended for another reason")
    law(end.stop_token_id == (whole[-1] if stopped else None), f"{name}, names the stop token {end.stop_token_id}")


def _check_several(told: Outcome, end: End, name: str) -> None:
    """Each is what it is alone, as far as it came before what ended all."""
    arrival, request = told.arrival, told.arrival.request
    dropped = {index for _, index in arrival.dropped}
    stuck = False
    for index in arrival.open:
        whole, said = alone(request, index), told.ends.get(index)
        mine, which = told.output(index), f"sequence {index} of {name}"
        law(mine == whole[: len(mine)], f"{which}, has {mine}, alone {whole}")
        ends_by_itself = len(whole) == request.max_tokens or (whole[-1:] and whole[-1] in request.stop_ids)
        stuck |= not ends_by_itself
        if said is not None and said.reason in OF_ONE:
            law(mine == whole and ends_by_itself, f"{which}, has {mine}, alone {whole}")
            _check_last_token(said, whole, request, which)
        elif said is not None and said.reason is EndReason.FINISHED:
            law(index in dropped or arrival.cancel is not None, f"{which}, was not cancelled")
        else:
            law(end.reason not in OF_ONE, f"{which}, has no end")
    if end.reason is EndReason.STUCK:
        law(stuck, f"{name}, had something left to draw")
    if end.reason is EndReason.FAULT:
        law(arrival.fault is not None and end.message, f"{name}, has no fault, or is not told why")


def _check_search(told: Outcome, end: End, name: str) -> None:
    arrival, request = told.arrival, told.arrival.request
    if end.reason in OF_ALL or end.reason is EndReason.FINISHED:
        law(not told.outputs, f"{name}, has told something")
        faulty = end.reason is EndReason.FAULT and arrival.fault is not None
        cancelled = end.reason is EndReason.FINISHED and (arrival.cancel is not None or arrival.dropped)
        law(faulty or cancelled, f"{name}, had no reason to")
        return
    found = plain_search(request)
    law(told.outputs == dict(enumerate(found)), f"{name}, found {told.outputs}, the definition finds {found}")
    for index, tokens in enumerate(found):
        _check_last_token(told.ends[index], tokens, request, name)


def plain_search(request: Request) -> list[list[int]]:
    """The definition of a beam search. It never ends early: all that goes on is as long as it may be in the end."""
    prompt, beam, stops = request.prompt.tolist(), request.beam, request.stop_ids
    assert beam is not None
    live, finished = [(0.0, list[int]())], list[tuple[float, list[int]]]()
    for _ in range(request.max_tokens):
        every = [
            (total + float(logprob), [*tokens, token])
            for total, tokens in live
            for token, logprob in enumerate(candidates(prompt + tokens))
        ]
        best = sorted(every, reverse=True)[: 2 * beam.width]
        finished += [one for one in best if one[1][-1] in stops]
        live = [one for one in best if one[1][-1] not in stops][: beam.width]
    scored = sorted(((total / len(tokens) ** beam.length_penalty, tokens) for total, tokens in finished + live))
    return [tokens for _, tokens in scored[::-1][: request.count]]
