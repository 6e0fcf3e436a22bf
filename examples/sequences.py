"""Generates several outputs for one prompt: three samples, and the three best of a beam search.

    make serve                               # in another terminal
    python examples/sequences.py [HOST:PORT]

The prompt is computed once, and all outputs share its KV pages.
"""

import sys

from quire import Client

SERVER = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051"
PROMPT, COUNT = "First Citizen:\nBefore we proceed", 3

with Client(SERVER, timeout=60) as client:
    # The same seed gives the same samples again; each sequence draws for itself.
    sampled = client.generate(PROMPT, sequence_count=COUNT, temperature=0.9, seed=7, max_tokens=20)
    for sequence in sampled.sequences:
        print(f"sample {sequence.index}, sum of logprobs {sequence.score:.1f}: {sequence.text!r}")

    searched = client.generate(PROMPT, sequence_count=COUNT, beam_search={"width": 6}, max_tokens=20)
    for sequence in searched.sequences:  # best score first
        print(f"beam {sequence.index}, score {sequence.score:.2f}: {sequence.text!r}")
