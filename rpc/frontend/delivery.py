"""Hands the outputs of engine steps to the streams of live requests: tokens, prompts' parts, ends.

An exception of one stream ends that request alone; the others of the step get their tokens.
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

from rpc.frontend.beam_results import BeamResultReader
from rpc.frontend.end_questions import EndQuestions
from rpc.frontend.errors import RequestFailed, internal, unanswered
from rpc.frontend.live import Arrivals, Live
from rpc.frontend.output import StepTokens
from rpc.frontend.pacing import Pacer
from rpc.frontend.slo import SLOTracker
from rpc.observe.metrics import Metrics
from scheduler import events

log = logging.getLogger("quire.frontend")


class Requests(Protocol):
    """Ends requests, on their engines too."""

    def cut_off(self, live: Live, failure: RequestFailed) -> None:
        """Ends the request with this failure."""

    def forget(self, live: Live) -> None:
        """Ends the request, whose output is no longer wanted."""

    def has_ended(self, live: Live) -> None:
        """Releases the request, of which the engine has sent all output."""

    def stop_sequence(self, live: Live, index: int) -> None:
        """Ends one sequence of the request; the others go on."""


class Delivery:
    """Writes to the streams of live requests.

    Args:
        live: Live requests by attempt, a view that changes with them. Tokens of another attempt are dropped.
        requests: Ends requests and sequences that their streams have ended.
        backlog: Count of tokens that may wait for the reader of a stream, and as many for an answer about its output.
            Where the output is taken at its end, all of its tokens may wait for both.
        metrics: Counts tokens and times.
        slo: Gets the times to first and next tokens.
        pacer: Shares the loop's time among long results.
    """

    def __init__(
        self,
        live: Mapping[int, Live],
        requests: Requests,
        backlog: int,
        metrics: Metrics,
        slo: SLOTracker,
        pacer: Pacer,
    ) -> None:
        self._live, self._requests, self._backlog = live, requests, backlog
        self._metrics, self._slo = metrics, slo
        self._beam_results = BeamResultReader(pacer, self._observe, self._end_read, self._unreadable)
        self._questions = EndQuestions(self._observe, self._stopped, self._went_on, requests.cut_off, self._unreadable)

    @property
    def results_being_read(self) -> int:
        """Count of beam searches' results that are being read."""
        return len(self._beam_results)

    @property
    def open_questions(self) -> int:
        """Count of requests with a question about their outputs."""
        return len(self._questions)

    def deliver(self, outputs: events.StepOutputs, now: float) -> None:
        """Delivers a step's prompt parts and tokens; its ends go through `end`.

        Args:
            outputs: Outputs of the step.
            now: Arrival of the outputs, seconds on the monotonic clock.
        """
        for part in outputs.prompt_parts:
            live = self._live.get(part.attempt)
            if live is not None:
                with self.contained(live):
                    live.stream.accept_prompt(part)
        if len(outputs.attempts):
            self._accept_all(StepTokens.from_outputs(outputs), now)

    def end(self, live: Live, end: events.End) -> None:
        """Ends a sequence of the request, but not before a result that is being read."""
        if not self._beam_results.defer_end(live, end):
            self._end_read(live, end)

    def _end_read(self, live: Live, end: events.End) -> None:
        """Ends a sequence all of whose tokens are read."""
        with self.contained(live):
            live.stream.end(end)
        if not live.stream.ended and live.stream.sequences[end.index].question is not None:
            self._questions.ask(live, end.index)
        self._went_on(live)

    def _went_on(self, live: Live) -> None:
        if live.stream.ended:
            self._requests.has_ended(live)
        elif live.streaming:
            live.wake()

    def forget(self, live: Live) -> None:
        """Stops reading a result of the request, and drops questions about its outputs."""
        self._beam_results.forget(live)
        self._questions.forget(live)

    def close(self) -> None:
        """Ends the thread that has questions answered."""
        self._questions.close()

    @contextmanager
    def contained(self, live: Live) -> Iterator[None]:
        """Ends the request with INTERNAL if its stream raises."""
        try:
            yield
        except Exception:
            self._unreadable(live)

    def _unreadable(self, live: Live) -> None:
        """Ends the request with INTERNAL. Runs in the handler of the exception that its stream raised."""
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
        for live, indices in searches.items():
            self._beam_results.read(live, step, indices, now)

    def _observe(self, arrivals: Arrivals) -> None:
        self._metrics.tokens(arrivals.tokens, arrivals.firsts, arrivals.gaps, arrivals.prefills)
        self._slo.observe(arrivals.firsts, arrivals.gaps)

    def _accept(self, live: Live, step: StepTokens, i: int, arrivals: Arrivals) -> None:
        stream, index = live.stream, step.indices[i]
        sequence = stream.sequences[index]
        before = sequence.token_count
        stopped = stream.accept(step, i)
        if sequence.token_count > before:
            arrivals.add(live, index)
        if stopped:  # nothing else that a token does ends a sequence
            self._stopped(live, index)
            return
        if sequence.question is not None:
            self._questions.ask(live, index)
        if live.streaming:
            if sequence.backlog > self._backlog:
                message = f"more than {self._backlog} tokens wait for this client to read them"
                self._requests.cut_off(live, RequestFailed("RESOURCE_EXHAUSTED", "SLOW_READER", message))
            elif sequence.waiting_tokens > self._backlog:
                self._requests.cut_off(live, unanswered(self._backlog))
            live.wake_for_tokens()

    def _stopped(self, live: Live, index: int) -> None:
        """Ends a sequence, or its request, on the engine: a stop string, which engines do not see, has ended it."""
        if live.stream.ended:
            self._requests.forget(live)
        else:
            self._requests.stop_sequence(live, index)
        if live.streaming or live.stream.ended:
            live.wake()
