"""Streams one answer, piece by piece, and says at its end why it ended and what it took.

    make serve                               # in another terminal
    python examples/streaming.py [HOST:PORT]

`stream.text()` gives the text alone; the messages that it comes from also say how a sequence ended.
"""

import sys

from quire import Client
from quire.v1 import generation_service_pb2 as pb

SERVER = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051"
with (
    Client(SERVER, timeout=60) as client,
    client.stream("ROMEO:", max_tokens=100, temperature=0.8, seed=1) as stream,
):
    # Leaving the stream's `with` early, by `break` or an exception, ends the request on the server too.
    for message in stream:
        for delta in message.deltas:
            print(delta.text, end="", flush=True)
            if delta.finish_reason:
                print(f"\n[{pb.FinishReason.Name(delta.finish_reason)}]")
        if message.HasField("usage"):
            print(f"[{message.usage.prompt_tokens} prompt + {message.usage.completion_tokens} generated tokens]")
