"""python litellm_client.py URL MODEL"""

import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would fetch one

import litellm

url, model = sys.argv[1:]
asked = {"model": f"openai/{model}", "api_base": url, "api_key": "unused", "max_tokens": 8, "temperature": 0}
messages = [{"role": "user", "content": "Who are you?"}]
whole = litellm.completion(messages=messages, **asked)
text = whole.choices[0].message.content
parts = litellm.completion(messages=messages, stream=True, **asked)
assert "".join(part.choices[0].delta.content or "" for part in parts) == text
again = [*messages, whole.choices[0].message.model_dump(), messages[0]]
assert litellm.completion(messages=again, **asked).choices
for words in (5000, 100_000):  # too many tokens; too large for a message to the server
    try:
        litellm.completion(messages=[{"role": "user", "content": "word " * words}], **asked)
    except litellm.ContextWindowExceededError:
        continue
    raise AssertionError(f"a prompt of {words} words was answered")
