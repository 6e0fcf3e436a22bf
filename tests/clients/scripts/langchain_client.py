"""python langchain_client.py URL MODEL"""

import sys

import openai
from langchain_openai import ChatOpenAI

url, model = sys.argv[1:]
chat = ChatOpenAI(model=model, base_url=url, api_key="unused", temperature=0, max_tokens=8, max_retries=0)
whole = chat.invoke("Who are you?")
assert whole.usage_metadata["output_tokens"] <= 8
assert "".join(chunk.content for chunk in chat.stream("Who are you?")) == whole.content
assert [one.content for one in chat.batch(["Who are you?"] * 2)] == [whole.content] * 2
for words in (5000, 100_000):  # too many tokens; too large for a message to the server
    try:
        chat.invoke("word " * words)
        found = "an answer"
    except openai.BadRequestError as error:
        found = type(error).__name__
    assert found == "OpenAIContextOverflowError", f"{words} words: {found}"
