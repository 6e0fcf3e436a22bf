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
try:
    litellm.completion(messages=[{"role": "user", "content": "word " * 3000}], **asked)
except litellm.ContextWindowExceededError:
    pass
else:
    raise AssertionError("an overlong prompt was answered")
