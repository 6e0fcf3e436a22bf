"""The engine as `quire serve` puts it together, with one step in flight and with two."""

import queue
import subprocess
import sys
import threading
import time

import pytest

from model.overlapped import Overlapped
from model.settings import ModelSettings
from rpc.engines.assembly import assemble
from rpc.frontend.prepare import load_preparer
from rpc.settings import EngineConfig
from scheduler.events import EndReason, StepOutputs, Submit
from scheduler.parameters import Sampling, Stopping
from scheduler.settings import SchedulerSettings
from scheduler.spec import Spec


def run(steps_in_flight: int, prefill_chunk: int | None) -> dict[int, list[int]]:
    """Tokens of 20 requests, some greedy, some that meet a stop id in the middle."""
    settings = EngineConfig(
        model=ModelSettings(kv_cache_memory=2**20, page_size=4, poison_freed_pages=True),
        scheduler=SchedulerSettings(
            max_batched_tokens=64, max_sequences=16, prefill_chunk=prefill_chunk, steps_in_flight=steps_in_flight
        ),
    )
    parts, preparer = assemble(settings), load_preparer(settings.model)
    outputs: queue.SimpleQueue[StepOutputs] = queue.SimpleQueue()
    engine = parts.engine(outputs.put)
    engine.start()
    stopping = Stopping(max_tokens=30, stop_token_ids=(11, 199), ignore_eos=True)
    specs = [Spec(f"Speech {i}: " * (1 + i % 4), sampling=Sampling(temperature=i % 2, seed=i)) for i in range(20)]
    specs = [Spec(s.prompt, sampling=s.sampling, stopping=stopping) for s in specs]
    engine.send([Submit(i, preparer.prepare(spec, engine.info.limits)) for i, spec in enumerate(specs)])
    tokens: dict[int, list[int]] = {i: [] for i in range(20)}
    ended: dict[int, EndReason] = {}
    while len(ended) < 20:
        step = outputs.get(timeout=60)
        for attempt, position, token in zip(
            step.attempts.tolist(), step.positions.tolist(), step.tokens.tolist(), strict=True
        ):
            assert position == len(tokens[attempt])
            assert attempt not in ended
            tokens[attempt].append(token)
        ended |= {end.attempt: end.reason for end in step.ends}
    engine.stop()
    assert {EndReason.STOP} <= set(ended.values()) <= {EndReason.STOP, EndReason.LENGTH}
    assert parts.scheduler.cache.pool.free == parts.scheduler.cache.pool.total
    return tokens


@pytest.mark.parametrize("chunk", [None, 5])
def test_two_steps_in_flight_give_the_tokens_of_one(chunk: int | None) -> None:
    assert run(2, chunk) == run(1, None)
    deadline = time.monotonic() + 30
    while any(t.name == "quire-step" for t in threading.enumerate()):
        assert time.monotonic() < deadline, "the step's thread does not end with its engine"
        time.sleep(0.01)


def test_drafts_are_refused_beside_a_servers_logits_processors() -> None:
    """Before anything is loaded, so that the name need not be known."""
    settings = EngineConfig(model=ModelSettings(logits_processors="limit"), scheduler=SchedulerSettings(draft_tokens=2))
    with pytest.raises(ValueError, match="--speculative-tokens does not go with --logits-processors"):
        assemble(settings)


def test_hung_step_does_not_keep_the_process() -> None:
    script = (
        "import threading\n"
        "from model.overlapped import Overlapped\n"
        "class Hung:\n"
        "    def launch(self, plan): started.set(); threading.Event().wait()\n"
        "started = threading.Event()\n"
        "Overlapped(Hung()).launch(object())\n"
        "started.wait()\n"
    )
    assert subprocess.run([sys.executable, "-c", script], timeout=60).returncode == 0


def test_what_a_step_raises_is_raised_where_it_is_collected() -> None:
    class Broken:
        def launch(self, plan: object) -> None:
            raise RuntimeError("device lost")

        def close(self) -> None:
            pass

    overlapped = Overlapped(Broken())
    overlapped.launch(object())
    with pytest.raises(RuntimeError, match="device lost"):
        overlapped.collect()
    overlapped.close()
