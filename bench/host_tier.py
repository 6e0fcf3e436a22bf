"""Measures what the host tier saves, with the tier and without, interleaved in one process.

Prompts come again after others have taken their place in the pool.

python -m bench.host_tier
"""

import argparse
import json
import statistics
import time

import numpy as np
import psutil

from model.config import read_config
from rpc.offline import LLM
from rpc.paths import model_directory
from scheduler.parameters import Sampling, Stopping

PAGE = 16


def first_token(llm: LLM, prompt: list[int]) -> tuple[float, int]:
    """Returns seconds until the first token, and the number of cached prompt tokens."""
    began = time.perf_counter()
    (done,) = llm.generate([prompt], Sampling(temperature=0.0), Stopping(max_tokens=1))
    return time.perf_counter() - began, done.cached_tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="model directory, or demo")
    parser.add_argument("--tokens", type=int, default=960, help="of a prompt")
    parser.add_argument("--prompts", type=int, default=8, help="in turn; the pool holds two")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    prompts = [rng.integers(1, 1000, args.tokens).tolist() for _ in range(args.prompts)]
    config = read_config(model_directory(args.model))
    layout = config.kv_layout(PAGE, config.dtype)
    pool = layout.pages_for(2 * args.tokens + PAGE) * layout.page_bytes
    psutil.cpu_percent()
    used = time.process_time(), time.perf_counter()
    with (
        LLM(args.model, kv_cache_memory=pool) as without,
        LLM(args.model, kv_cache_memory=pool, host_cache_memory=args.prompts * pool) as with_host,
    ):
        for prompt in prompts:
            for llm in (without, with_host):
                first_token(llm, prompt)
        took: dict[str, list[tuple[float, int]]] = {"without": [], "with": []}
        for _ in range(args.rounds):
            for prompt in prompts:
                took["without"].append(first_token(without, prompt))
                took["with"].append(first_token(with_host, prompt))
    own = (time.process_time() - used[0]) / (time.perf_counter() - used[1])
    seconds = {name: statistics.median(s for s, _ in of) for name, of in took.items()}
    cached = {name: statistics.mean(tokens for _, tokens in of) / args.tokens for name, of in took.items()}
    values = {
        "first_token_ms_computed": 1000 * seconds["without"],
        "first_token_ms_from_host": 1000 * seconds["with"],
        "ratio": seconds["without"] / seconds["with"],
        "cached_without": cached["without"],
        "cached_with": cached["with"],
        "cores_used": own,
        "machine_busy_percent": psutil.cpu_percent(),
    }
    if args.json:
        print(json.dumps(values))
    else:
        for name, value in values.items():
            print(f"{name:28} {value:10.3f}")


if __name__ == "__main__":
    main()
