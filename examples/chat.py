"""Talks with a model: each line of the input is a turn of yours, each answer is streamed.

    quire serve --model DIR         # in another terminal; a model with a chat template, which the demo model lacks
    python examples/chat.py [HOST:PORT]

The client keeps the conversation and sends all of it with each turn. The server computes only what is new: the earlier
turns are in its prefix cache.
"""

import sys

from quire import Client, InvalidRequestError

SERVER = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051"
conversation = [{"role": "system", "content": "You answer in one sentence."}]
with Client(SERVER, timeout=120) as client:
    for line in sys.stdin:
        conversation.append({"role": "user", "content": line.strip()})
        answer = ""
        try:
            with client.stream(conversation, max_tokens=60, temperature=0.7) as stream:
                for message in stream:
                    for delta in message.deltas:
                        answer += delta.text
                        print(delta.text, end="", flush=True)
        except InvalidRequestError as error:
            sys.exit(f"the server refuses the conversation ({error.reason}): {error}")
        usage = message.usage  # of the last message
        print(f"\n[{usage.cached_prompt_tokens} of {usage.prompt_tokens} prompt tokens were cached]")
        conversation.append({"role": "assistant", "content": answer})
