"""A frontend over an engine that does what a test tells it."""

from collections.abc import Callable, Sequence

import numpy as np

from model.inputs.tokenizer import Tokenizer
from rpc.frontend.engine_client import EngineInfo, Reach
from rpc.frontend.frontend import Frontend
from rpc.frontend.prepare import Preparer
from rpc.frontend.settings import FrontendSettings
from rpc.observe.metrics import Metrics
from scheduler.events import Abort, End, EndReason, EngineStats, Event, Logprobs, Start, StepOutputs, Submit
from scheduler.limits import Limits, ModelDefaults


class PuppetEngine:
    """Keeps what it was sent; a test makes the outputs."""

    def __init__(self) -> None:
        limits = Limits(vocabulary=320, context=256, pool_tokens=4096, sequences=8)
        self.info = EngineInfo(limits, pages=256, dtype="float32", device="cpu")
        self.place = "a test"
        self.reach: Reach | None = None
        self.sent: list[Event] = []
        self.stalled, self.hangs = 0.0, ""
        self.failure: str | None = None
        self.deliver: Callable[[StepOutputs], None] = lambda outputs: None
        """As the sink that the frontend gave, but at once."""

    def send(self, events: Sequence[Event]) -> None:
        self.sent.extend(events)

    def stalled_for(self) -> float:
        return self.stalled

    def overdue(self) -> str:
        return self.hangs

    def submitted(self) -> list[int]:
        return [event.attempt for event in self.sent if isinstance(event, Submit)]

    def finished(self) -> list[int]:
        return [event.attempt for event in self.sent if isinstance(event, Abort)]


def make_frontend(tokenizer: Tokenizer, **settings: float) -> tuple[Frontend, PuppetEngine, Metrics]:
    """Must be called on an asyncio loop."""
    engine, metrics = PuppetEngine(), Metrics("m")
    preparer = Preparer("m", tokenizer, ModelDefaults(eos_token_ids=(0,)))
    frontend = Frontend(preparer, FrontendSettings(**settings), metrics)
    frontend.attach(engine)
    engine.deliver = lambda outputs: frontend.dispatch.deliver(outputs, frontend.replicas.get(0))
    return frontend, engine, metrics


def outputs(
    tokens: Sequence[tuple[int, int, int]] = (),
    ends: Sequence[tuple[int, EndReason]] = (),
    starts: Sequence[int] = (),
    cached: int = 0,
    age: float = 0.25,
) -> StepOutputs:
    """tokens: (attempt, position, token), of its first sequence. cached: prompt tokens that each start found. age: of
    each start.
    """
    attempts, positions, ids = (np.array([t[i] for t in tokens], np.int64) for i in range(3))
    n = len(tokens)
    logprobs = Logprobs(
        np.full(n, -0.5, np.float32), np.ones(n, np.int32), np.zeros((n, 0), np.int32), np.zeros((n, 0), np.float32)
    )
    return StepOutputs(
        attempts,
        np.zeros(n, np.int32),
        positions.astype(np.int32),
        ids.astype(np.int32),
        logprobs,
        tuple(Start(attempt, age, cached) for attempt in starts),
        tuple(End(attempt, reason) for attempt, reason in ends),
        EngineStats(pages_total=10, pages_used=n),
    )
