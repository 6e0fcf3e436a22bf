"""Measures the all-reduce of tensor parallelism on a CPU, and the speed of a divided model.

First a sum of [rows, width] float32 over two processes, in microseconds: in shared memory as a kernel of a program,
like the CPU's kernels; in shared memory layer by layer; by gloo in the order of ranks; by gloo's own all_reduce. Then
tokens a second of one process with two threads beside two processes with one thread each. All are interleaved.

python -m bench.parallel [--model DIR]
"""

import argparse
import json
import multiprocessing
import os
import queue
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.shapes import MODELS, write_model
from cache_manager.settings import CacheSettings
from model.cpu.kernels.buffer import Buffer
from model.cpu.kernels.element import FLOAT
from model.cpu.kernels.machine import open_machine
from model.cpu.shared_memory import SharedMemory
from model.parallel.collective import Collective
from model.parallel.distributed import Distributed
from model.parallel.shard import Shard
from model.parallel.sockets import address_of, listen, new_local
from model.rank_group import GroupSettings, join, lead
from model.settings import ModelSettings
from rpc.engines.assembly import assemble
from rpc.settings import EngineConfig
from scheduler.controls import Controls
from scheduler.events import StepOutputs, Submit
from scheduler.request import Request
from scheduler.settings import NO_QUEUE_LIMITS, SchedulerSettings

ROWS, WIDTHS = (1, 8, 32, 128, 512), (576, 2048)
TOKEN, RANKS = bytes(32), 2
SUMS = 20  # of a program; an even number, as a model's layers have
GREEDY = Controls(0.0, 1.0, 0, 0.0, 0)
WAYS = ("program", "shared", "gloo", "gloo's own")

Run = Callable[[], object]


def group_settings() -> GroupSettings:
    return GroupSettings(False, ModelSettings().kernel_directory, 30.0)


def ways(shared: Collective, gloo: Collective, rows: int, width: int) -> dict[str, tuple[Run, int]]:
    """Returns, for each of `WAYS`, a function that runs it once, and the number of sums of that run."""
    if not isinstance(shared, SharedMemory) or not isinstance(gloo, Distributed):
        raise RuntimeError("ranks on this machine cannot share memory")
    x, count = torch.randn(rows, width), np.array([rows], np.int64)
    turns, y = shared.rounds((rows, width)), Buffer.of(rows, width, FLOAT)
    calls = [turns.summed(count.ctypes.data, y, width, True) for _ in range(SUMS)]
    program = turns.program(open_machine(ModelSettings().kernel_directory), calls)

    def run_program(_keep: object = count) -> None:
        program.run()

    return {
        "program": (run_program, SUMS),
        "shared": (lambda: shared.sum(x), 1),
        "gloo": (lambda: gloo.sum(x), 1),
        "gloo's own": (lambda: gloo._group.allreduce([x]).wait(), 1),
    }


def measure(shared: Collective, gloo: Collective, seconds: float) -> Iterator[dict[str, Any]]:
    """Measures all ways. Both ranks call this in the same order; rank 0's clock counts.

    Args:
        shared: Collective in shared memory.
        gloo: Collective over gloo.
        seconds: About the time of each way; sets the number of rounds.
    """
    torch.set_num_threads(1)
    rounds = max(3, int(20 * seconds))
    for width in WIDTHS:
        for rows in ROWS:
            took: dict[str, list[float]] = {way: [] for way in WAYS}
            for number, (way, (run, sums)) in enumerate([*ways(shared, gloo, rows, width).items()] * (rounds + 1)):
                for _ in range(5):
                    began = time.perf_counter()
                    run()
                    if number >= len(WAYS):  # the first round warms up
                        took[way].append((time.perf_counter() - began) / sums * 1e6)
            yield (
                {"rows": rows, "width": width}
                | {way: statistics.median(of) for way, of in took.items()}
                | {f"{way} least": min(of) for way, of in took.items()}
            )


def follow(addresses: list[str], seconds: float) -> None:
    """Runs rank 1 of both groups."""
    joined = [join(address, Shard(1, RANKS), TOKEN, {}, group_settings(), lambda _: None) for address in addresses]
    for _ in measure(joined[0].collective, joined[1].collective, seconds):
        pass
    joined[0].follower.exchange({})
    for one in joined:
        one.close()


def sums(seconds: float) -> Iterator[dict[str, Any]]:
    listeners = [listen(new_local()), listen("127.0.0.1:0")]
    addresses = [address_of(listener) for listener in listeners]
    other = multiprocessing.get_context("spawn").Process(target=follow, args=(addresses, seconds))
    other.start()
    led = [lead(listener, RANKS, TOKEN, {}, group_settings()) for listener in listeners]
    yield from measure(led[0].collective, led[1].collective, seconds)
    led[0].ranks.exchange({})
    for one in led:
        one.close()
    other.join()


def worker(model: str, ranks: int) -> None:
    """Answers each line `SEQUENCES PROMPT NEW` with the seconds that these requests took."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    outputs = queue.SimpleQueue[StepOutputs]()
    config = EngineConfig(
        model=ModelSettings(model, tensor_parallel=ranks),
        scheduler=SchedulerSettings(max_sequences=16),
        queue=NO_QUEUE_LIMITS,
        cache=CacheSettings(prefix_cache=False),
    )
    engine = assemble(config).engine(outputs.put)
    engine.start()
    print("ready", file=answers)
    for line in sys.stdin:
        sequences, prompt, new = map(int, line.split())
        prompts = np.random.default_rng(0).integers(1, 1000, (sequences, prompt)).astype(np.int32)
        began, left = time.perf_counter(), sequences
        engine.send([Submit(i, Request(tokens, new, (), GREEDY)) for i, tokens in enumerate(prompts)])
        while left:
            left -= len(outputs.get().ends)
        print(time.perf_counter() - began, file=answers)
    engine.stop()


@contextmanager
def workers(model: str, threads: int) -> Iterator[dict[int, Callable[[str], float]]]:
    """Starts an engine for each number of ranks, with `threads` threads in all; yields functions that run a line."""
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    command = [sys.executable, "-m", "bench.parallel", "--worker"]
    pipe = subprocess.PIPE
    processes = {
        ranks: subprocess.Popen(
            [*command, str(ranks), "--model", model], stdin=pipe, stdout=pipe, text=True, env=environment
        )
        for ranks in (1, RANKS)
    }

    def asker(process: "subprocess.Popen[str]") -> Callable[[str], float]:
        if process.stdin is None or process.stdout is None or process.stdout.readline() != "ready\n":
            raise RuntimeError("an engine did not start")
        source, answers = process.stdin, process.stdout

        def ask(line: str) -> float:
            source.write(f"{line}\n")
            source.flush()
            return float(answers.readline())

        return ask

    try:
        yield {ranks: asker(process) for ranks, process in processes.items()}
    finally:
        for process in processes.values():
            if process.stdin is not None:
                process.stdin.close()
            process.wait()


def engines(model: str, rounds: int) -> Iterator[dict[str, Any]]:
    loads = {"a prompt of 512": (1, 512, 1), "1 sequence": (1, 16, 48), "8 sequences": (8, 16, 48)}
    with workers(model, RANKS) as ask:
        took: dict[tuple[str, int], list[float]] = {(name, ranks): [] for name in loads for ranks in ask}
        for number in range(rounds + 1):
            for name, load in loads.items():
                for ranks in ask:
                    seconds = ask[ranks](" ".join(map(str, load)))
                    if number:
                        took[name, ranks].append(seconds)
    for name, (sequences, prompt, new) in loads.items():
        tokens = sequences * (prompt if new == 1 else new)
        rates = {ranks: tokens / statistics.median(took[name, ranks]) for ranks in (1, RANKS)}
        yield (
            {"load": name}
            | {f"{ranks} rank(s)": rate for ranks, rate in rates.items()}
            | {"ratio": rates[RANKS] / rates[1]}
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="model directory, or demo")
    parser.add_argument(
        "--shape", choices=MODELS, default="qwen3-0.6b", help="shape of the random weights, without --model"
    )
    parser.add_argument("--seconds", type=float, default=1.0, help="about how long each sum is measured")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker is not None:
        worker(args.model, args.worker)
        return

    def print_values(values: dict[str, Any]) -> None:
        row = "  ".join(
            f"{key} {value:.2f}" if isinstance(value, float) else f"{key} {value}" for key, value in values.items()
        )
        print(json.dumps(values) if args.json else row, flush=True)

    for values in sums(args.seconds):
        print_values(values)
    with tempfile.TemporaryDirectory() as place:
        for values in engines(args.model or str(write_model(Path(place), MODELS[args.shape])), args.rounds):
            print_values(values)


if __name__ == "__main__":
    main()
