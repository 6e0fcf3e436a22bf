"""Measures the engine beside transformers on the same requests, interleaved, both on the device at once."""

import statistics
from typing import Any

from bench.on_gpu.bench import Bench
from bench.on_gpu.engine import TimedEngine
from bench.on_gpu.loads import EngineRequest, mixed
from bench.on_gpu.memory import free, free_device_bytes
from bench.on_gpu.models import SHAPES, Costs
from bench.on_gpu.report import Table, say
from bench.on_gpu.serving import LARGE, SPARE, backend, checkpoint
from bench.on_gpu.transformers_side import TransformersManager

SECONDS, SMALL_SECONDS = 100.0, 50.0  # for a model of 16 GB, and for others


def peers(bench: Bench) -> None:
    load = bench.sizes.peers
    table = Table("beside transformers", {
        "model": "", "Quire tokens/s": ",.0f", "least-most": "", "transformers tokens/s": ",.0f", "its least-most": "",
        "times": ".2f", "first tokens alike": ".0%",
    })  # fmt: skip
    table.notes.append(
        f"Output tokens; {load.requests} requests at once, {load.prompts[0]}-{load.prompts[1]} tokens in, "
        f"{load.outputs[0]}-{load.outputs[1]} out, bfloat16, greedy; turn by turn in one process, medians of rounds "
        "after the first. Weights are random, so the largest of two logits that are nearly equal differs now and then."
    )
    for name in reversed(bench.sizes.models):
        needed = SECONDS if Costs.of(SHAPES[name]).file > LARGE else SMALL_SECONDS
        if not bench.budget.allows(needed):
            table.skip(name, bench.budget.why_not(needed))
        elif why := no_room(bench, name):
            table.skip(name, why)
        else:
            with table.attempt(name):
                table.add(**side_by_side(bench, name, table))
            free()
    bench.report.publish(table)


def kv_tokens(bench: Bench) -> int:
    load = bench.sizes.peers
    return load.requests * (load.prompts[1] + load.outputs[1])


def no_room(bench: Bench, name: str) -> str:
    """Returns why both do not fit in memory; "" if they do."""
    costs, free_bytes = Costs.of(SHAPES[name]), free_device_bytes(bench.device)
    needed = 2 * (costs.file + kv_tokens(bench) * costs.token) + SPARE
    if free_bytes is None or needed <= free_bytes:
        return ""
    return f"both take {needed / 1e9:.0f} GB, {free_bytes / 1e9:.0f} GB are free"


def side_by_side(bench: Bench, name: str, table: Table) -> dict[str, Any]:
    costs, load, device = Costs.of(SHAPES[name]), bench.sizes.peers, bench.device
    directory = checkpoint(bench, name)
    with (
        TimedEngine(
            directory, device.type, backend(device), kv_tokens(bench) * costs.token, load.requests,
            bench.sizes.step_tokens,
        ) as engine,
        TransformersManager(directory, device, (load.prompts[1], load.outputs[1]), load.requests) as other,
    ):  # fmt: skip
        table.notes.append(f"{name}: {other.about}.")
        say(table.notes[-1])
        rounds = turns(bench, engine, other, name)
    mine, theirs = ([rates[i] for rates, _ in rounds] for i in range(2))
    return {
        "model": name, "Quire tokens/s": statistics.median(mine), "least-most": f"{min(mine):,.0f}-{max(mine):,.0f}",
        "transformers tokens/s": statistics.median(theirs), "its least-most": f"{min(theirs):,.0f}-{max(theirs):,.0f}",
        "times": statistics.median(mine) / statistics.median(theirs),
        "first tokens alike": statistics.mean(alike for _, alike in rounds),
    }  # fmt: skip


def turns(
    bench: Bench, engine: TimedEngine, other: TransformersManager, name: str
) -> list[tuple[tuple[float, float], float]]:
    """Returns, for each round, tokens a second of both, and the share of equal first tokens.

    The first round does not count. At least one more follows, and further ones if the budget allows.
    """
    rounds: list[tuple[tuple[float, float], float]] = []
    longest = 0.0
    for turn in range(bench.sizes.rounds):
        if len(rounds) > 1 and not bench.budget.allows(2 * longest):
            break
        asked = mixed(f"{name} peers {turn}", SHAPES[name]["vocab_size"], bench.sizes.peers)
        left = bench.budget.left
        rounds.append(one_round(asked, engine, other, turn % 2 == 1))
        longest = max(longest, left - bench.budget.left)
    return rounds[1:]


def one_round(
    asked: list[EngineRequest], engine: TimedEngine, other: TransformersManager, swapped: bool
) -> tuple[tuple[float, float], float]:
    """Runs both; with `swapped` transformers runs first."""
    total = sum(one.tokens for one in asked)
    if swapped:
        seconds, firsts = other.run(asked)
        run = engine.run(asked)
    else:
        run = engine.run(asked)
        seconds, firsts = other.run(asked)
    alike = sum(a == b for a, b in zip(run.firsts, firsts, strict=True)) / len(asked)
    return (total / run.seconds, total / seconds), alike
