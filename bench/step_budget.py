"""Measures the gaps between tokens of streams beside long prompts, with and without `--target-itl`.

32 streams decode while prompts of the length of the context come one after the other. A gap is the time between two
tokens of one stream, which is that of a step. The decodes alone are measured first, and targets are multiples of their
median. Weights are random.

python -m bench.step_budget [--model llama-135m] [--prompts 3]
"""

import tempfile
import time
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from bench.figures import AsJson, show
from bench.shapes import MODELS, write_model
from cache_manager.manager import CacheManager
from model.loading import LoadedModel, load
from model.settings import ModelSettings
from scheduler.events import Submit
from scheduler.limits import ModelDefaults
from scheduler.parameters import Output, Sampling, Stopping
from scheduler.resolve import resolve
from scheduler.scheduler import Scheduler
from scheduler.settings import NO_QUEUE_LIMITS, RequestLimits, SchedulerSettings
from scheduler.spec import Spec

STREAMS, FIRST, CONTEXT, PAGE = 32, 64, 4096, 16
BUDGET, ALONE = 512, 40  # tokens of a step; steps of decodes alone before each prompt
TARGETS = (1.5, 2.0, 3.0)  # times the median of decodes alone


class Gaps:
    """Streams and long prompts on a model's engine.

    Attributes:
        alone: Seconds of steps of decodes alone.
        beside: Seconds of steps with decodes and prefill.
        first: Seconds to the first token of each long prompt.
    """

    def __init__(self, loaded: LoadedModel, target: float | None) -> None:
        settings = SchedulerSettings(BUDGET, STREAMS + 1, target_itl=target)
        cache = CacheManager(loaded.layout, loaded.pages, STREAMS + 1, ahead=settings.ahead)
        self._loaded, self._scheduler = loaded, Scheduler(settings, NO_QUEUE_LIMITS, cache)
        self.alone, self.beside, self.first = list[float](), list[float](), list[float]()

    def _submit(self, attempt: int, length: int, new: int) -> Submit:
        prompt = np.random.default_rng(attempt).integers(1, 1000, length).tolist()
        spec = Spec(
            tuple(prompt), sampling=Sampling(temperature=0.0), stopping=Stopping(new, ignore_eos=True), output=Output()
        )
        request = resolve(spec, prompt, self._loaded.limits, ModelDefaults(), minted_seed=0)
        return Submit(attempt, request)

    def _step(self, *submits: Submit) -> set[int]:
        """Returns attempts that got a token."""
        began = time.perf_counter()
        plan = self._scheduler.schedule(began, submits)
        if plan is None:
            raise RuntimeError("there is nothing to compute")
        self._loaded.runner.launch(plan)
        outputs = self._scheduler.commit(self._loaded.runner.collect(), time.perf_counter())
        decodes = int(np.count_nonzero(plan.slices[:, 2] == 1))
        if decodes >= STREAMS // 2:
            some = self.alone if decodes == len(plan.slices) else self.beside
            some.append(time.perf_counter() - began)
        return set(outputs.attempts.tolist())

    def run(self, prompts: int) -> None:
        """Runs streams with so many long prompts."""
        new = CONTEXT - FIRST - 1
        got = self._step(*(self._submit(i, FIRST, new) for i in range(STREAMS)))
        while len(got) < STREAMS:  # with a target their own prompts take several steps
            got = self._step()
        self.beside.clear()
        for number in range(prompts):
            for _ in range(ALONE):
                self._step()
            began, attempt = time.perf_counter(), STREAMS + number
            got = self._step(self._submit(attempt, CONTEXT - 2, 1))
            while attempt not in got:
                got = self._step()
            self.first.append(time.perf_counter() - began)


def figures(gaps: Gaps, target: float) -> dict[str, float]:
    """Returns milliseconds of gaps beside a prompt, and seconds to its first token."""
    beside = np.array(gaps.beside)
    return {
        "target_ms": 1000 * target,
        "decodes_alone_ms": 1000 * float(np.median(gaps.alone)),
        "gap_median_ms": 1000 * float(np.median(beside)),
        "gap_p99_ms": 1000 * float(np.percentile(beside, 99)),
        "gap_p99_9_ms": 1000 * float(np.percentile(beside, 99.9)),
        "gap_most_ms": 1000 * float(beside.max()),
        "over_twice_the_target_part": float(np.mean(beside > 2 * target)) if target else 0.0,
        "first_token_s": float(np.median(gaps.first)),
    }


def main(
    model: Annotated[str, typer.Option(help=f"One of {', '.join(MODELS)}.")] = "llama-135m",
    prompts: Annotated[int, typer.Option(help="Long prompts of each run.")] = 3,
    as_json: AsJson = False,
) -> None:
    """Measure the gaps between tokens beside long prompts, with and without a target."""
    with tempfile.TemporaryDirectory() as folder:
        directory = write_model(Path(folder), MODELS[model] | {"max_position_embeddings": CONTEXT})
        rows, found = STREAMS + 1, dict[str, dict[str, float]]()
        settings = ModelSettings(str(directory), None, "bfloat16", "cpu", PAGE, 4 * 2**30)
        loaded = load(directory, settings, rows, BUDGET, RequestLimits(), False)
        Gaps(loaded, None).run(1)  # compiles kernels
        free = Gaps(loaded, None)
        free.run(prompts)
        alone = float(np.median(free.alone))
        found["no target"] = figures(free, 0.0)
        for target in (times * alone for times in TARGETS):
            paced = Gaps(loaded, target)
            paced.run(prompts)
            found[f"{1000 * target:.0f} ms"] = figures(paced, target)
        show(f"{model}: {STREAMS} streams, prompts of {CONTEXT - 2:,} tokens", found, as_json)


if __name__ == "__main__":
    typer.run(main)
