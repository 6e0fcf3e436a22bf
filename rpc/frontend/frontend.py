"""Between the services and an engine: mints attempts, routes each step's outputs to their streams, ends what must end.

Lives on one asyncio loop. The engine's thread wakes the loop once a step.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from enum import Enum
from typing import TypeVar

from rpc.frontend.engine_client import EngineClient, EngineInfo
from rpc.frontend.errors import RequestFailed, internal, invalid
from rpc.frontend.live import Arrivals, Live
from rpc.frontend.output import Finish, FinishReason, StepTokens
from rpc.frontend.prepare import Preparer
from rpc.frontend.questions import Questions
from rpc.frontend.settings import FrontendSettings
from rpc.frontend.stream import RequestStream
from rpc.observe.metrics import Metrics
from scheduler import events
from scheduler.engine import Sink
from scheduler.limits import Limits
from scheduler.request import Chat, InvalidRequest, Request, Spec

T = TypeVar("T")

log = logging.getLogger("quire.frontend")


class Work(Enum):
    """What is made of a request's prompt. Each kind has threads of its own, so that text waits neither for templates,
    which can take a second, nor for images.
    """

    TEXT = "text"
    CHAT = "chat"
    IMAGES = "images"


class Frontend:
    """Requests of one served model. `attach` an engine's client before the first request, and a new one's when it was
    lost.
    """

    def __init__(self, preparer: Preparer, settings: FrontendSettings, metrics: Metrics) -> None:
        self.preparer, self.settings, self._metrics = preparer, settings, metrics
        self.draining = False
        self._engine: EngineClient | None = None
        self._loop = asyncio.get_running_loop()
        self._workers = {
            work: ThreadPoolExecutor(settings.tokenizer_threads, thread_name_prefix=f"quire-prepare-{work.value}")
            for work in Work
        }
        self._live: dict[int, Live] = {}
        self._ids: set[str] = set()
        self._attempts = itertools.count(1)
        self._preparing = self._sinks = self._image_bytes = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._lost = asyncio.Event()
        self._questions = Questions()

    def attach(self, engine: EngineClient) -> None:
        """From now on requests go to this engine."""
        self._engine = engine
        self._metrics.engine_attached(engine.info.pages)
        self._lost.clear()
        self._look_at_engine()

    def detach(self) -> None:
        """The dead engine is let go of, with all that it holds; requests are refused until there is another."""
        self._engine = None

    async def engine_lost(self) -> str:
        """Until the attached engine is dead; why. Its requests have their ends by then."""
        await self._lost.wait()
        return (self._engine.failure if self._engine else None) or ""

    def _look_at_engine(self) -> None:
        if self._engine is not None and self._engine.failure is not None:
            self._lost.set()
            self._questions.engine_lost()

    @property
    def info(self) -> EngineInfo:
        """Of the attached engine. Raises RequestFailed where there is none."""
        return self._attached().info

    def limits(self) -> Limits:
        """What a request may ask of the attached engine. Raises RequestFailed, counted, where there is none."""
        try:
            return self._attached().info.limits
        except RequestFailed as failure:
            raise self.refused(failure) from None

    def _attached(self) -> EngineClient:
        if self._engine is None:
            raise RequestFailed("UNAVAILABLE", "STARTING", "no engine yet", retry_after=1.0)
        return self._engine

    async def ask(self, question: events.Question) -> events.Answer:
        """An operator's question to the attached engine. Raises RequestFailed where it does not answer."""
        return await self._questions.ask(self._attached(), question)

    def request_of(self, attempt: int) -> str:
        """The request that has this attempt, "" if it is none of this frontend's."""
        live = self._live.get(attempt)
        return live.request_id if live is not None else ""

    @property
    def live_requests(self) -> int:
        return len(self._ids)

    async def wait_idle(self) -> None:
        """Until no request is live."""
        await self._idle.wait()

    def health(self) -> bool:
        """Whether new requests can be expected to be served: the engine lives and, if it has work, makes progress."""
        engine = self._engine
        if engine is None or self.draining or engine.failure is not None:
            return False
        return engine.stalled_for() < self.settings.stall_timeout

    def new_sink(self) -> Sink:
        """For the next engine, to be called on any thread: one wake-up of the loop a step. An engine that is replaced
        can still end its own requests, but its stats count no more.
        """
        number = self._sinks = self._sinks + 1

        def sink(outputs: events.StepOutputs) -> None:
            with suppress(RuntimeError):  # the loop is closed: nobody is left to tell
                self._loop.call_soon_threadsafe(self._deliver, outputs, number)

        return sink

    @asynccontextmanager
    async def open(
        self, spec: Spec, request_id: str, time_remaining: float | None, streaming: bool = True
    ) -> AsyncIterator[Live]:
        """A live request; leaving the context ends it in the engine if it has not ended.

        time_remaining: seconds until the caller's own deadline. streaming: the caller takes output as it comes, and is
        too slow if much of it waits. Raises RequestFailed.
        """
        if request_id in self._ids:
            raise self.refused(RequestFailed("ALREADY_EXISTS", "REQUEST_ID_LIVE", f"{request_id!r} is being served"))
        self._ids.add(request_id)
        self._idle.clear()
        failure: RequestFailed | None = None
        try:
            live = await self._submit(spec, request_id, time_remaining, streaming)
            try:
                yield live
            except Exception as error:
                failure = error if isinstance(error, RequestFailed) else internal()
                raise
            finally:
                self._close(live, failure)
        finally:
            self._ids.discard(request_id)
            if not self._ids:
                self._idle.set()

    def refused(self, failure: RequestFailed) -> RequestFailed:
        """Counts a request that ended before it was submitted."""
        self._metrics.request_ended(failure.reason.lower())
        return failure

    @contextmanager
    def counting_cancel(self) -> Iterator[None]:
        """Counts a request whose caller leaves before it was submitted."""
        try:
            yield
        except asyncio.CancelledError:
            self._metrics.request_ended("cancelled")
            raise

    async def _submit(self, spec: Spec, request_id: str, time_remaining: float | None, streaming: bool) -> Live:
        started = time.monotonic()
        engine, stream = await self._prepare(spec)
        spent = time.monotonic() - started
        patience = [t - spent for t in (stream.request.patience, time_remaining) if t is not None]
        request = replace(stream.request, patience=max(0.0, min(patience)) if patience else None)
        self._check_image_memory(request)
        live = Live(stream, request_id, started, streaming)
        self._image_bytes += request.image_bytes
        most = self.settings.request_time
        seconds = most if spec.max_time is None else min(spec.max_time, most)
        if stream.ended:  # its output prefix has a stop string
            live.tell()
            return live
        live.timer = self._loop.call_later(max(0.0, seconds - spent), self._time_is_up, live)
        self._live[stream.attempt] = live
        known = (spec.output_prefix,) if spec.output_prefix else ()
        engine.send([events.Submit(stream.attempt, request, known)])
        return live

    def _check_image_memory(self, request: Request) -> None:
        """Raises RequestFailed, counted."""
        size, most = request.image_bytes, self.settings.image_memory
        if size > most:
            error = InvalidRequest("images", f"{size} bytes in memory", f"at most {most} bytes")
            raise self.refused(invalid(error))
        if size and self._image_bytes + size > most:
            message = f"the images of other requests hold {self._image_bytes} of {most} bytes of memory"
            raise self.refused(RequestFailed("RESOURCE_EXHAUSTED", "QUEUE_FULL", message, retry_after=1.0))

    async def _prepare(self, spec: Spec) -> tuple[EngineClient, RequestStream]:
        """Tokenizes, validates and reads the output prefix in a worker thread. Raises RequestFailed."""
        attempt = next(self._attempts)
        try:
            with self.counting_cancel():
                work = Work.IMAGES if spec.images else Work.CHAT if isinstance(spec.prompt, Chat) else Work.TEXT
                return await self.in_worker(lambda engine: (engine, self._make_stream(attempt, spec, engine)), work)
        except RequestFailed as failure:
            raise self.refused(failure) from None
        except Exception:
            self.refused(internal())
            raise

    async def in_worker(self, task: Callable[[EngineClient], T], work: Work = Work.TEXT) -> T:
        """What takes a while, in a thread beside the loop; it gets the attached engine.

        Raises what `task` does, and RequestFailed where no engine is attached, the server drains or too much waits.
        """
        if self.draining:
            raise RequestFailed("UNAVAILABLE", "DRAINING", "the server is shutting down", retry_after=1.0)
        engine = self._attached()
        if self._preparing >= self.settings.max_preparing:
            message = f"{self._preparing} requests are being tokenized, the limit is {self.settings.max_preparing}"
            raise RequestFailed("RESOURCE_EXHAUSTED", "QUEUE_FULL", message, retry_after=1.0)
        self._preparing += 1
        try:
            return await self._loop.run_in_executor(self._workers[work], task, engine)
        finally:
            self._preparing -= 1

    def _make_stream(self, attempt: int, spec: Spec, engine: EngineClient) -> RequestStream:
        request = self.preparer.prepare(spec, engine.info.limits)
        return RequestStream(attempt, spec, request, self.preparer.tokenizer)

    def _time_is_up(self, live: Live) -> None:
        with self._contained(live):
            live.stream.close(Finish(FinishReason.DEADLINE))
        self._forget(live)
        live.tell()

    def _close(self, live: Live, failure: RequestFailed | None) -> None:
        """The caller is done with the request, served or not. failure: what the caller failed with."""
        stream = live.stream
        failure = failure or stream.failure
        self._image_bytes -= stream.request.image_bytes
        if live.timer is not None:
            live.timer.cancel()
        self._forget(live)
        if failure is not None:
            outcome = failure.reason.lower()
        elif stream.ended and (first := stream.sequences[0].finish) is not None:
            outcome = first.reason.value
            for sequence in stream.sequences:
                self._metrics.output_tokens.observe(sequence.token_count)
        else:
            outcome = "cancelled"
        self._metrics.request_ended(outcome)
        self._metrics.request_time.observe(time.monotonic() - live.started)

    def _forget(self, live: Live) -> None:
        """No more of this attempt's output is wanted."""
        if self._live.pop(live.stream.attempt, None) is not None and self._engine is not None:
            self._engine.send([events.Finish(live.stream.attempt)])

    def _deliver(self, outputs: events.StepOutputs, sink: int = 0) -> None:
        now = time.monotonic()
        if sink == self._sinks:
            self._metrics.engine_step(outputs)
        self._questions.take(outputs.answers)
        for start in outputs.starts:
            live = self._live.get(start.attempt)
            if live is not None:
                live.stream.cached_tokens = start.cached
                self._metrics.request_started(len(live.stream.request.prompt), start.cached, start.waited)
        for part in outputs.prompt_parts:
            live = self._live.get(part.attempt)
            if live is not None:
                with self._contained(live):
                    live.stream.accept_prompt(part)
        if len(outputs.attempts):
            self._accept_all(StepTokens.of(outputs), now)
        for end in outputs.ends:
            live = self._live.get(end.attempt) if end.more else self._live.pop(end.attempt, None)
            if live is not None:
                with self._contained(live):
                    live.stream.end(end)
                if live.streaming or live.stream.ended:
                    live.tell()
        self._look_at_engine()

    @contextmanager
    def _contained(self, live: Live) -> Iterator[None]:
        """What one stream raises ends that stream alone; the others of the step get their tokens."""
        try:
            yield
        except Exception:
            self._unreadable(live)

    def _unreadable(self, live: Live) -> None:
        """In the handler of what its stream raised."""
        log.exception("the output of request %s cannot be read", live.request_id)
        self._cut_off(live, internal())

    def _cut_off(self, live: Live, failure: RequestFailed) -> None:
        live.stream.fail(failure)
        self._forget(live)
        live.tell()

    def _accept_all(self, step: StepTokens, now: float) -> None:
        arrivals = Arrivals(now)
        for i, attempt in enumerate(step.attempts):
            live = self._live.get(attempt)
            if live is not None:
                try:
                    self._accept(live, step, i, arrivals)
                except Exception:
                    self._unreadable(live)
        self._metrics.tokens(arrivals.tokens, arrivals.firsts, arrivals.gaps)

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
            if sequence.pending_tokens > self.settings.backlog_tokens and stream.request.beam is None:
                message = f"more than {self.settings.backlog_tokens} tokens wait for this client to read them"
                self._cut_off(live, RequestFailed("RESOURCE_EXHAUSTED", "SLOW_READER", message))
            live.tell_tokens()

    def _stopped(self, live: Live, index: int) -> None:
        """A stop string has ended a sequence before the engine did."""
        if live.stream.ended:
            self._forget(live)
        elif self._engine is not None:
            self._engine.send([events.Finish(live.stream.attempt, index)])
        if live.streaming or live.stream.ended:
            live.tell()

    def shutdown(self) -> None:
        """Nothing is prepared any more."""
        for workers in self._workers.values():
            workers.shutdown(wait=False, cancel_futures=True)
        self.preparer.close()
