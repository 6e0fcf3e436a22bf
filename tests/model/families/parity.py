"""One mixed batch of prompts through Quire, and its comparison with what transformers says."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from scheduler.events import Submit
from scheduler.settings import SchedulerSettings
from tests.model.families.prompts import PROMPTS
from tests.model.families.reference import NEW, TOP, Reference
from tests.model.test_parity import ENDLESS
from tests.support.engines import Rig, make_request, make_rig

NEAR = 2e-3  # nats between log-probabilities of the same token
EVERY = range(len(PROMPTS))


class Mismatch(AssertionError):
    """Quire and transformers disagree. `pytest.raises` of it is not content with a checkpoint that does not load."""


@dataclass(frozen=True, eq=False)
class Answer:
    """rig: attempt i ran the prompt at places[i]. top_ids, top: [len(places), TOP], the likeliest first tokens."""

    rig: Rig
    places: Sequence[int]
    top_ids: NDArray[np.int32]
    top: NDArray[np.float32]


def ask(
    directory: Path, places: Sequence[int] = EVERY, quantization: str | None = None, backend: str = "auto"
) -> Answer:
    """All at once; the prefix cache is on, as it is when serving."""
    settings = SchedulerSettings(max_sequences=128)
    rig = make_rig(
        directory, 16, 4096, settings, record_logits=True, dtype="float32", queue=ENDLESS, quantization=quantization,
        backend=backend,
    )  # fmt: skip
    top_ids = np.full((len(places), TOP), -1, np.int32)
    top = np.full((len(places), TOP), np.nan, np.float32)
    events = []
    for i, place in enumerate(places):
        request = make_request(rig, PROMPTS[place], NEW)
        events.append(Submit(i, replace(request, controls=replace(request.controls, top_logprobs=TOP))))
    outputs = rig.turn(events)
    while outputs is not None:
        first = outputs.positions == 0
        top_ids[outputs.attempts[first]] = outputs.logprobs.top_ids[first][:, :TOP]
        top[outputs.attempts[first]] = outputs.logprobs.top[first][:, :TOP]
        outputs = rig.turn()
    return Answer(rig, places, top_ids, top)


def compare(answer: Answer, reference: Reference) -> None:
    """Raises Mismatch, with the first place where they part."""
    for i, place in enumerate(answer.places):
        at = reference.places.index(place)
        ours, theirs = answer.rig.results[i].tokens, reference.ids[at]
        if ours != theirs:
            step = next((n for n, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), len(ours))
            raise Mismatch(
                f"prompt of {len(PROMPTS[place])} tokens, output token {step}: {ours[step : step + 4]}, transformers "
                f"has {theirs[step : step + 4]}"
            )
        likeliest = np.sort(reference.first[at])[::-1][:TOP]
        for said in (likeliest, reference.first[at][answer.top_ids[i]]):
            off = float(np.abs(answer.top[i] - said).max())
            if not off <= NEAR:  # NaN is no match
                raise Mismatch(f"prompt of {len(PROMPTS[place])} tokens: first log-probabilities are off by {off}")
