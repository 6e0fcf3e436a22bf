"""Measures what the KV cache saves: tokens a second with it and without (`--recompute`), interleaved in one process.

python -m bench.kv_cache [--rounds 5] [--model DIR] [--json]

Without --model it runs a random GPT-2 of the size that "LLMs from scratch" measures its own cache with: 6 layers, 256
wide, 8 heads, 5,000 tokens, a prompt of 4. That text's own code is not measured here. In single runs on one thread of
another, busy machine, without a cache, it made 72 / 49 / 27 / 10 tokens a second. These are for 64 / 128 / 256 / 512
new ones. A cache that appends by concatenation made 2.1 / 3.1 / 4.9 / 13 times that. One that is allocated in advance
made 2.6 / 3.9 / 6.4 / 16 times.

A plain GPT with such a cache (`bench/plain_gpt.py`, our own) is measured in the same rounds, if --model is not given.
Then both run several requests: Quire together, the plain GPT one after the other.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file
from torch import Tensor

from bench.plain_gpt import PlainGPT
from cache_manager.manager import CacheManager
from model.attention.backend import StepShape
from model.config import read_config
from model.loading import LoadedModel, load
from model.settings import ModelSettings
from scheduler.events import EndReason, Submit
from scheduler.limits import ModelDefaults
from scheduler.parameters import Output, Sampling, Stopping
from scheduler.request import Request
from scheduler.resolve import resolve
from scheduler.scheduler import Scheduler
from scheduler.settings import NO_QUEUE_LIMITS, RequestLimits, SchedulerSettings
from scheduler.spec import Spec

NEW = (64, 128, 256, 512)
MANY, MANY_NEW = (1, 4, 16), 128
LAYERS, HIDDEN, HEADS, VOCABULARY, CONTEXT, PROMPT = 6, 256, 8, 5000, 1024, 4


def write_gpt2(directory: Path) -> Path:
    """Writes a random checkpoint, and returns its directory."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * 0.1

    tensors = {"wte.weight": random(VOCABULARY, HIDDEN), "wpe.weight": random(CONTEXT, HIDDEN)}
    for layer in range(LAYERS):
        for name, width, out in (
            ("attn.c_attn", HIDDEN, 3 * HIDDEN),
            ("attn.c_proj", HIDDEN, HIDDEN),
            ("mlp.c_fc", HIDDEN, 4 * HIDDEN),
            ("mlp.c_proj", 4 * HIDDEN, HIDDEN),
        ):
            tensors |= {f"h.{layer}.{name}.weight": random(width, out), f"h.{layer}.{name}.bias": random(out)}
        for name in ("ln_1", "ln_2"):
            tensors |= {f"h.{layer}.{name}.weight": 1 + random(HIDDEN), f"h.{layer}.{name}.bias": random(HIDDEN)}
    tensors |= {"ln_f.weight": 1 + random(HIDDEN), "ln_f.bias": random(HIDDEN)}
    save_file(tensors, directory / "model.safetensors")
    config = {"architectures": ["GPT2LMHeadModel"], "vocab_size": VOCABULARY, "n_embd": HIDDEN, "n_layer": LAYERS}
    (directory / "config.json").write_text(json.dumps(config | {"n_head": HEADS, "n_positions": CONTEXT}))
    return directory


class StepEngine:
    """Runs an engine step by step, without threads.

    Attributes:
        moved: Bytes of KV that steps write, and that are copied within the pool.
    """

    def __init__(self, directory: Path, recompute: bool, page_size: int = 16, sequences: int = 1) -> None:
        self.settings = SchedulerSettings(2048, sequences, recompute=recompute)
        config = read_config(directory)
        pages = sequences * (config.context // page_size + 1)
        memory = config.kv_layout(page_size, "float32").page_bytes * pages
        settings = ModelSettings(str(directory), None, "float32", "cpu", page_size, memory)
        rows, ahead = self.settings.max_sequences, self.settings.ahead
        self.loaded: LoadedModel = load(directory, settings, rows, ahead, RequestLimits(), recompute)
        self.cache = CacheManager(self.loaded.layout, self.loaded.pages, rows, ahead=ahead)
        self.scheduler = Scheduler(self.settings, NO_QUEUE_LIMITS, self.cache)
        self.moved, self._attempt = 0, 0
        self._count_bytes()

    def _count_bytes(self) -> None:
        attention: Any = self.loaded.runner.attention
        make, copy, layout = attention.plan, attention.copy, self.loaded.layout

        def counted_plan(shape: StepShape) -> Any:
            self.moved += shape.slots.size * layout.page_bytes // layout.page_size
            return make(shape)

        def counted_copy(pages: NDArray[np.int32]) -> None:
            self.moved += len(pages) * layout.page_bytes
            copy(pages)

        attention.plan, attention.copy = counted_plan, counted_copy

    def run(self, prompts: list[list[int]], new: int) -> tuple[list[list[int]], float]:
        """Returns the output ids of each prompt, and seconds for all."""
        first, self._attempt = self._attempt, self._attempt + len(prompts)
        events = [Submit(first + i, self._request(prompt, new)) for i, prompt in enumerate(prompts)]
        ids: list[list[int]] = [[] for _ in prompts]
        left, began = len(prompts), time.perf_counter()
        while left:
            plan = self.scheduler.schedule(time.perf_counter(), events)
            events = []
            if plan is None:
                raise RuntimeError("the requests do not run")
            self.loaded.runner.launch(plan)
            outputs = self.scheduler.commit(self.loaded.runner.collect(), time.perf_counter())
            for attempt, token in zip(outputs.attempts.tolist(), outputs.tokens.tolist(), strict=True):
                ids[attempt - first].append(token)
            for end in outputs.ends:
                if end.reason is not EndReason.LENGTH:
                    raise RuntimeError(f"a request ended for another reason than its length: {end}")
                left -= 1
        return ids, time.perf_counter() - began

    def _request(self, prompt: list[int], new: int) -> Request:
        spec = Spec(tuple(prompt), sampling=Sampling(temperature=0.0), stopping=Stopping(new), output=Output())
        return resolve(spec, prompt, self.loaded.limits, ModelDefaults(), minted_seed=0)

    @property
    def computed(self) -> int:
        return self.scheduler.stats().computed_tokens


@contextmanager
def model(place: str | None) -> Iterator[Path]:
    if place is not None:
        yield Path(place)
        return
    with tempfile.TemporaryDirectory() as directory:
        yield write_gpt2(Path(directory))


def measure(directory: Path, rounds: int, plain: PlainGPT | None = None) -> list[dict[str, Any]]:
    """Returns a row of medians for each output length, over interleaved rounds. `plain` has the same model."""
    engines = {"recompute": StepEngine(directory, True), "cache": StepEngine(directory, False)}
    limits = engines["cache"].loaded.limits
    prompt = np.random.default_rng(0).integers(1, limits.vocabulary, PROMPT).tolist()
    rows = []
    for new in (n for n in NEW if PROMPT + n <= limits.context):
        seconds: dict[str, list[float]] = {name: [] for name in engines}
        row: dict[str, Any] = {"new": new}
        ids = {}
        for _ in range(rounds):
            for name, engine in engines.items():
                computed, moved = engine.computed, engine.moved
                (ids[name],), took = engine.run([prompt], new)
                seconds[name].append(took)
                row[f"{name}_computed"] = engine.computed - computed
                row[f"{name}_bytes_a_token"] = (engine.moved - moved) / (PROMPT + new - 1)
            if plain is not None:
                ids["plain"], took = plain.run(prompt, new)
                seconds.setdefault("plain", []).append(took)
        rates = {name: new / statistics.median(took) for name, took in seconds.items()}
        row |= {f"{name}_tokens_a_second": rate for name, rate in rates.items()}
        row["ids_equal"] = all(other == ids["cache"] for other in ids.values())
        row["ratio"] = rates["cache"] / rates["recompute"]
        if plain is not None:
            row["ratio_to_plain"] = rates["cache"] / rates["plain"]
        rows.append(row)
    return rows


def measure_many(directory: Path, rounds: int, plain: PlainGPT) -> list[dict[str, Any]]:
    """Returns a row for each number of requests: output tokens a second of all together."""
    engine = StepEngine(directory, False, sequences=max(MANY))
    draw = np.random.default_rng(1)
    prompts = [draw.integers(1, VOCABULARY, PROMPT).tolist() for _ in range(max(MANY))]
    rows = []
    for count in MANY:
        seconds: dict[str, list[float]] = {"cache": [], "plain": []}
        for _ in range(rounds):
            ids, took = engine.run(prompts[:count], MANY_NEW)
            seconds["cache"].append(took)
            runs = [plain.run(prompt, MANY_NEW) for prompt in prompts[:count]]
            seconds["plain"].append(sum(took for _, took in runs))
        rates = {name: count * MANY_NEW / statistics.median(took) for name, took in seconds.items()}
        same = ids == [one for one, _ in runs]
        rows.append({"requests": count, **rates, "ratio": rates["cache"] / rates["plain"], "ids_equal": same})
    return rows


def _beside(row: dict[str, Any]) -> tuple[str, str]:
    if "ratio_to_plain" not in row:
        return "-", "-"
    return f"{row['plain_tokens_a_second']:.1f}", f"{row['ratio_to_plain']:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a model directory in place of the random GPT-2")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with model(args.model) as directory:
        plain = PlainGPT(directory) if args.model is None else None
        rows = measure(directory, args.rounds, plain)
        many = [] if plain is None else measure_many(directory, args.rounds, plain)
    if args.json:
        print(json.dumps({"rows": rows, "many": many, "load_average": os.getloadavg()[0]}))
        return
    table = Table(title=f"KV cache: {args.threads} thread, medians of {args.rounds}")
    for name in ("new", "without: tokens/s", "computed", "with: tokens/s", "computed", "KV bytes/token", "ratio",
                 "plain GPT: tokens/s", "ratio", "same ids"):  # fmt: skip
        table.add_column(name, justify="right", overflow="fold")
    for row in rows:
        table.add_row(
            str(row["new"]), f"{row['recompute_tokens_a_second']:.1f}", f"{row['recompute_computed']:,}",
            f"{row['cache_tokens_a_second']:.1f}", f"{row['cache_computed']:,}", f"{row['cache_bytes_a_token']:,.0f}",
            f"{row['ratio']:.1f}", *_beside(row), str(row["ids_equal"]),
        )  # fmt: skip
    Console(width=140).print(table)
    if many:
        beside = Table(title=f"Several requests of {MANY_NEW} new tokens: tokens/s of all")
        for name in ("requests", "Quire, together", "plain GPT, in a row", "ratio", "same ids"):
            beside.add_column(name, justify="right")
        for row in many:
            rates = (f"{row[name]:.1f}" for name in ("cache", "plain"))
            beside.add_row(str(row["requests"]), *rates, f"{row['ratio']:.1f}", str(row["ids_equal"]))
        Console().print(beside)
    print(f"load average {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
