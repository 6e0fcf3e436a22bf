"""Steps of a decoder on the CPU, in parts of what the machine could do, which is measured in the same turns: kernels
and torch, on random weights in bfloat16.

The floor of a step is the larger of the time in which all threads together read as many bytes as its weights and KV
are, and of the time of its products at the rate of torch's best one. All are medians: what the memory of a shared
machine gives changes from minute to minute.

python -m bench.roofline [--model llama-135m]
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from safetensors.torch import save_file

from model.attention.backend import StepShape
from model.kernels.code import Code
from model.kernels.machine import open_machine
from model.kernels.memory import huge_zeros
from model.kernels.program import Call
from model.kernels.values import INTS, LANES
from model.loading import LoadedModel, load
from model.settings import ModelSettings
from scheduler.settings import RequestLimits

MODELS: dict[str, dict[str, Any]] = {
    "llama-135m": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 49152, "hidden_size": 576,
        "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
        "head_dim": 64,
    },
    "qwen3-0.6b": {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 1024,
        "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
        "head_dim": 128,
    },
}  # fmt: skip
COMMON = {"max_position_embeddings": 8192, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "rms_norm_eps": 1e-6}
READ = 2**29  # bytes that are read to know how fast memory is
PRODUCT = 2 * 1024**3  # operations of the product that says how fast they can be


@dataclass(frozen=True, slots=True)
class Case:
    """So many sequences that have `before` tokens each get `now` more."""

    name: str
    sequences: int
    before: int
    now: int


CASES = (
    Case("decode, 1 sequence of 192", 1, 192, 1),
    Case("decode, 16 sequences of 160", 16, 160, 1),
    Case("decode, 32 sequences of 1,024", 32, 1024, 1),
    Case("prefill of 512", 1, 0, 512),
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


def write_model(directory: Path, shape: dict) -> Path:
    """A directory that loads: random matrices, norms of 1."""
    (directory / "config.json").write_text(json.dumps(shape | COMMON))
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.ones(size) if len(size) == 1 else torch.randn(size, generator=generator) * 0.02
        for name, size in tensor_shapes(shape)
    }
    save_file({name: tensor.bfloat16() for name, tensor in tensors.items()}, directory / "model.safetensors")
    return directory


def tensor_shapes(shape: dict) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, inner, dim = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
    queries, keys = shape["num_attention_heads"] * dim, shape["num_key_value_heads"] * dim
    yield "model.embed_tokens.weight", (shape["vocab_size"], hidden)
    yield "model.norm.weight", (hidden,)
    for layer in range(shape["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{at}{name}.weight", (hidden,)
        if shape["architectures"] == ["Qwen3ForCausalLM"]:
            for name in ("q_norm", "k_norm"):
                yield f"{at}self_attn.{name}.weight", (dim,)
        for name, out in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
            yield f"{at}self_attn.{name}.weight", (out, hidden)
        yield f"{at}self_attn.o_proj.weight", (hidden, queries)
        for name in ("gate_proj", "up_proj"):
            yield f"{at}mlp.{name}.weight", (inner, hidden)
        yield f"{at}mlp.down_proj.weight", (hidden, inner)


def bytes_of(shape: dict, case: Case) -> int:
    """Of memory that a step must read: all weights, and the keys and values of what was there before."""
    weights = sum(2 * size[0] * size[1] for _, size in tensor_shapes(shape) if len(size) == 2)
    token = 2 * 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * shape["head_dim"]
    return weights + case.sequences * case.before * token


def products_of(shape: dict, case: Case) -> float:
    """Floating-point operations: all tokens go through the layers, the last of each sequence through the head."""
    layers = sum(2 * size[0] * size[1] for name, size in tensor_shapes(shape) if len(size) == 2 and ".layers." in name)
    tokens = case.sequences * case.now
    head = 2 * shape["vocab_size"] * shape["hidden_size"] * case.sequences
    pairs = case.sequences * case.now * (case.before + case.now / 2)
    attention = 4 * pairs * shape["num_hidden_layers"] * shape["num_attention_heads"] * shape["head_dim"]
    return tokens * layers + head + attention


def reader() -> Callable[[], None]:
    """Reads READ bytes in all threads together."""

    def read(code: Code) -> None:
        source, size, out = code.arguments(3)
        first, last = code.share(size // 1024)
        sums = [code.variable(code.like(code.load(source, INTS), 0)) for _ in range(4)]
        with code.loop(first, last) as i:
            for j in range(16):
                one = sums[j % 4]
                one.set(one.value ^ code.load(source + i * 1024, INTS, LANES * 4 * j))
        for j, one in enumerate(sums):
            code.store(one.value, out + code.thread * 256, 64 * j)

    content, out = huge_zeros(READ).fill_(1), torch.zeros(64 * torch.get_num_threads(), dtype=torch.int32)
    return open_machine(None).program([Call("read", read, (content, READ, out))]).run


def product() -> Callable[[], object]:
    """Torch's best: 1,024 rows, weights packed."""
    x, weight = (torch.randn(1024, 1024).bfloat16() for _ in range(2))
    packed = torch.ops.mkldnn._reorder_linear_weight(weight)
    return lambda: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")


def load_side(directory: Path, backend: str) -> LoadedModel:
    settings = ModelSettings(str(directory), backend=backend, kv_cache_memory=2**31)
    return load(directory, settings, 256, 512, RequestLimits())


def measure(works: dict[str, Callable[[], object]], rounds: int) -> tuple[dict[str, float], float]:
    """Seconds of each, the median of rounds in which all take turns; and how much of the machine others used."""
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


def stepper(side: LoadedModel, case: Case) -> Callable[[], object]:
    """One forward pass, its plan of attention included."""
    size, pages = side.layout.page_size, -(-(case.before + case.now) // side.layout.page_size)
    tables = np.arange(case.sequences * pages, dtype=np.int32).reshape(1, case.sequences, pages)
    slices = np.array([[row, case.before, case.now] for row in range(case.sequences)], np.int32)
    positions = np.tile(np.arange(case.before, case.before + case.now), case.sequences)
    rows = np.arange(case.sequences).repeat(case.now)
    slots = (tables[0, rows, positions // size].astype(np.int64) * size + positions % size)[None]
    shape = StepShape(slices, positions, slots, tables, np.zeros(case.sequences, np.int64))
    tokens = torch.randint(side.config.vocabulary, positions.shape)
    wanted = torch.arange(case.now - 1, len(tokens), case.now)
    model, attention = side.runner._model, side.runner._attention

    return lambda: model.forward(tokens, torch.from_numpy(positions), wanted, attention, attention.plan(shape))


if __name__ == "__main__":
    main()
