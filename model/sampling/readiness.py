"""Asks factories of logits processors whether they can make the processors of requests: see `scheduler.readiness`."""

import logging
import time
from collections.abc import Callable, Mapping
from itertools import islice

from model.errors import RequestFault
from model.sampling.logits_processors import MOST_SECONDS, args_of
from model.sampling.sources import ProcessorSources
from scheduler.events import Ready
from scheduler.request import Request

MOST_ASKED = 512  # requests that are asked for in one step; each question takes time of the engine's thread
MOST_WAIT = 60.0  # seconds until a factory has to be ready for a request
GRAMMAR = "the grammar of structured_output"

log = logging.getLogger("quire.sampling")


class FactoryReadiness:
    """`scheduler.readiness.Readiness` over grammars, and over the factories that have a `ready`.

    All factories are asked each time, so that each begins its preparations at once. They are asked for the first
    `MOST_ASKED` requests that wait. Called on the engine's thread.

    Attributes:
        clock: Returns seconds, by which it limits a call and the whole wait.
    """

    def __init__(self, sources: ProcessorSources, clock: Callable[[], float] = time.perf_counter) -> None:
        self._asked = [
            (one.name, ready) for one in sources.factories if (ready := getattr(one.make, "ready", None)) is not None
        ]
        self._grammars, self.clock = sources.grammars, clock
        self._since: dict[int, float] = {}  # when each attempt that is not ready was asked for first

    @property
    def asks_factories(self) -> bool:
        """Whether a factory has to be asked for every request."""
        return bool(self._asked)

    def __call__(self, requests: Mapping[int, Request]) -> list[Ready]:
        now = self.clock()
        if len(requests) > MOST_ASKED:  # the wait of the others is counted from their first question on
            requests = dict(islice(requests.items(), MOST_ASKED))
        self._since = {attempt: self._since.get(attempt, now) for attempt in requests}
        if self._grammars is not None:
            params = (request.controls.logits_params for request in requests.values())
            self._grammars.await_only({(one.grammar, one.grammar_salt) for one in params if one.grammar})
        answers = (self._answer(attempt, request) for attempt, request in requests.items())
        return [answer for answer in answers if answer is not None]

    def _answer(self, attempt: int, request: Request) -> Ready | None:
        """Returns None where a factory is not ready."""
        params = request.controls.logits_params
        waiting, args = list[str](), args_of(params)
        if params.grammar and self._grammars is not None:  # without a store the processor itself says so
            try:
                end = params.reasoning_end if params.grammar_tokens else None
                if not self._grammars.ready(params.grammar, params.grammar_salt, end):
                    waiting.append(GRAMMAR)
            except RequestFault as fault:
                return Ready(attempt, str(fault))
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
            what = waiting[0] if waiting[0] == GRAMMAR else f"logits processor {waiting[0]}"
            return Ready(attempt, f"{what} was not ready within {MOST_WAIT:.0f} s")
        if waiting:
            return None
        if params.grammar and self._grammars is not None:
            self._grammars.hold(request, params.grammar, params.grammar_salt)
        return Ready(attempt)
