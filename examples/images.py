"""Asks a vision-language model about images: PNG or JPEG files, as parts of a conversation.

    quire serve --model DIR         # in another terminal; PaliGemma, LLaVA 1.5, Idefics3, SmolVLM or nanoVLM
    python examples/images.py FILE... [--server HOST:PORT] [--question "What is this?"]

The server fetches nothing: a client sends the files' bytes. An image that was asked about before is not encoded again.
"""

import argparse
from pathlib import Path

from quire import Client, InvalidRequestError

parser = argparse.ArgumentParser()
parser.add_argument("files", nargs="+", type=Path)
parser.add_argument("--server", default="127.0.0.1:50051")
parser.add_argument("--question", default="What is this?")
asked = parser.parse_args()

content: list[str | bytes] = [file.read_bytes() for file in asked.files]
content.append(asked.question)
with Client(asked.server, timeout=120) as client:
    try:
        answer = client.generate([{"role": "user", "content": content}], max_tokens=60, temperature=0)
    except InvalidRequestError as error:  # its `field` names the image that cannot be read
        raise SystemExit(str(error)) from None
    print(answer.sequences[0].text)
    print(f"[{answer.prompt_info.image_token_count} of {answer.usage.prompt_tokens} prompt tokens are the images']")
