"""Readiness: a request whose logits processors cannot be made yet waits in the queue, and nothing else waits for it.

A grammar has to be compiled first, in another thread, and so may be what a user's own processor needs. The request is
held until a `Ready` event comes, and again after each preemption, since its processors are made anew then. Other
requests pass it.

A request waits before it has a row, not between two of its draws. So a row that was planned can always draw:

- A row may be launched ahead, before its last draw is known. No step has to be taken back.
- Sequences that go on from one prompt are admitted together, and draw their first tokens in one step.
- Nothing is computed twice. A held request has neither row nor pages.
- Ranks of a divided model follow plans, so they agree without being asked.

vLLM lets requests wait for grammars in the same place (`WAITING_FOR_FSM`). Beam searches and drafts have no processors.
"""

from collections.abc import Callable, Mapping, Sequence

from scheduler.events import Event, Ready, Submit
from scheduler.request import Request

Readiness = Callable[[Mapping[int, Request]], Sequence[Ready]]
"""Asks whether the processors of requests, by attempt, can be made. Returns the attempts for which that is decided."""


def with_ready(events: Sequence[Event], held: Mapping[int, Request], ask: Readiness) -> list[Event]:
    """Returns the events, and behind them which attempts are ready.

    Args:
        events: For the next step; new requests are asked for at once.
        held: Requests that are held, by attempt.
        ask: Asks for them.
    """
    asked = {**held, **{event.attempt: event.request for event in events if isinstance(event, Submit)}}
    return [*events, *ask(asked)] if asked else list(events)
