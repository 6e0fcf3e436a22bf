"""python openai_client.py URL MODEL"""

import sys

import openai

url, model = sys.argv[1:]
client = openai.OpenAI(base_url=url, api_key="unused", max_retries=0)
assert [one.id for one in client.models.list()] == [model]
whole = client.completions.create(model=model, prompt="ROMEO:", max_tokens=8, seed=1)
assert whole.usage.completion_tokens == 8
chunks = list(client.completions.create(model=model, prompt="ROMEO:", max_tokens=8, seed=1, stream=True))
assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
messages = [{"role": "user", "content": "Who are you?", "name": "bob"}]
more = {"model": model, "messages": messages, "max_completion_tokens": 8, "safety_identifier": "a", "store": False}
chat = client.chat.completions.create(**more, seed=1)
parts = list(client.chat.completions.create(**more, seed=1, stream=True, stream_options={"include_usage": True}))
text = "".join(choice.delta.content or "" for part in parts for choice in part.choices)
assert text == chat.choices[0].message.content
assert parts[-1].usage.completion_tokens == chat.usage.completion_tokens
