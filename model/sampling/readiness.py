"""Asks factories of logits processors whether they can make the processors of requests: see `scheduler.readiness`."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence

from model.sampling.logits_processors import MOST_SECONDS, NamedFactory, args_of
from scheduler.events import Ready
from scheduler.request import Request

MOST_WAIT = 60.0  # seconds until a factory has to be ready for a request

log = logging.getLogger("quire.sampling")


class FactoryReadiness:
    """`scheduler.readiness.Readiness` over the factories that have a `ready`.

    All are asked each time, so that each begins its preparations at once. Called on the engine's thread.

    Attributes:
        clock: Returns seconds, by which it limits a call and the whole wait.
    """

    def __init__(self, factories: Sequence[NamedFactory], clock: Callable[[], float] = time.perf_counter) -> None:
        self._asked = [
            (one.name, ready) for one in factories if (ready := getattr(one.make, "ready", None)) is not None
        ]
        self.clock = clock
        self._since: dict[int, float] = {}  # when each attempt that is not ready was asked for first

    def __bool__(self) -> bool:
        """Whether a factory has to be asked at all."""
        return bool(self._asked)

    def __call__(self, requests: Mapping[int, Request]) -> list[Ready]:
        now = self.clock()
        self._since = {attempt: self._since.get(attempt, now) for attempt in requests}
        answers = (self._answer(attempt, request) for attempt, request in requests.items())
        return [answer for answer in answers if answer is not None]

    def _answer(self, attempt: int, request: Request) -> Ready | None:
        """Returns None where a factory is not ready."""
        waiting, args = [], args_of(request.controls.logits_params)
        for name, ready in self._asked:
            began = self.clock()
            try:
                if not ready(request.prompt.copy(), **args.get(name, {})):
                    waiting.append(name)
            except Exception as error:  # whatever a user's code raises ends this request alone
                log.exception("logits processor %s failed", name)
                return Ready(attempt, f"logits processor {name} raised {type(error).__name__}")
            if (seconds := self.clock() - began) > MOST_SECONDS:
                return Ready(
                    attempt, f"logits processor {name} took {seconds:.1f} s in one call, may take {MOST_SECONDS:.0f} s"
                )
        if waiting and self.clock() - self._since[attempt] > MOST_WAIT:
            return Ready(attempt, f"logits processor {waiting[0]} was not ready within {MOST_WAIT:.0f} s")
        return None if waiting else Ready(attempt)
