"""The section on draws: all that a step does between its logits and the results on the host, for kinds of controls."""

import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.on_gpu.bench import Bench
from bench.on_gpu.report import WRONG, Table
from bench.on_gpu.timing import Timing, Work
from model.gpu.draws import start_draws
from model.sampling.sampler import SamplingRows, sample
from scheduler.controls import NO_LOGITS_PARAMS, Controls
from scheduler.step import Join

A_CASE = 2.0  # seconds
CALLS = 8  # of a burst: a step's draws are up to 50 launches, and a GPU queues 1,024
CHECKED = 8  # rows whose tokens are compared with the host's
SPREAD = 6.0  # standard deviation of logits
PLAIN = Controls(1.0, 1.0, 0, 0.0, 0)
PENALISED = replace(NO_LOGITS_PARAMS, repetition=1.1, frequency=0.2, presence=0.5)
CONTROLS = {
    "greedy": replace(PLAIN, temperature=0.0),
    "temperature 1": PLAIN,
    "min_p 0.1": replace(PLAIN, min_p=0.1),
    "top_k 20": replace(PLAIN, top_k=20),
    "top_p 0.9": replace(PLAIN, top_p=0.9),
    "top_k 20, top_p 0.9": replace(PLAIN, top_k=20, top_p=0.9),
    "top_k 20, top_p 0.9, min_p 0.1": replace(PLAIN, top_k=20, top_p=0.9, min_p=0.1),
    "penalties": replace(PLAIN, logits_params=PENALISED),
    "top_k 20, top_p 0.9, penalties": replace(PLAIN, top_k=20, top_p=0.9, logits_params=PENALISED),
    "5 logprobs": replace(PLAIN, top_logprobs=5),
}


@dataclass(frozen=True, slots=True)
class DrawSizes:
    """Sizes of the section.

    Attributes:
        vocabulary: Logits of a row.
        rows: Rows of a step.
        prompt: Tokens of each prompt, which penalties concern.
        output: Tokens of each output so far, likewise.
        rounds: Rounds of each measurement.
    """

    vocabulary: int = 128_256
    rows: tuple[int, ...] = (1, 256)
    prompt: int = 1000
    output: int = 200
    rounds: int = 5


def draws_speed(bench: Bench, sizes: DrawSizes | None = None) -> None:
    sizes = DrawSizes() if sizes is None else sizes
    table = Table("draws of a step", {
        "controls, rows": "", "ms": ".3f", "spread": ".0%", "host ms": ".3f", "device ms": ".4f", "of read": ".0%",
        "verdict": "",
    })  # fmt: skip
    table.notes.append(
        f"Rows of {sizes.vocabulary:,} logits, standard deviation {SPREAD:g}; penalties of {sizes.prompt:,} tokens of "
        f"a prompt and {sizes.output} of an output. ms: from the call to the results on the host, of an idle device, "
        "with the count of the tokens drawn before. host ms: the part of it until all is queued. device ms: of calls "
        "that follow each other. of read: the rate at which the logits would be read once in that, beside that of "
        f"reading. Verdict: {CHECKED} rows draw the "
        "tokens that torch draws on the host in float64."
    )
    with torch.inference_mode():
        for rows in sizes.rows:
            logits = SPREAD * torch.randn((rows, sizes.vocabulary), device=bench.device)
            for name, controls in CONTROLS.items():
                case = f"{name}, {rows:,}"
                if not bench.budget.allows(A_CASE):
                    table.skip(case, bench.budget.why_not(A_CASE))
                    continue
                with table.attempt(case):
                    table.add(**{"controls, rows": case}, **measured(bench, sizes, logits, controls))
    bench.report.publish(table)


def measured(bench: Bench, sizes: DrawSizes, logits: Tensor, controls: Controls) -> dict[str, Any]:
    n = len(logits)
    rows, positions = np.arange(n), np.full(n, sizes.output)
    state = rows_of(sizes, n, controls)

    drawn = np.zeros(n, np.int32)

    def queue() -> Any:
        drawn[:] = (drawn + 1) % sizes.output  # each step has drawn a token since the one before
        state.processors.drew(rows, drawn)
        return start_draws(logits, state, rows, positions)

    unlike = different(logits, state, rows[:CHECKED], positions[:CHECKED])
    whole, host = walls(bench, lambda: queue().fetch(), sizes.rounds), walls(bench, queue, sizes.rounds)
    device = Timing.of([bench.timer.burst(queue, CALLS) for _ in range(sizes.rounds)])
    row = {
        "ms": 1e3 * whole.median, "spread": whole.spread, "host ms": 1e3 * host.median,
        "device ms": 1e3 * device.median, "verdict": f"{WRONG}: {unlike} tokens are others" if unlike else "right",
    }  # fmt: skip
    if bench.ceilings is not None:
        row["of read"] = logits.nbytes / device.median / bench.ceilings.read
    return row


def rows_of(sizes: DrawSizes, rows: int, controls: Controls) -> SamplingRows:
    """Returns rows of sequences with these controls and a seed each, with random prompts and outputs."""
    made, random = SamplingRows(rows), np.random.default_rng(0)
    for row in range(rows):
        tokens = random.integers(0, sizes.vocabulary, sizes.prompt + sizes.output).astype(np.int32)
        made.join(Join(row, tokens, sizes.prompt, replace(controls, seed=row)))
    return made


def walls(bench: Bench, work: Work, rounds: int) -> Timing:
    """Times calls by the host's clock. Each begins with an idle device; the first two do not count."""
    taken = list[float]()
    for _ in range(rounds + 2):
        if bench.device.type == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        taken.append(time.perf_counter() - began)
    return Timing.of(taken[2:])


def different(logits: Tensor, state: SamplingRows, rows: np.ndarray, positions: np.ndarray) -> int:
    """Returns how many tokens are not those that torch draws on the host."""
    few = logits[: len(rows)]
    found = start_draws(few, state, rows, positions).fetch().tokens
    return int((found != sample(few.cpu(), state, rows, positions).tokens).sum())
