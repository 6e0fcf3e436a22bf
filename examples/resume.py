"""Reads streams while a server is lost: the client goes on at the next server, from the last token that it has.

    quire serve                                                        # two servers of one model,
    quire serve --port 50060 --metrics-port 9470 --admin-port 50061    # in a terminal each
    python examples/resume.py [--server HOST:PORT ...] [--streams N]   # kill -9 the first server meanwhile

The texts are those that the first server would have given: a draw depends on the seed and the position alone.
"""

import argparse
import sys
from collections import Counter

from quire import Client, UnavailableError

parser = argparse.ArgumentParser()
parser.add_argument("--server", nargs="+", default=["127.0.0.1:50051", "127.0.0.1:50060"])
parser.add_argument("--streams", type=int, default=50)
asked = parser.parse_args()

with Client(asked.server, timeout=600) as client:
    for seed in range(asked.streams):
        text, tokens = "", Counter[str]()
        with client.stream("ROMEO:", max_tokens=400, temperature=0.8, seed=seed, ignore_eos=True) as stream:
            try:
                for message in stream:
                    for delta in message.deltas:
                        text += delta.text
                        tokens[stream.server] += delta.token_count
            except UnavailableError as error:  # each server was asked three times
                sys.exit(f"stream {seed} is lost after {tokens.total()} tokens: {error}")
        shares = ", ".join(f"{count} tokens from {server}" for server, count in tokens.items())
        print(f"stream {seed}: {shares}; it ends with {text[-30:]!r}")
