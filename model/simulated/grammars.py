"""Constraints on outputs of simulated engines: their grammars, and when these are compiled."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from model.config import read_config
from model.errors import RequestFault
from model.generation_config import read_ends
from model.simulated.naming import checkpoint_directory
from model.structured.grammar_store import GrammarStore
from scheduler.controls import LogitsParams
from scheduler.events import Ready
from scheduler.request import Request

if TYPE_CHECKING:
    from llguidance import LLTokenizer


def open_grammars() -> GrammarStore | None:
    """Returns an empty store of grammars; None, with a line in the log, where the library of grammars is missing."""
    directory = checkpoint_directory()
    config = read_config(directory)
    ends = read_ends(directory, config)

    def vocabulary() -> "LLTokenizer":
        from model.structured.vocabulary import load_vocabulary

        return load_vocabulary(directory, config.vocabulary, ends)

    store = GrammarStore(vocabulary)
    return store if store.opened() else None


class GrammarReadiness:
    """`scheduler.readiness.Readiness` over grammars: a request waits in the queue until its own is compiled."""

    def __init__(self, grammars: GrammarStore) -> None:
        self._grammars = grammars

    def __call__(self, requests: Mapping[int, Request]) -> list[Ready]:
        params = {attempt: request.controls.logits_params for attempt, request in requests.items()}
        asked = {attempt: one for attempt, one in params.items() if one.grammar}
        self._grammars.await_only({(one.grammar, one.grammar_salt) for one in asked.values()})
        answers = (self._answer(attempt, requests[attempt], one) for attempt, one in asked.items())
        return [answer for answer in answers if answer is not None]

    def _answer(self, attempt: int, request: Request, params: LogitsParams) -> Ready | None:
        end = params.reasoning_end if params.grammar_tokens else None
        try:
            if not self._grammars.ready(params.grammar, params.grammar_salt, end):
                return None
        except RequestFault as fault:
            return Ready(attempt, str(fault))
        self._grammars.hold(request, params.grammar, params.grammar_salt)
        return Ready(attempt)
