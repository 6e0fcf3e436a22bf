"""The time to the first token of one request, free and with a constraint whose grammar the engine knows.

The time is from the request at the frontend's check until the step that draws has given its outputs: the checker's
answer, the wait for the grammar, the prefill, the first mask, and what is looked at of the output's end.
"""

import queue
import random
import time
from collections.abc import Mapping
from contextlib import suppress
from statistics import median

from model.settings import ModelSettings
from rpc.engines.assembly import assemble
from rpc.frontend.prepare import load_preparer
from rpc.settings import EngineConfig
from scheduler.events import Abort, StepOutputs, Submit
from scheduler.parameters import Sampling, Stopping
from scheduler.spec import Spec
from scheduler.structured import Structured

FREE = "free"
IDLE_SECONDS = 0.1  # without outputs, after which the engine has no work


def first_tokens(
    model: str, width: int, constraints: Mapping[str, Structured], rounds: int, prompt: int, new: int
) -> dict[str, dict[str, float]]:
    """Measures in turns.

    Args:
        model: Directory of the model.
        width: Tokens of its vocabulary.
        constraints: Constraint of each side; another side has none.
        rounds: Requests of each side that count.
        prompt: Tokens of a prompt.
        new: `max_tokens` of a request.

    Returns:
        Milliseconds by side.
    """
    rng = random.Random(3)
    outputs = queue.SimpleQueue[tuple[float, StepOutputs]]()
    config = EngineConfig(model=ModelSettings(model, kv_cache_memory=2**28))
    engine = assemble(config).engine(lambda made: outputs.put((time.perf_counter(), made)))
    preparer = load_preparer(config.model)
    engine.start()
    sides: dict[str, Structured | None] = {FREE: None, **constraints}
    found: dict[str, list[float]] = {side: [] for side in sides}
    attempt = 0
    try:
        for number in range(rounds + 1):
            for side, structured in sides.items():
                ids = tuple(rng.randrange(1, width) for _ in range(prompt))
                spec = Spec(
                    ids, sampling=Sampling(temperature=1.0, seed=number), stopping=Stopping(new), structured=structured
                )
                began = time.perf_counter()
                engine.send([Submit(attempt, preparer.prepare(spec, engine.info.limits))])
                drawn = next(moment for moment, made in iter(outputs.get, None) if len(made.tokens))
                engine.send([Abort(attempt)])
                with suppress(queue.Empty):
                    while True:
                        outputs.get(timeout=IDLE_SECONDS)
                if number:  # the first round compiles kernels and grammars
                    found[side].append(1e3 * (drawn - began))
                attempt += 1
    finally:
        engine.stop()
    free = median(found[FREE])
    return {
        side: {"median_ms": median(times), "most_ms": max(times), "later_ms": median(times) - free}
        for side, times in found.items()
    }
