"""Both ends of an engine link in a test: services on a socket, clients that keep what they hear, what they carry."""

import asyncio
import math
import struct
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import fields, is_dataclass, replace
from pathlib import Path

import grpc
import numpy as np
from grpc import aio
from hypothesis import strategies as st
from numpy.typing import NDArray
from quire.engine.v1 import engine_service_pb2 as pb
from quire.engine.v1 import engine_service_pb2_grpc as pb_grpc

from cache_manager.block_hash import Scope
from cache_manager.ledger import Holder, PageMap
from rpc.frontend.engine_client import Reach
from rpc.link import CHANNEL_OPTIONS
from rpc.link.client import LinkClient
from rpc.link.coalesce import LOCAL_BITS
from rpc.link.server import LinkService
from scheduler.controls import NO_LOGITS_PARAMS, Controls, LogitsParams
from scheduler.events import (
    Abort,
    AdminAnswer,
    End,
    EndReason,
    EngineStats,
    Event,
    Logprobs,
    PromptPart,
    Start,
    StepOutputs,
    Submit,
    nothing,
)
from scheduler.parameters import Beam
from scheduler.request import PromptImage, Request
from scheduler.settings import RequestLimits
from tests.support.frontends import PuppetEngine

DEADLINE = 20.0  # seconds after which a wait of these tests is a failure
Sink = Callable[[StepOutputs], None]
Script = Callable[[AsyncIterator[pb.ConnectRequest], aio.ServicerContext], Awaitable[None]]


async def eventually(condition: Callable[[], object]) -> None:
    """Until it holds. Raises TimeoutError."""
    async with asyncio.timeout(DEADLINE):
        while not condition():
            await asyncio.sleep(0.002)


class MortalEngine(PuppetEngine):
    """A puppet that dies as `EngineClient` says: whatever lives, and whatever comes later, gets ENGINE_FAILED."""

    def __init__(self, sink: Sink) -> None:
        super().__init__()
        self.live: set[int] = set()
        self.stats = EngineStats(pages_total=self.info.pages)
        self._sink = sink

    def send(self, events: Sequence[Event]) -> None:
        super().send(events)
        self.live.update(event.attempt for event in events if isinstance(event, Submit))
        if self.failure is not None:
            self._tell_failure()

    def tell(self, outputs: StepOutputs) -> None:
        self.live.difference_update(outputs.over)
        self.stats = outputs.stats
        self._sink(outputs)

    def die(self, why: str) -> None:
        self.failure = why
        self._tell_failure()

    def _tell_failure(self) -> None:
        ends = tuple(End(attempt, EndReason.ENGINE_FAILED, message=self.failure or "") for attempt in sorted(self.live))
        self.live.clear()
        self._sink(nothing(self.stats, ends))


class Heard:
    """A sink that keeps what it is told. wrong: what no sink may be told."""

    def __init__(self) -> None:
        self.wrong: list[str] = []
        self.steps: list[StepOutputs] = []
        self.tokens: dict[int, list[int]] = defaultdict(list)
        self.ends: dict[int, list[End]] = defaultdict(list)

    def __call__(self, outputs: StepOutputs) -> None:
        self.steps.append(outputs)
        for attempt, position, token in zip(
            outputs.attempts.tolist(), outputs.positions.tolist(), outputs.tokens.tolist(), strict=True
        ):
            if position != len(self.tokens[attempt]):
                self.wrong.append(f"token {position} of {attempt} came where {len(self.tokens[attempt])} was due")
            if attempt in self.ends:
                self.wrong.append(f"token {position} of {attempt} came after the end")
            self.tokens[attempt].append(token)
        for end in outputs.ends:
            self.ends[end.attempt].append(end)
            if len(self.ends[end.attempt]) > 1:
                self.wrong.append(f"{end.attempt} ended twice")

    def reasons(self) -> dict[int, list[EndReason]]:
        return {attempt: [end.reason for end in ends] for attempt, ends in self.ends.items()}


class Scripted(pb_grpc.EngineServiceServicer):
    """An engine's end of the link that does what a test says."""

    def __init__(self, script: Script) -> None:
        self.Connect = script


@asynccontextmanager
async def serving(service: pb_grpc.EngineServiceServicer, directory: Path) -> AsyncIterator[tuple[str, aio.Server]]:
    """The address, and the server."""
    server, target = aio.server(options=CHANNEL_OPTIONS), f"unix:{directory / 's'}"
    pb_grpc.add_EngineServiceServicer_to_server(service, server)
    server.add_insecure_port(target)
    await server.start()
    try:
        yield target, server
    finally:
        await server.stop(None)


@asynccontextmanager
async def linked(directory: Path) -> AsyncIterator[tuple[str, LinkService, MortalEngine]]:
    """A link service over a puppet, and its address."""
    service = LinkService()
    engine = MortalEngine(service.sink)
    service.attach(engine)
    async with serving(service, directory) as (target, _):
        yield target, service, engine


@asynccontextmanager
async def connected(target: str, silence: float = DEADLINE) -> AsyncIterator[tuple[LinkClient, Heard]]:
    """A client and what it hears; nothing of that may be wrong."""
    heard = Heard()
    client = LinkClient(Reach(target), heard, RequestLimits(), silence)
    try:
        await client.connect()
        yield client, heard
    finally:
        await client.close()
    assert heard.wrong == []


@asynccontextmanager
async def raw_call(target: str) -> AsyncIterator[aio.StreamStreamCall]:
    """The stream itself, after the message that says what the engine is."""
    async with aio.insecure_channel(target, options=CHANNEL_OPTIONS) as channel:
        call = pb_grpc.EngineServiceStub(channel).Connect(wait_for_ready=True)
        assert (await call.read()).HasField("info")
        yield call
        call.cancel()


async def read_to_end(call: aio.StreamStreamCall) -> tuple[list[pb.ConnectResponse], grpc.StatusCode, str]:
    """All messages, the status and its details."""
    messages = []
    try:
        while isinstance(message := await call.read(), pb.ConnectResponse):
            messages.append(message)
    except grpc.RpcError:
        pass
    return messages, await call.code(), await call.details()


def at(frontend: int, attempt: int) -> int:
    """The engine's number for a frontend's attempt."""
    return frontend << LOCAL_BITS | attempt


def submit(attempt: int, **values: object) -> Submit:
    controls = Controls(temperature=0.5, top_p=0.9, top_k=3, min_p=0.1, seed=7)
    return Submit(attempt, replace(Request(np.array([1, 2, 3], np.int32), 8, (0,), controls), **values))


def unlike(a: object, b: object, path: str = "it") -> list[str]:
    """Finds where two values differ, to the last bit; the second is to have all fields of the first."""
    if is_dataclass(a):
        return [
            found
            for f in fields(a)
            for found in unlike(getattr(a, f.name), getattr(b, f.name, "missing"), f"{path}.{f.name}")
        ]
    if isinstance(a, tuple | list) and type(a) is type(b) and len(a) == len(b):
        return [found for i, pair in enumerate(zip(a, b, strict=True)) for found in unlike(*pair, f"{path}[{i}]")]
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        same = a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    elif isinstance(a, float) and isinstance(b, float):
        same = struct.pack("<d", a) == struct.pack("<d", b)
    else:
        same = type(a) is type(b) and a == b
    return [] if same else [f"{path}: {a!r} is not {b!r}"]


INT32 = st.integers(-(2**31), 2**31 - 1)
COUNT = st.integers(0, 2**63 - 1)
FLOAT64 = st.floats(allow_nan=True)
ATTEMPT = st.integers(0, 2**63 - 1)


def arrays(dtype: type, *shape: int) -> st.SearchStrategy[NDArray]:
    """Draws arrays of every bit pattern: NaNs with their payload too."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return st.binary(min_size=size, max_size=size).map(lambda data: np.frombuffer(data, dtype).reshape(shape))


@st.composite
def ends(draw: st.DrawFn, attempts: st.SearchStrategy[int] = ATTEMPT) -> End:
    stop = draw(st.none() | st.integers(0, 2**32 - 1))
    return End(draw(attempts), draw(st.sampled_from(EndReason)), stop, draw(st.text(max_size=8)), draw(FLOAT64))


@st.composite
def stats(draw: st.DrawFn) -> EngineStats:
    others = {
        "lifetimes": st.lists(COUNT, max_size=12).map(tuple),
        "lifetime_seconds": FLOAT64,
        "waiting_seconds": FLOAT64,
    }
    return EngineStats(**{f.name: draw(others.get(f.name, COUNT)) for f in fields(EngineStats)})


@st.composite
def answers(draw: st.DrawFn) -> AdminAnswer:
    n = draw(st.integers(0, 5))
    holder = st.builds(Holder, st.booleans(), st.integers(-(2**63), 2**63 - 1), arrays(np.int32, 2))
    holders = tuple(draw(st.lists(holder, max_size=2)))
    pages = PageMap(draw(st.integers(1, 99)), draw(arrays(np.uint8, n)), draw(arrays(np.int32, n)), holders)
    return AdminAnswer(draw(COUNT), draw(st.integers(0, 2**32 - 1)), draw(st.none() | st.just(pages)))


def logprobs(n: int, k: int) -> st.SearchStrategy[Logprobs]:
    return st.builds(
        Logprobs, arrays(np.float32, n), arrays(np.int32, n), arrays(np.int32, n, k), arrays(np.float32, n, k)
    )


def prompt_parts(attempts: st.SearchStrategy[int]) -> st.SearchStrategy[PromptPart]:
    sizes = st.tuples(st.integers(0, 3), st.integers(0, 2))
    return st.builds(PromptPart, attempts, st.integers(0, 2**32 - 1), sizes.flatmap(lambda size: logprobs(*size)))


@st.composite
def step_outputs(draw: st.DrawFn, attempts: st.SearchStrategy[int] = ATTEMPT, most_tokens: int = 4) -> StepOutputs:
    """One step's outputs, of any attempts in any order."""
    n, k = draw(st.integers(0, most_tokens)), draw(st.integers(0, 3))
    return StepOutputs(
        attempts=np.array(draw(st.lists(attempts, min_size=n, max_size=n)), np.int64),
        indices=draw(st.just(np.zeros(n, np.int32)) | arrays(np.int32, n)),
        positions=draw(arrays(np.int32, n)),
        tokens=draw(arrays(np.int32, n)),
        logprobs=draw(logprobs(n, k)),
        starts=tuple(draw(st.lists(st.builds(Start, attempts, FLOAT64, st.integers(0, 2**32 - 1)), max_size=3))),
        ends=tuple(draw(st.lists(ends(attempts), max_size=3))),
        stats=draw(stats()),
        step_seconds=tuple(draw(st.lists(FLOAT64, max_size=3))),
        overheads=tuple(draw(st.lists(FLOAT64, max_size=3))),
        answers=tuple(draw(st.lists(answers(), max_size=2))),
        prompt_parts=tuple(draw(st.lists(prompt_parts(attempts), max_size=2))),
    )


UINT32 = st.integers(0, 2**32 - 1)
IDS = st.lists(UINT32, max_size=3).map(tuple)
ADJUSTMENTS = st.builds(
    LogitsParams,
    allowed=IDS,
    banned=st.lists(st.lists(UINT32, min_size=1, max_size=3).map(tuple), max_size=3).map(tuple),
    not_yet=IDS,
    min_tokens=UINT32,
    bias=st.lists(st.tuples(UINT32, FLOAT64), max_size=3).map(tuple),
    repetition=FLOAT64,
    frequency=FLOAT64,
    presence=FLOAT64,
)


@st.composite
def prompt_images(draw: st.DrawFn) -> PromptImage:
    pixels = draw(arrays(np.uint8, draw(st.integers(1, 2)), 3, draw(st.integers(1, 3)), draw(st.integers(1, 3))))
    grid = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    features = math.prod(grid)
    places, digest = draw(arrays(np.int32, features)), draw(st.binary(max_size=32))
    positions = arrays(np.int32, draw(st.integers(1, 3)), features).map(lambda drawn: drawn % features)
    return PromptImage(pixels, digest, places, grid, draw(st.none() | positions))


@st.composite
def submits(draw: st.DrawFn) -> Submit:
    controls = Controls(
        draw(FLOAT64),
        draw(FLOAT64),
        draw(st.integers(0, 2**32 - 1)),
        draw(FLOAT64),
        draw(st.integers(0, 2**64 - 1)),
        draw(st.integers(-1, 2**31 - 1)),
        draw(st.just(NO_LOGITS_PARAMS) | ADJUSTMENTS),
        draw(st.booleans()),
    )
    prompt = np.array(draw(st.lists(INT32, min_size=1, max_size=8)), np.int32)
    stop_ids = tuple(draw(st.lists(st.integers(0, 2**32 - 1), max_size=4)))
    scope = Scope(draw(st.text(max_size=8)), draw(st.text(max_size=8)), draw(st.integers(0, 2**32 - 1)))
    request = Request(prompt, draw(st.integers(0, 2**32 - 1)), stop_ids, controls, draw(st.none() | FLOAT64), scope)
    beam = draw(st.none() | st.builds(Beam, st.integers(1, 2**32 - 1), st.floats(-10, 10)))
    images = tuple(draw(st.lists(prompt_images(), max_size=2)))
    scope = replace(scope, images=tuple(image.span for image in images), bidirectional=draw(st.integers(0, 2**32 - 1)))
    request = replace(request, count=draw(st.integers(1, 4)), beam=beam, images=images, scope=scope)
    output = st.none() | st.lists(INT32, max_size=5).map(tuple)
    emitted = draw(st.just(()) | st.lists(output, min_size=request.count, max_size=request.count).map(tuple))
    return Submit(draw(ATTEMPT), request, emitted)


aborts = st.builds(Abort, ATTEMPT, st.none() | UINT32)
