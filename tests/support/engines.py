"""Runs requests through the real scheduler and executor without threads, step by step, checking the books each time."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from model.loading import LoadedModel, load
from model.settings import ModelSettings
from scheduler.events import End, Event, Finish, StepOutputs, Submit
from scheduler.request import Output, Request, Sampling, Spec, Stopping, resolve
from scheduler.scheduler import Scheduler
from scheduler.settings import QueueLimits, RequestLimits, SchedulerSettings


@dataclass
class Result:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    end: End | None = None


@dataclass
class Rig:
    """One engine without its thread. `logits` holds, for (attempt, output position), the raw logits drawn from."""

    loaded: LoadedModel
    scheduler: Scheduler
    logits: dict[tuple[int, int], np.ndarray] = field(default_factory=dict)
    results: dict[int, Result] = field(default_factory=dict)
    now: float = 0.0

    def turn(self, events: Sequence[Event] = ()) -> StepOutputs | None:
        """Launches up to the depth of the pipeline, then collects one step. None when there is nothing to do."""
        self.now += 0.01
        in_flight = self.scheduler._in_flight
        plan = self.scheduler.schedule(self.now, events)
        if plan is not None:
            self.loaded.runner.launch(plan)
        if in_flight and (plan is None or len(in_flight) >= self.scheduler.settings.steps_in_flight):
            outputs = self.scheduler.commit(self.loaded.runner.collect(), self.now)
        elif plan is None and not self.scheduler.has_news:
            return None
        else:
            outputs = self.scheduler.commit(None, self.now)
        self.scheduler.cache.verify()
        self._record(outputs)
        return outputs

    def _record(self, outputs: StepOutputs) -> None:
        for i, attempt in enumerate(outputs.attempts.tolist()):
            result = self.results.setdefault(attempt, Result())
            assert outputs.positions[i] == len(result.tokens), "a gap or a duplicate"
            assert result.end is None, "a token after the end"
            result.tokens.append(int(outputs.tokens[i]))
            result.logprobs.append(float(outputs.logprobs.chosen[i]))
        for end in outputs.ends:
            result = self.results.setdefault(end.attempt, Result())
            assert result.end is None, "two ends"
            result.end = end

    def run(self, requests: dict[int, Request], limit: int = 100_000) -> dict[int, Result]:
        """Submits all at once, runs until nothing is left, and checks that every page is free."""
        events: list[Event] = [Submit(attempt, request) for attempt, request in requests.items()]
        for _ in range(limit):
            self.turn(events)
            events = []
            if not self.scheduler.has_work:
                break
        else:
            raise AssertionError(f"still working after {limit} steps")
        self.turn()
        assert self.scheduler.cache.free == self.scheduler.cache.total
        return self.results

    def cancel(self, attempt: int) -> None:
        self.turn([Finish(attempt)])


def make_rig(
    directory: Path,
    page_size: int = 16,
    pool_tokens: int = 4096,
    settings: SchedulerSettings | None = None,
    record_logits: bool = False,
    poison: bool = True,
    dtype: str = "auto",
    queue: QueueLimits | None = None,
) -> Rig:
    settings = settings or SchedulerSettings(max_batched_tokens=512, max_sequences=128)
    probe = ModelSettings(str(directory), dtype, "cpu", page_size, poison_freed_pages=poison)
    from model.config import read_config

    config = read_config(directory)
    layout = config.kv_layout(page_size, config.dtype if dtype == "auto" else dtype)
    memory = layout.pages_for(pool_tokens) * layout.page_bytes
    model_settings = ModelSettings(str(directory), dtype, "cpu", page_size, memory, probe.poison_freed_pages)
    loaded = load(directory, model_settings, settings.max_sequences, RequestLimits())
    rig = Rig(loaded, Scheduler(settings, queue or QueueLimits(), loaded.layout, loaded.pages))
    if record_logits:
        _record_logits(rig)
    return rig


def _record_logits(rig: Rig) -> None:
    """Wraps the model, so that each row's logits are kept under its attempt and output position."""
    runner, model = rig.loaded.runner, rig.loaded.runner._model
    packs: list = []
    pack = runner._mirror.pack

    def remember(work):  # type: ignore[no-untyped-def]
        packs.append(pack(work))
        return packs[-1]

    class Recording:
        def forward(self, *args):  # type: ignore[no-untyped-def]
            logits = model.forward(*args)
            packed = packs[-1]
            for i, (row, position) in enumerate(zip(packed.rows.tolist(), packed.positions.tolist(), strict=True)):
                key = (int(rig.scheduler.rows.attempt[row]), position)
                now = logits[i].numpy().copy()
                before = rig.logits.setdefault(key, now)
                assert before.tobytes() == now.tobytes(), f"logits of {key} changed when it was computed again"
            return logits

    runner._mirror.pack = remember  # type: ignore[method-assign]
    runner._model = Recording()


def make_request(rig: Rig, prompt: list[int], max_tokens: int | None = 16, **sampling: float) -> Request:
    """Greedy unless told otherwise; end tokens are ignored, so that lengths are known."""
    stopping = Stopping(max_tokens=max_tokens, ignore_eos=True)
    spec = Spec(
        tuple(prompt), sampling=Sampling(**({"temperature": 0.0} | sampling)), stopping=stopping, output=Output()
    )
    return resolve(spec, prompt, rig.loaded.limits, rig.loaded.defaults, minted_seed=0)


Make = Callable[..., Rig]
