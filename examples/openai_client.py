"""Uses OpenAI's own Python client, which speaks HTTP to a gateway in front of running servers.

    make serve                                  # in another terminal
    quire gateway --server 127.0.0.1:50051      # in a third one
    pip install openai
    python examples/openai_client.py [http://127.0.0.1:8000/v1]

Chats need a model with a chat template; completions do not.
"""

import sys

import openai

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
client = openai.OpenAI(base_url=url, api_key="none", timeout=60)  # a server with tokens asks for one as the key
(model,) = [served.id for served in client.models.list()]

completion = client.completions.create(model=model, prompt="ROMEO:", max_tokens=20, seed=1)
print(f"{completion.choices[0].text!r} [{completion.choices[0].finish_reason}]")

# What Quire has beyond OpenAI's API goes into `extra_body`.
for chunk in client.completions.create(
    model=model, prompt="JULIET:", max_tokens=20, seed=1, stream=True, extra_body={"top_k": 20, "min_p": 0.05}
):
    print(chunk.choices[0].text, end="", flush=True)
print()

try:
    question = "Who are you?"
    chat = client.chat.completions.create(model=model, messages=[{"role": "user", "content": question}], max_tokens=20)
    print(chat.choices[0].message.content)
except openai.BadRequestError as error:
    print(f"no chat: {error.message}")
