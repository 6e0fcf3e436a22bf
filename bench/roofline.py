"""Measures steps of a decoder on the CPU as shares of the machine's limits: kernels and torch, in bfloat16.

Weights are random. The limits are measured in the same rounds: the memory's bandwidth of a shared machine changes from
minute to minute, so all figures are medians. The floor of a step is the larger of two times: all threads together read
the bytes of its weights and KV, or compute its products at the rate of torch's best one. On a CPU with AMX
run it with `ONEDNN_MAX_CPU_ISA=AVX512_CORE_AMX` in the environment: otherwise Quire keeps torch from using AMX, and
steps may come out faster than their floor.

python -m bench.roofline [--model llama-135m]
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import torch

from bench.shapes import MODELS, is_latent, is_recurrent, state_elements, tensor_shapes, write_model
from model.attention.backend import NONE, StateSegments, StepShape
from model.cpu.kernels.code import Code
from model.cpu.kernels.machine import open_machine
from model.cpu.kernels.memory import huge_zeros
from model.cpu.kernels.program import Call
from model.cpu.kernels.values import INTS, LANES
from model.forward import ForwardBatch
from model.loading import LoadedModel, load
from model.settings import ModelSettings
from scheduler.settings import RequestLimits

READ = 2**29  # bytes read to measure the bandwidth of memory
STREAMS = 8
PRODUCT = 2 * 1024**3  # operations of the product that measures the rate of products


@dataclass(frozen=True, slots=True)
class StepCase:
    """A step in which each of some sequences gets tokens.

    Attributes:
        name: Name in the report.
        sequences: Number of sequences.
        before: Tokens that each has in the cache.
        now: Tokens of each in this step.
    """

    name: str
    sequences: int
    before: int
    now: int


CASES = (
    StepCase("decode, 1 sequence of 192", 1, 192, 1),
    StepCase("decode, 16 sequences of 160", 16, 160, 1),
    StepCase("decode, 32 sequences of 1,024", 32, 1024, 1),
    StepCase("prefill of 512", 1, 0, 512),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="llama-135m", help="the shape (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=15, help="steps of each case and back end (default %(default)s)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    shape = MODELS[args.model]
    with tempfile.TemporaryDirectory() as place, torch.inference_mode():
        directory = write_model(Path(place), shape)
        sides = {name: load_side(directory, name) for name in ("cpu", "reference")}
        print(f"{args.model}, bfloat16, {args.threads} threads; times in ms")
        print("| | read | products | kernels | of the floor | torch | memory GB/s | GFLOP/s | others' share |")
        print("|---|---|---|---|---|---|---|---|---|")
        ceilings = {"read": reader(), "multiply": product()}
        for case in CASES:
            works = ceilings | {name: stepper(side, case) for name, side in sides.items()}
            taken, others = measure(works, args.rounds)
            read = bytes_of(shape, case) / READ * taken["read"]
            multiply = products_of(shape, case) / PRODUCT * taken["multiply"]
            rates = READ / taken["read"] / 1e9, PRODUCT / taken["multiply"] / 1e9
            print(f"| {case.name} | {read * 1e3:.2f} | {multiply * 1e3:.2f} | {taken['cpu'] * 1e3:.2f} "
                  f"| {max(read, multiply) / taken['cpu']:.0%} | {taken['reference'] * 1e3:.1f} "
                  f"| {rates[0]:.0f} | {rates[1]:.0f} | {others:.0%} |")  # fmt: skip


def bytes_of(shape: dict, case: StepCase) -> int:
    """Returns the bytes that a step must move: all weights, the keys and values of earlier tokens, and states twice."""
    weights = sum(2 * size[0] * size[1] for _, size in tensor_shapes(shape) if len(size) == 2)
    token = 2 * attending(shape) * kept_elements(shape)
    moves = 2 if case.before else 1  # a sequence that begins has no state to read
    return weights + case.sequences * (case.before * token + moves * state_bytes(shape))


def kept_elements(shape: dict) -> int:
    """Returns the elements that a layer of attention keeps of a token."""
    if is_latent(shape):
        return shape["kv_lora_rank"] + shape["qk_rope_head_dim"]
    return 2 * shape["num_key_value_heads"] * shape["head_dim"]


def attending(shape: dict) -> int:
    """Returns the number of layers of attention."""
    return sum(not is_recurrent(shape, layer) for layer in range(shape["num_hidden_layers"]))


def state_bytes(shape: dict) -> int:
    """Returns the bytes of a sequence's recurrent states: a matrix of each head, in float32."""
    layers = shape["num_hidden_layers"] - attending(shape)
    return 4 * layers * state_elements(shape) if layers else 0


def products_of(shape: dict, case: StepCase) -> float:
    """Returns a step's floating-point operations. Only the last token of a sequence goes through the head."""
    layers = sum(2 * size[0] * size[1] for name, size in tensor_shapes(shape) if len(size) == 2 and ".layers." in name)
    tokens = case.sequences * case.now
    head = 2 * shape["vocab_size"] * shape["hidden_size"] * case.sequences
    pairs = case.sequences * case.now * (case.before + case.now / 2)
    attention = 2 * pairs * attending(shape) * shape["num_attention_heads"] * products_of_pair(shape)
    return tokens * layers + head + attention


def products_of_pair(shape: dict) -> int:
    """Returns the products of a head's query with a key, and of a weight with a value, as attention computes them."""
    if is_latent(shape):
        return 2 * shape["kv_lora_rank"] + shape["qk_rope_head_dim"]
    return 2 * shape["head_dim"]


def reader() -> Callable[[], None]:
    """Returns a program that reads `READ` bytes in all threads together.

    Each thread reads in `STREAMS` places at once: in one, an AMD EPYC gave seven to nine tenths of that rate.
    """

    def read(code: Code) -> None:
        source, size, out = code.arguments(3)
        part = size // STREAMS
        first, last = code.share(part // 256)
        sums = [code.variable(code.like(code.load(source, INTS), 0)) for _ in range(4)]
        with code.loop(first, last) as i:
            for stream in range(STREAMS):
                for j, one in enumerate(sums):
                    one.set(one.value ^ code.load(source + part * stream + i * 256, INTS, LANES * 4 * j))
        for j, one in enumerate(sums):
            code.store(one.value, out + code.thread * 256, 64 * j)

    content, out = huge_zeros(READ).fill_(1), torch.zeros(64 * torch.get_num_threads(), dtype=torch.int32)
    return open_machine(None).program([Call("read", read, (content, READ, out))]).run


def product() -> Callable[[], object]:
    """Returns torch's fastest product: 1,024 rows, packed weights."""
    x, weight = (torch.randn(1024, 1024).bfloat16() for _ in range(2))
    packed = torch.ops.mkldnn._reorder_linear_weight(weight)
    return lambda: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")


def load_side(directory: Path, backend: str) -> LoadedModel:
    settings = ModelSettings(str(directory), backend=backend, kv_cache_memory=2**31)
    return load(directory, settings, 256, 512, RequestLimits())


def measure(works: dict[str, Callable[[], object]], rounds: int) -> tuple[dict[str, float], float]:
    """Returns median seconds of each over interleaved rounds, and the machine's share that other processes used."""
    process, began = psutil.Process(), time.perf_counter()
    own, everyone = sum(process.cpu_times()[:2]), sum(psutil.cpu_times()[:3])
    taken: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            start = time.perf_counter()
            work()
            taken[name].append(time.perf_counter() - start)
    spent = (time.perf_counter() - began) * (psutil.cpu_count() or 1)
    others = sum(psutil.cpu_times()[:3]) - everyone - (sum(process.cpu_times()[:2]) - own)
    return {name: statistics.median(times[2:]) for name, times in taken.items()}, max(0.0, others) / spent


def stepper(side: LoadedModel, case: StepCase) -> Callable[[], object]:
    """Returns a function that runs one forward pass, its plan of attention included."""
    size, pages = side.layout.page_size, -(-(case.before + case.now) // side.layout.page_size)
    tables = np.arange(case.sequences * pages, dtype=np.int32).reshape(1, case.sequences, pages)
    slices = np.array([[row, case.before, case.now] for row in range(case.sequences)], np.int32)
    positions = np.tile(np.arange(case.before, case.before + case.now), case.sequences)
    rows = np.arange(case.sequences).repeat(case.now)
    slots = (tables[0, rows, positions // size].astype(np.int64) * size + positions % size)[None]
    shape = StepShape(
        slices, positions, slots, tables, np.zeros(case.sequences, np.int64), segments_of(side, case, tables.size)
    )
    tokens = torch.randint(side.config.vocabulary, positions.shape)
    wanted = torch.arange(case.now - 1, len(tokens), case.now)
    model, attention = side.runner.model, side.runner.attention

    places = torch.from_numpy(positions)[None]
    return lambda: model.forward(ForwardBatch(tokens, places, wanted, attention, attention.plan(shape)))


def segments_of(side: LoadedModel, case: StepCase, first: int) -> StateSegments | None:
    """Returns the segments of a step whose states lie in the pages from `first` on; None for a model without some."""
    states, rows = side.layout.states.pages, np.arange(case.sequences)
    if not states:
        return None
    targets = (first + np.arange(states * case.sequences, dtype=np.int32)).reshape(case.sequences, states).T
    sources = targets if case.before else np.full_like(targets, NONE)
    return StateSegments(rows * case.now, np.full(len(rows), case.now), sources, targets, np.zeros(len(rows), np.bool_))


if __name__ == "__main__":
    main()
