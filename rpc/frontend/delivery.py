"""Hands what engine steps bring to the streams of live requests: tokens, prompts' parts, ends.

What one stream raises ends that request alone; the others of the step get their tokens.
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

from rpc.frontend.errors import RequestFailed, internal
from rpc.frontend.found import FoundReader
from rpc.frontend.live import Arrivals, Live
from rpc.frontend.output import StepTokens
from rpc.frontend.pacing import Pacer
from rpc.frontend.promises import Promises
from rpc.observe.metrics import Metrics
from scheduler import events

log = logging.getLogger("quire.frontend")


class Requests(Protocol):
    """Ends requests, on their engines too."""

    def cut_off(self, live: Live, failure: RequestFailed) -> None:
        """The request ends with this failure."""

    def forget(self, live: Live) -> None:
        """No more output of the request is wanted."""

    def has_ended(self, live: Live) -> None:
        """The request's engine has sent all of it."""

    def stop_sequence(self, live: Live, index: int) -> None:
        """No more output of one sequence is wanted; the others of its request go on."""


class Delivery:
    """Writes to the streams of live requests.

    Args:
        live: Live requests by attempt, as they stand at each call. Tokens of another attempt are dropped.
        requests: Ends what a stream has ended.
        backlog: Tokens that may wait for the reader of a stream.
        metrics: Counts tokens and times.
        promises: Gets the times to first and next tokens.
        pacer: Shares the loop's time among long results.
    """

    def __init__(
        self,
        live: Mapping[int, Live],
        requests: Requests,
        backlog: int,
        metrics: Metrics,
        promises: Promises,
        pacer: Pacer,
    ) -> None:
        self._live, self._requests, self._backlog = live, requests, backlog
        self._metrics, self._promises = metrics, promises
        self._found = FoundReader(pacer, self._observe, requests.has_ended, self._unreadable)

    def deliver(self, outputs: events.StepOutputs, now: float) -> None:
        """Delivers a step's prompt parts and tokens; its ends go through `end`."""
        for part in outputs.prompt_parts:
            live = self._live.get(part.attempt)
            if live is not None:
                with self.contained(live):
                    live.stream.accept_prompt(part)
        if len(outputs.attempts):
            self._accept_all(StepTokens.of(outputs), now)

    def end(self, live: Live, end: events.End) -> None:
        """Ends a sequence of the request, once a result that is being read has been read."""
        if self._found.keeps(live, end):
            return
        with self.contained(live):
            live.stream.end(end)
        if live.stream.ended:
            self._requests.has_ended(live)
        elif live.streaming:
            live.tell()

    def forget(self, live: Live) -> None:
        """Stops to read a result of the request."""
        self._found.forget(live)

    @contextmanager
    def contained(self, live: Live) -> Iterator[None]:
        """Ends the request with INTERNAL if its stream raises."""
        try:
            yield
        except Exception:
            self._unreadable(live)

    def _unreadable(self, live: Live) -> None:
        """In the handler of what its stream raised."""
        log.exception("the output of request %s cannot be read", live.request_id)
        self._requests.cut_off(live, internal())

    def _accept_all(self, step: StepTokens, now: float) -> None:
        arrivals, searches = Arrivals(now), dict[Live, list[int]]()
        for i, attempt in enumerate(step.attempts):
            live = self._live.get(attempt)
            if live is None:
                continue
            if live.stream.request.beam is not None:
                searches.setdefault(live, []).append(i)
                continue
            try:  # as `contained`, without a context manager for each token
                self._accept(live, step, i, arrivals)
            except Exception:
                self._unreadable(live)
        self._observe(arrivals)
        for live, places in searches.items():
            self._found.read(live, step, places, now)

    def _observe(self, arrivals: Arrivals) -> None:
        self._metrics.tokens(arrivals.tokens, arrivals.firsts, arrivals.gaps, arrivals.prefills)
        self._promises.observe(arrivals.firsts, arrivals.gaps)

    def _accept(self, live: Live, step: StepTokens, i: int, arrivals: Arrivals) -> None:
        stream, index = live.stream, step.indices[i]
        sequence = stream.sequences[index]
        before = sequence.token_count
        stopped = stream.accept(step, i)
        if sequence.token_count > before:
            arrivals.add(live, index)
        if stopped:  # nothing else that a token does ends a sequence
            self._stopped(live, index)
        elif live.streaming:
            if sequence.pending_tokens > self._backlog:
                message = f"more than {self._backlog} tokens wait for this client to read them"
                self._requests.cut_off(live, RequestFailed("RESOURCE_EXHAUSTED", "SLOW_READER", message))
            live.tell_tokens()

    def _stopped(self, live: Live, index: int) -> None:
        """A stop string has ended a sequence before the engine did."""
        if live.stream.ended:
            self._requests.forget(live)
        else:
            self._requests.stop_sequence(live, index)
        if live.streaming or live.stream.ended:
            live.tell()
