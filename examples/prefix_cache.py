"""Asks several questions about one text: from the second on, the text comes out of the prefix cache.

    make serve                                  # in another terminal
    python examples/prefix_cache.py [HOST:PORT]

Prompts share the whole KV pages (16 tokens, `quire serve --page-size`) that they begin with: what they have in common
stands first. `quire estimate --model DIR` says how many tokens a cache holds.
"""

import sys
import time
import uuid

from quire import Client

SERVER = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051"
TEXT = "".join(f"{number}. The citizens of ward {number} want bread.\n" for number in range(1, 16))
QUESTIONS = ("Who wants bread?", "What do they want?", "How many wards are there?")

with Client(SERVER, timeout=60) as client:
    salt = uuid.uuid4().hex  # shares cached pages within this run alone; without it, with all requests of the tenant
    for question in QUESTIONS:
        began = time.monotonic()
        with client.stream(f"{TEXT}\n{question}", max_tokens=8, cache_salt=salt) as stream:
            prompt = next(stream).prompt_info  # in the first message, which has the first token too
            milliseconds = 1000 * (time.monotonic() - began)
        print(f"{prompt.cached_token_count} of {prompt.token_count} tokens cached, {milliseconds:.0f} ms: {question}")
