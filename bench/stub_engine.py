"""A server whose engine computes nothing, and a bare one to compare it with, to measure the cost of a frontend.

    python -m bench.stub_engine served 0     the service, its streams, detokenizer, stop strings and metrics
    python -m bench.stub_engine floor 50     a bare grpc.aio servicer that writes the same bytes again and again

The number is the rate of steps a second, with one token for each stream. With 0 the next step ends as soon as all
tokens of the last one were taken (the bare servicer: as soon as a message is written). Each prints its address when it
is ready, answers each line of its input with its counters as a line of JSON, and ends with its input.
"""

import asyncio
import json
import os
import selectors
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import grpc
import numpy as np
from grpc import aio
from quire.v1 import generation_service_pb2 as pb
from quire.v1 import generation_service_pb2_grpc as pb_grpc

from model.inputs.tokenizer import Tokenizer
from model.settings import ModelSettings
from rpc.frontend.engine_client import EngineInfo, Reach
from rpc.frontend.frontend import Frontend
from rpc.frontend.output import Delta
from rpc.frontend.prepare import load_preparer
from rpc.frontend.settings import FrontendSettings
from rpc.frontend.stream import RequestStream
from rpc.observe.metrics import Metrics
from rpc.server import channel_options
from rpc.services.generation import GenerationService
from rpc.settings import ListenSettings
from scheduler import events
from scheduler.engine import Sink
from scheduler.limits import Limits
from scheduler.request import Request
from scheduler.spec import Spec

CONTEXT, SEQUENCES = 2**20, 1024
FLOOR = "/bench.Floor/Stream"
LOST = 1.0  # seconds after which a token that is not taken no longer delays a step


class CountingSelector(selectors.DefaultSelector):
    """Selector that counts the event loop's iterations.

    Attributes:
        turns: Iterations of the loop.
        sleeps: Iterations that began with nothing to do.
    """

    def __init__(self) -> None:
        super().__init__()
        self.turns = self.sleeps = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.turns += 1
        self.sleeps += timeout != 0
        return super().select(timeout)


class Ticker(ABC):
    """A thread that ends steps at a rate a second; with rate 0 each when `go` is called.

    Attributes:
        steps: Number of steps with tokens.
        tokens: Number of tokens.
    """

    def __init__(self, rate: float) -> None:
        self._period = 1 / rate if rate else 0.0
        self._go = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.steps = self.tokens = 0

    def start(self) -> None:
        self._thread.start()

    def go(self) -> None:
        self._go.set()

    @abstractmethod
    def step(self) -> int:
        """Ends one step, and returns the number of its tokens."""

    def _run(self) -> None:
        due = time.monotonic()
        while True:
            self._go.clear()
            tokens = self.step()
            self.tokens += tokens
            self.steps += tokens > 0
            if self._period:
                due = max(due + self._period, time.monotonic() - 1)
                time.sleep(max(0.0, due - time.monotonic()))
            elif tokens:
                self._go.wait(LOST)
            else:
                time.sleep(0.001)

    def cpu(self) -> float:
        """Returns the CPU seconds of its thread."""
        return time.clock_gettime(time.pthread_getcpuclockid(self._thread.ident or 0))


class StubEngine(Ticker):
    """An `EngineClient` that gives each live attempt a random token of the vocabulary in every step."""

    failure = None

    def __init__(self, sink: Sink, vocabulary: int, rate: float) -> None:
        super().__init__(rate)
        self.place = "a stub"
        self.reach: Reach | None = None
        self.info = EngineInfo(Limits(vocabulary, CONTEXT, CONTEXT * SEQUENCES, SEQUENCES), 1, "none", "cpu")
        self._sink = sink
        self._rng = np.random.default_rng(0)
        self._lock = threading.Lock()  # `send` runs on the loop's thread, `step` on the ticker's
        self._positions: dict[int, int] = {}
        self._starts: list[events.Start] = []
        self._untaken = 0

    def send(self, sent: Sequence[events.Event]) -> None:
        with self._lock:
            for event in sent:
                if isinstance(event, events.Submit):
                    self._positions[event.attempt] = 0
                    self._starts.append(events.Start(event.attempt, 0.0))
                elif isinstance(event, events.Abort):
                    self._positions.pop(event.attempt, None)

    def overdue(self) -> str:
        return ""

    def stalled_for(self) -> float:
        return 0.0

    def taken(self, tokens: int) -> None:
        """Records that this number of tokens went into a message. Called on the loop's thread."""
        self._untaken -= tokens
        if self._untaken <= 0:
            self.go()

    def step(self) -> int:
        with self._lock:
            attempts, positions = list(self._positions), list(self._positions.values())
            self._positions = {attempt: position + 1 for attempt, position in self._positions.items()}
            starts, self._starts = tuple(self._starts), []
        n = len(attempts)
        if not n:
            return 0
        self._untaken = n
        none = np.empty((n, 0))
        logprobs = events.Logprobs(
            np.zeros(n, np.float32), np.ones(n, np.int32), none.astype(np.int32), none.astype(np.float32)
        )
        outputs = events.StepOutputs(
            np.array(attempts, np.int64),
            np.zeros(n, np.int32),
            np.array(positions, np.int32),
            self._rng.integers(1, self.info.limits.vocabulary, n, dtype=np.int32),
            logprobs,
            starts,
            (),
            events.EngineStats(running=n, pages_total=1, steps=self.steps + 1, computed_tokens=self.tokens + n),
            step_seconds=(0.001,),
            overheads=(0.0001,),
        )
        self._sink(outputs)
        return n


class CountedStream(RequestStream):
    """A stream that reports to the engine the tokens that are taken."""

    def __init__(self, spec: Spec, request: Request, tokenizer: Tokenizer, engine: StubEngine) -> None:
        super().__init__(spec, request, tokenizer)
        self._engine = engine

    def take(self) -> list[Delta]:
        self._engine.taken(self.pending_tokens)
        return super().take()


class CountedFrontend(Frontend):
    """A frontend with counted streams."""

    def _make_stream(self, spec: Spec, limits: Limits) -> tuple[RequestStream, list[bytes]]:
        replica = self.replicas.get(0)
        engine = replica.client if replica is not None else None
        if not isinstance(engine, StubEngine):
            raise TypeError(f"{engine} is no StubEngine")
        return CountedStream(spec, self.preparer.prepare(spec, limits), self.preparer.tokenizer, engine), []


class FloorTicker(Ticker):
    """Wakes all streams of the bare servicer at the end of a step; with rate 0 they do not wait."""

    def __init__(self, rate: float) -> None:
        super().__init__(rate)
        self.paced, self.streams = rate > 0, 0
        self._loop = asyncio.get_running_loop()
        self.next: asyncio.Future[None] = self._loop.create_future()

    def step(self) -> int:
        if self.paced and self.streams:
            self._loop.call_soon_threadsafe(self._wake)
        return self.streams if self.paced else 0

    def _wake(self) -> None:
        ended, self.next = self.next, self._loop.create_future()
        ended.set_result(None)


class Floor(grpc.GenericRpcHandler):
    """Writes one message again and again to each caller."""

    def __init__(self, ticker: FloorTicker) -> None:
        self._ticker, self._message = ticker, typical_message()

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        return grpc.unary_stream_rpc_method_handler(self._stream) if details.method == FLOOR else None

    async def _stream(self, request: bytes, context: aio.ServicerContext) -> None:  # noqa: ARG002 - gRPC's signature
        ticker, message = self._ticker, self._message
        ticker.streams += 1
        try:
            while True:
                if ticker.paced:
                    await ticker.next
                else:
                    ticker.tokens += 1
                await context.write(message)
        finally:
            ticker.streams -= 1


def typical_message() -> bytes:
    """Returns a message with one token's text, in the middle of an output."""
    delta = pb.SequenceDelta(text="king", token_count=1, first_position=1000)
    return pb.StreamGenerateResponse(deltas=[delta]).SerializeToString()


async def serve(mode: str, rate: float, selector: CountingSelector) -> None:
    server = aio.server(options=channel_options(ListenSettings(), CONTEXT))
    ticker: Ticker
    if mode == "floor":
        ticker = FloorTicker(rate)
        server.add_generic_rpc_handlers((Floor(ticker),))
    else:
        preparer = load_preparer(ModelSettings())
        frontend = CountedFrontend(preparer, FrontendSettings(), Metrics("stub"))
        engine = ticker = StubEngine(frontend.new_sink(), 2048, rate)
        frontend.attach(engine)
        pb_grpc.add_GenerationServiceServicer_to_server(GenerationService(frontend), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    ticker.start()
    print(f"127.0.0.1:{port}", flush=True)

    def counts() -> dict[str, float]:
        stub = ticker.cpu()
        return {
            "cpu": time.process_time() - stub,
            "stub": stub,
            "tokens": ticker.tokens,
            "steps": ticker.steps,
            "turns": selector.turns,
            "sleeps": selector.sleeps,
        }

    await answer_lines(counts)
    os._exit(0)


async def answer_lines(counts: Callable[[], dict[str, float]]) -> None:
    """Answers each line of the input with the counters, until the input ends."""
    ended = asyncio.Event()

    def read() -> None:
        if os.read(0, 4096):
            print(json.dumps(counts()), flush=True)
        else:
            ended.set()

    asyncio.get_running_loop().add_reader(0, read)
    await ended.wait()


def main(mode: str, rate: float) -> None:
    selector = CountingSelector()
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selector)) as runner:
        runner.run(serve(mode, rate, selector))


if __name__ == "__main__":
    match sys.argv[1:]:
        case [("floor" | "served") as mode, rate]:
            main(mode, float(rate))
        case _:
            sys.exit(__doc__)
