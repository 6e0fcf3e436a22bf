"""Measures whole models: decode, prefill and a mixed load, as shares of the device's limits."""

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.on_gpu.bench import Bench
from bench.on_gpu.engine import EngineRun, TimedEngine
from bench.on_gpu.loads import alike, mixed, varied
from bench.on_gpu.memory import free, free_device_bytes
from bench.on_gpu.models import SHAPES, Costs, place_for, write_checkpoint
from bench.on_gpu.report import PREFILL_GOAL, STEP_GOAL, Goal, Table, say

SPARE = 6 * 2**30  # bytes of device memory for other things than weights and KV
SECONDS, SMALL_SECONDS = 80.0, 25.0  # to write, load and measure a model of 16 GB, and others
A_ROW = 12.0  # seconds of the longest measurement of a large model
ROOM = 128  # tokens of a sequence beyond its context, while others are prefilled and steps are timed
VARIED_REQUESTS = 36  # with all kinds of controls, after which kernels that were compiled late are counted
LARGE = 2**33  # bytes of weights from which the goals apply to a model


def serving(bench: Bench) -> None:
    tables = {
        "decode": Table("engine, decode", {
            "model, batch": "", "context": ",.0f", "ms a step": ".3f", "10-90 %": "", "tokens/s": ",.0f",
            "floor ms": ".3f", "of the floor": ".0%", "host ms": ".2f",
        }),
        "prefill": Table("engine, prefill of one prompt", {
            "model, tokens": "", "ms": ".2f", "spread": ".0%", "tokens/s": ",.0f", "TFLOP/s": ".1f",
            "of product": ".0%",
        }),
        "mixed": Table("engine, mixed load", {
            "model": "", "tokens/s out": ",.0f", "least-most": "", "tokens/s in + out": ",.0f",
            "first token ms": ".1f", "90 %": ".1f", "between tokens ms": ".2f", "90 % of them": ".2f",
        }),
    }  # fmt: skip
    explain(tables, bench)
    for name in bench.sizes.models:
        shape = SHAPES[name]
        needed = SECONDS if Costs.of(shape).file > LARGE else SMALL_SECONDS
        if not bench.budget.allows(needed):
            for table in tables.values():
                table.skip(name, bench.budget.why_not(needed))
            continue
        with tables["decode"].attempt(name):
            one_model(bench, name, tables)
        free()
    report_goals(bench, tables)
    bench.report.publish(*tables.values())


def explain(tables: dict[str, Table], bench: Bench) -> None:
    load = bench.sizes.mixed
    tables["decode"].notes.append(
        "Times between the outputs of steps in which every sequence gets a token, two steps in flight. Floor: weights "
        "and KV at the rate of reading or copying, whichever is higher, or the products at theirs, if that is longer. "
        "Host: planning, packing and taking in, of a step."
    )
    tables["prefill"].notes.append("From the moment that a prompt is sent to its first token. Operations of the causal "
                                   "half only.")  # fmt: skip
    tables["mixed"].notes.append(
        f"{load.requests} requests, {load.prompts[0]}-{load.prompts[1]} tokens in, {load.outputs[0]}-{load.outputs[1]} "
        f"out; {load.together} at a time, the next is sent when one ends."
    )


def one_model(bench: Bench, name: str, tables: dict[str, Table]) -> None:
    sizes, shape = bench.sizes, SHAPES[name]
    costs, vocabulary = Costs.of(shape), shape["vocab_size"]
    tokens = kv_tokens(bench, costs)
    began = time.perf_counter()
    directory = checkpoint(bench, name)
    written = time.perf_counter()
    with TimedEngine(
        directory, bench.device.type, backend(bench.device), tokens * costs.token, max(sizes.batches), sizes.step_tokens
    ) as engine:
        tables["decode"].notes.append(
            f"{name}: {costs.file / 1e9:.2f} GB of weights, written in {written - began:.1f} s, loaded in "
            f"{time.perf_counter() - written:.1f} s; KV for {tokens:,} tokens."
        )
        say(tables["decode"].notes[-1])
        ready = len(engine.warnings.messages)
        engine.run(alike(f"{name} warm", vocabulary, 2, min(sizes.prefills), 4))
        for batch in sizes.batches:
            case = f"{name}, {batch}"
            if batch * (sizes.context + ROOM) > tokens:
                tables["decode"].skip(case, f"KV for {tokens:,} tokens is all that there is memory for")
            else:
                row(bench, tables["decode"], case, partial(decode_row, bench, engine, name, batch))
        for length in sizes.prefills:
            case = f"{name}, {length:,}"
            row(bench, tables["prefill"], case, partial(prefill_row, bench, engine, name, length))
        row(bench, tables["mixed"], name, partial(mixed_row, bench, engine, name))
        engine.run(varied(f"{name} varied", vocabulary, VARIED_REQUESTS, min(sizes.prefills)), VARIED_REQUESTS // 3)
        warned = engine.warnings.messages[ready:]
        tables["mixed"].notes.append(f"{name}: {'; '.join(warned) or 'no kernel was compiled'} after its load.")
        say(tables["mixed"].notes[-1])


def row(bench: Bench, table: Table, case: str, measured: Callable[[], dict[str, Any]]) -> None:
    """Measures one row of a table, if there is time."""
    if not bench.budget.allows(A_ROW):
        table.skip(case, bench.budget.why_not(A_ROW))
        return
    with table.attempt(case):
        table.add(**measured())


def backend(device: torch.device) -> str:
    return "triton" if device.type == "cuda" else "auto"


def checkpoint(bench: Bench, name: str) -> Path:
    """Returns the checkpoint of a model, which is written once in a run."""
    if name not in bench.checkpoints:
        place = place_for(Costs.of(SHAPES[name]).file)
        bench.places.append(place)
        bench.checkpoints[name] = write_checkpoint(place, SHAPES[name], bench.device)
    return bench.checkpoints[name]


def kv_tokens(bench: Bench, costs: Costs) -> int:
    """Returns the tokens of the KV pool: enough for the largest batch and the longest prompt, if memory allows."""
    sizes = bench.sizes
    wanted = max(max(sizes.batches) * (sizes.context + ROOM), max(sizes.prefills) * 2)
    free_bytes = free_device_bytes(bench.device)
    if free_bytes is None:
        return wanted
    return max(2 * max(sizes.prefills), min(wanted, (free_bytes - costs.file - SPARE) // costs.token))


@dataclass(frozen=True, slots=True)
class DecodeSteps:
    """Timed decode steps.

    Attributes:
        seconds: Seconds of each step.
        context: Average tokens of a sequence, the new one included.
        overheads: Seconds of the host's work for each step.
    """

    seconds: list[float]
    context: float
    overheads: list[float]


def decode_steps(run: EngineRun, batch: int, prompt: int) -> DecodeSteps:
    """Returns the steps in which all sequences got a token, like in the three before them.

    Raises:
        RuntimeError: The run has no such step.
    """
    whole = [len(moment.attempts) == batch for moment in run.moments]
    given = list(itertools.accumulate(len(moment.attempts) for moment in run.moments))
    # The first such step may have computed the last prompt, and the second was launched beside it: both are left out.
    chosen = [i for i in range(3, len(whole)) if all(whole[i - 3 : i + 1])]
    if not chosen:
        raise RuntimeError(f"there was no step in which all of {batch} sequences got a token")
    seconds = [run.moments[i].at - run.moments[i - 1].at for i in chosen]
    context = prompt + statistics.mean(given[i] for i in chosen) / batch
    return DecodeSteps(seconds, context, [run.moments[i].overhead for i in chosen])


def decode_row(bench: Bench, engine: TimedEngine, name: str, batch: int) -> dict[str, Any]:
    sizes, costs = bench.sizes, Costs.of(SHAPES[name])
    steps_of_prompts = -(-batch * sizes.context // sizes.step_tokens)
    outputs = sizes.steps + steps_of_prompts + 4
    asked = alike(f"{name} {batch}", SHAPES[name]["vocab_size"], batch, sizes.context, outputs)
    found = decode_steps(engine.run(asked), batch, sizes.context)
    median = statistics.median(found.seconds)
    ordered = sorted(found.seconds)
    row = {
        "model, batch": f"{name}, {batch}", "context": found.context, "ms a step": 1e3 * median,
        "10-90 %": f"{1e3 * ordered[len(ordered) // 10]:.3f}-{1e3 * ordered[len(ordered) * 9 // 10]:.3f}",
        "tokens/s": batch / median, "host ms": 1e3 * statistics.median(found.overheads),
    }  # fmt: skip
    if bench.ceilings is None:
        return row
    contexts = batch * found.context
    floor = max(
        costs.step_bytes(contexts, batch) / bench.ceilings.memory,
        costs.decode_operations(batch, contexts) / bench.ceilings.multiply,
    )
    return row | {"floor ms": 1e3 * floor, "of the floor": floor / median}


def prefill_row(bench: Bench, engine: TimedEngine, name: str, length: int) -> dict[str, Any]:
    costs, taken = Costs.of(SHAPES[name]), []
    for turn in range(bench.sizes.rounds + 1):
        asked = alike(f"{name} {length} {turn}", SHAPES[name]["vocab_size"], 1, length, 1)
        taken.append(engine.run(asked).seconds)
    taken = taken[1:]
    median = statistics.median(taken)
    rate = costs.prefill_operations(length) / median
    return {
        "model, tokens": f"{name}, {length:,}", "ms": 1e3 * median, "spread": (max(taken) - min(taken)) / median,
        "tokens/s": length / median, "TFLOP/s": rate / 1e12,
        "of product": rate / bench.ceilings.multiply if bench.ceilings else None,
    }  # fmt: skip


def mixed_row(bench: Bench, engine: TimedEngine, name: str) -> dict[str, Any]:
    load, rates, ins = bench.sizes.mixed, [], []
    first: list[float] = []
    between: list[float] = []
    for turn in range(bench.sizes.rounds // 2 + 1):
        asked = mixed(f"{name} mixed {turn}", SHAPES[name]["vocab_size"], load)
        run = engine.run(asked, load.together)
        if turn == 0:
            continue  # it compiles kernels and captures graphs
        rates.append(sum(one.tokens for one in asked) / run.seconds)
        ins.append(sum(one.tokens + len(one.prompt) for one in asked) / run.seconds)
        first += [1e3 * (times[0] - sent) for times, sent in zip(run.times, run.sent, strict=True)]
        between += [1e3 * gap for times in run.times for gap in gaps(times)]
    return {
        "model": name, "tokens/s out": statistics.median(rates), "least-most": f"{min(rates):,.0f}-{max(rates):,.0f}",
        "tokens/s in + out": statistics.median(ins), "first token ms": statistics.median(first),
        "90 %": sorted(first)[len(first) * 9 // 10], "between tokens ms": statistics.median(between),
        "90 % of them": sorted(between)[len(between) * 9 // 10],
    }  # fmt: skip


def gaps(times: list[float]) -> Iterator[float]:
    return (later - earlier for earlier, later in itertools.pairwise(times))


def report_goals(bench: Bench, tables: dict[str, Table]) -> None:
    """Reports the goals, which are those of an 8B model."""
    name = "llama-8b"
    if name not in bench.sizes.models:
        return
    steps = {row["model, batch"]: row["of the floor"] for row in tables["decode"].rows if "of the floor" in row}
    prompts = {row["model, tokens"]: row["of product"] for row in tables["prefill"].rows if row.get("of product")}
    alone = {case: part for case, part in steps.items() if case == f"{name}, 1"}
    whole = {case: part for case, part in prompts.items() if case.startswith(name)}
    bench.report.reached(Goal.least(STEP_GOAL, alone))
    bench.report.reached(Goal.least(PREFILL_GOAL, whole))
