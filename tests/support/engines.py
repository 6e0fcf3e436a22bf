"""Runs requests through the real scheduler and executor without threads, step by step, checking the books each time."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from cache_manager.block_hash import BlockHasher
from cache_manager.ledger import verify
from cache_manager.manager import CacheManager
from cache_manager.policies import POLICIES
from cache_manager.settings import CacheSettings
from cache_manager.tier import HostTier
from model.config import read_config
from model.forward import Model
from model.loading import LoadedModel, load
from model.parallel.shard import Shard
from model.sampling.logits_processors import LogitsProcessorFactory
from model.settings import ModelSettings
from scheduler.drafts import Drafter
from scheduler.events import Abort, End, Event, StepOutputs, Submit
from scheduler.limits import ModelDefaults
from scheduler.parameters import Output, Sampling, Stopping
from scheduler.readiness import with_ready
from scheduler.request import Request
from scheduler.resolve import resolve
from scheduler.scheduler import Scheduler
from scheduler.settings import QueueLimits, RequestLimits, SchedulerSettings
from scheduler.spec import Spec
from tests.support.late import start_late
from tests.support.ranks import ThreadGroup


class LogitsChangedError(AssertionError):
    """The same position of the same attempt was computed twice and got two answers."""


@dataclass
class Result:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    end: End | None = None


Key = int | tuple[int, int]


def key_of(attempt: int, index: int) -> Key:
    """Returns a sequence's key in tests: its attempt, and for those after an attempt's first their index too."""
    return (attempt, index) if index else attempt


@dataclass
class Rig:
    """One engine without its thread. logits: for (sequence, output position), the raw logits drawn from. changed: those
    that came out with other bits when they were computed again (after a preemption, or in a half of a step). started:
    cached tokens by attempt. in_flight: steps that were launched and not collected.
    """

    loaded: LoadedModel
    scheduler: Scheduler
    logits: dict[tuple[Key, int], np.ndarray] = field(default_factory=dict)
    results: dict[Key, Result] = field(default_factory=dict)
    changed: list[tuple[Key, int]] = field(default_factory=list)
    started: dict[int, int] = field(default_factory=dict)
    now: float = 0.0
    in_flight: int = 0
    awaits: bool = False
    """All work waits for a grammar, which a thread compiles in real time: none passes here meanwhile."""

    def turn(self, events: Sequence[Event] = ()) -> StepOutputs | None:
        """Launches up to the depth of the pipeline, then collects one step. None when there is nothing to do."""
        self.now += 0.0 if self.awaits else 0.01
        for event in events:
            for index, known in enumerate(event.emitted if isinstance(event, Submit) else ()):
                if known:
                    self.results[key_of(event.attempt, index)] = Result(list(known), [float("nan")] * len(known))
        asked = with_ready(events, self.scheduler.held, self.loaded.readiness)
        plan = self.scheduler.schedule(self.now, asked)
        self.awaits = self.scheduler.is_held
        if plan is not None:
            self.loaded.runner.launch(plan)
            self.in_flight += 1
        if self.in_flight and (plan is None or self.in_flight >= self.scheduler.settings.depth):
            self.in_flight -= 1
            outputs = self.scheduler.commit(self.loaded.runner.collect(), self.now)
        elif plan is None and not self.scheduler.has_news:
            assert not self.scheduler.has_work or self.scheduler.is_held
            return None
        else:
            outputs = self.scheduler.commit(None, self.now)
        verify(self.scheduler.cache)
        self._record(outputs)
        return outputs

    def _record(self, outputs: StepOutputs) -> None:
        if self.changed:
            raise LogitsChangedError(f"logits of {self.changed} changed when they were computed again")
        self.started |= {start.attempt: start.cached for start in outputs.starts}
        for i, attempt in enumerate(outputs.attempts.tolist()):
            result = self.results.setdefault(key_of(attempt, int(outputs.indices[i])), Result())
            assert outputs.positions[i] == len(result.tokens), "a gap or a duplicate"
            assert result.end is None, "a token after the end"
            result.tokens.append(int(outputs.tokens[i]))
            result.logprobs.append(float(outputs.logprobs.chosen[i]))
        for end in outputs.ends:
            result = self.results.setdefault(key_of(end.attempt, end.index), Result())
            assert result.end is None, "two ends"
            result.end = end

    def run(self, requests: Mapping[int, Request], limit: int = 100_000) -> dict[Key, Result]:
        """Submits all at once, runs until nothing is left, and checks that every page is free or cached."""
        return self.play({0: [Submit(attempt, request) for attempt, request in requests.items()]}, limit)

    def play(self, script: Mapping[int, Sequence[Event]], limit: int = 100_000) -> dict[Key, Result]:
        """As `run`, for events by the number of the turn in which they arrive."""
        last = max(script, default=0)
        for number in range(limit):
            self.turn(script.get(number, ()))
            if number >= last and not self.scheduler.has_work:
                break
        else:
            raise AssertionError(f"still working after {limit} steps")
        self.turn()
        assert self.scheduler.cache.pool.free == self.scheduler.cache.pool.total
        assert not self.scheduler.cache.allocator.counts.any()
        return self.results

    @property
    def preemptions(self) -> int:
        return self.scheduler.stats().preemptions

    def wrap_model(self, wrap: Callable[[Model], Model]) -> None:
        """Puts something between the runner and its model."""
        runner = self.loaded.runner
        runner.model = wrap(runner.model)

    def logits_of(self, sequence: Key) -> dict[int, bytes]:
        """Bits of the recorded logits of a sequence by output position."""
        return {position: logits.tobytes() for (who, position), logits in self.logits.items() if who == sequence}

    def cancel(self, attempt: int) -> None:
        self.turn([Abort(attempt)])


def make_rig(
    directory: Path,
    page_size: int = 16,
    pool_tokens: int = 4096,
    settings: SchedulerSettings | None = None,
    record_logits: bool = False,
    poison: bool = True,
    dtype: str = "auto",
    queue: QueueLimits | None = None,
    prefix_cache: bool = True,
    host_pages: int = 0,
    quantization: str | None = None,
    backend: str = "auto",
    kv_dtype: str = "auto",
    device: str = "cpu",
    ahead: bool = False,
    ranks: int = 1,
    apart: bool = False,
    factories: Sequence[LogitsProcessorFactory] = (),
    drafter: Drafter | None = None,
) -> Rig:
    """ranks, apart: see `ThreadGroup`; tests/model/conftest.py ends them after each test."""
    settings = settings or SchedulerSettings(max_batched_tokens=512, max_sequences=128)
    # The forecast goes by measured times: without it a pool that is too small preempts in each run alike.
    settings = replace(settings, schedule_conservativeness=0.0)
    config = read_config(directory)
    weights = config.dtype if dtype == "auto" else dtype
    layout = Shard(0, ranks).of(config).kv_layout(page_size, weights if kv_dtype == "auto" else kv_dtype)
    memory = layout.pages_for(pool_tokens) * layout.page_bytes
    host = host_pages * layout.page_bytes or None
    model_settings = ModelSettings(
        str(directory), None, dtype, device, page_size, memory, poison, host_cache_memory=host,
        quantization=quantization, backend=backend, kv_cache_dtype=kv_dtype,
    )  # fmt: skip
    recompute = settings.recompute
    rows, group = settings.max_sequences, None
    if ranks > 1:
        group = ThreadGroup(directory, model_settings, ranks, rows, recompute, apart)
        GROUPS.append(group)
    led = group.led if group else None
    limits, ahead_tokens = RequestLimits(), settings.ahead
    loaded = load(directory, model_settings, rows, ahead_tokens, limits, recompute, group=led, factories=factories)
    tier = HostTier(loaded.host_slots, loaded.layout.tables) if loaded.host_slots else None
    policy = POLICIES[CacheSettings().eviction]
    cache = CacheManager(loaded.layout, loaded.pages, settings.max_sequences, policy, settings.ahead, tier)
    hasher = BlockHasher(bytes(32), loaded.numerics, page_size) if prefix_cache and not recompute else None
    holds = loaded.readiness.asks_factories
    rig = Rig(loaded, Scheduler(settings, queue or QueueLimits(), cache, hasher, drafter, holds=holds))
    if ahead:
        loaded.runner.starter = start_late
    if record_logits:
        _record_logits(rig)
    return rig


def _record_logits(rig: Rig) -> None:
    """Wraps the model, so that each row's logits are kept under its attempt and output position."""
    runner, model = rig.loaded.runner, rig.loaded.runner.model
    packs: list = [None]
    pack = runner.batch.pack

    def remember(work):  # type: ignore[no-untyped-def]
        packs[0] = pack(work)
        return packs[0]

    class Recording:
        def forward(self, batch):  # type: ignore[no-untyped-def]
            output = model.forward(batch)
            logits, packed, packs[0] = output.logits, packs[0], None
            if packed is None:  # the runner's probe
                return output
            rows, drafting = rig.scheduler.rows, rig.scheduler.draws_are_checked
            for i, (row, position) in enumerate(zip(packed.rows.tolist(), packed.positions.tolist(), strict=True)):
                key = (key_of(int(rows.attempt[row]), int(rows.index[row])), position)
                now = logits[i].cpu().numpy().copy()
                if drafting:
                    rig.logits[key] = now  # what was computed behind a wrong draft is computed again
                elif rig.logits.setdefault(key, now).tobytes() != now.tobytes():
                    rig.changed.append(key)  # not raised here: the runner would take it for a fault of the row
            return output

    runner.batch.pack = remember  # type: ignore[method-assign]
    runner.model = Recording()


def make_request(rig: Rig, prompt: list[int], max_tokens: int | None = 16, **sampling: Any) -> Request:
    """Greedy unless told otherwise; end tokens are ignored, so that lengths are known."""
    stopping = Stopping(max_tokens=max_tokens, ignore_eos=True)
    spec = Spec(
        tuple(prompt), sampling=Sampling(**({"temperature": 0.0} | sampling)), stopping=stopping, output=Output()
    )
    return resolve(spec, prompt, rig.loaded.limits, ModelDefaults(), minted_seed=0)


GROUPS: list[ThreadGroup] = []
"""Those that rigs have opened."""

Make = Callable[..., Rig]
