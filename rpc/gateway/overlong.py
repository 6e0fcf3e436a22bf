"""Says in OpenAI's words that a prompt and its output do not fit in the model's context.

litellm, langchain and others look for these words, and some for the numbers in them.
"""

import re

CODE = "context_length_exceeded"
PROMPT = re.compile(r"[\w.\[\]]+ is '(?:token )?(\d+)(?: of the images| tokens)': prompt and output must fit in (\d+)")
BYTES = re.compile(r"[\w.]+ is '(\d+) bytes': at most (\d+) bytes for (\d+) tokens")
OUTPUT = re.compile(r"[\w.]+ is (\d+): at most (\d+) fit after (\d+) prompt tokens")


def openais_words(message: str, output: int | None) -> str | None:
    """Returns OpenAI's sentences for a server's refusal; None where it is another refusal.

    Args:
        message: The server's; what is in quotes there is the server's own, too.
        output: Tokens of output that were asked for.
    """
    if found := PROMPT.match(message):
        prompt, context = map(int, found.groups())
        return _sentences(context, prompt, output or 1)
    if found := OUTPUT.match(message):
        asked, room, prompt = map(int, found.groups())
        return _sentences(prompt + room, prompt, asked)
    if found := BYTES.match(message):
        size, most, context = map(int, found.groups())
        return f"{_context(context)} However, your prompt has {size} bytes, and at most {most} are read for that."
    return None


def _sentences(context: int, prompt: int, output: int) -> str:
    return (
        f"{_context(context)} However, you requested {prompt + output} tokens ({prompt} in the prompt, {output} in the "
        "completion)."
    )


def _context(tokens: int) -> str:
    return f"This model's maximum context length is {tokens} tokens."
