"""Requests of a simulation, made of a trace's arrivals.

Which prompts begin alike is all that the prefix cache sees of their text. So a prompt has one and the same token
everywhere but at the end of each page, where it has a number of the trace's block there, or one of its own.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from cache_manager.block_hash import Scope
from rpc.loadgen.traces import Arrival, block_size
from scheduler.controls import Controls
from scheduler.events import Abort, Event, Submit
from scheduler.request import Request
from scheduler.stand_ins import FILLER

CONTROLS = Controls(temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, seed=0)
SPREAD = 0x9E3779B97F4A7C15  # odd: its multiples differ modulo a power of two
TOKENS, WORDS = 2**31, 2**64
BEHIND = 1e-6  # seconds between requests of one moment: enough for an order, and no limit to the rate


@dataclass(frozen=True, slots=True, eq=False)
class Timed:
    """An event and the seconds at which it comes. request: its number, which is that of its first attempt."""

    at: float
    request: int
    event: Event


def submits(
    arrivals: Sequence[Arrival], page_size: int, shrink: float = 1.0, deadline: float | None = None
) -> list[Timed]:
    """Returns the requests of a trace.

    Args:
        arrivals: In order, with lengths that fit the engine. Requests of one moment reach it one after another, so an
            idle engine begins with the first of them alone.
        page_size: Tokens of a page.
        shrink: Factor by which their lengths were multiplied.
        deadline: Seconds that each client waits for its whole output; None: as long as it takes.
    """
    return [
        timed
        for number, (one, at) in enumerate(zip(arrivals, _one_after_another(arrivals), strict=True))
        for timed in _events(number, replace(one, at=at), page_size, shrink, deadline)
    ]


def _one_after_another(arrivals: Sequence[Arrival]) -> Iterator[float]:
    """Yields the seconds at which each reaches an engine, in the order of the trace."""
    last = -math.inf
    for one in arrivals:
        last = one.at if one.at > last else last + BEHIND
        yield last


def _events(number: int, one: Arrival, page_size: int, shrink: float, deadline: float | None) -> Iterator[Timed]:
    yield Timed(one.at, number, Submit(number, _request(number, one, page_size, shrink, deadline)))
    if deadline is not None:
        yield Timed(one.at + deadline, number, Abort(number))


def _request(number: int, one: Arrival, page_size: int, shrink: float, deadline: float | None) -> Request:
    prompt = np.full(one.prompt, FILLER, np.int32)
    ends = np.arange(page_size - 1, one.prompt, page_size)
    blocks = np.minimum(ends // block_size(shrink), max(0, len(one.blocks) - 1))
    ids = [block % WORDS for block in one.blocks] or [WORDS - 1 - number]  # its own is none of the trace's
    text = np.array(ids, np.uint64)[blocks]
    mixed = text * np.uint64(SPREAD) + ends.astype(np.uint64)
    prompt[ends] = ((mixed ^ (mixed >> np.uint64(33))) % np.uint64(TOKENS)).astype(np.int32)
    return Request(prompt, one.output, (), CONTROLS, scope=Scope(), deadline=deadline)
