"""A conversation with a model at a terminal: one types, the other streams."""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from quire.v1 import generation_service_pb2 as pb

from rpc.client import Client, InvalidRequestError, QuireError
from rpc.client.specs import spec_of
from rpc.terminal.conversation import Conversation, NotThatWay

PROMPT = "> "
SECONDS = 15  # for the first answer of a server
KEPT = "\n\t"
NO_TEMPLATE = "the model has no chat template; `quire chat --text` goes on from plain text"
HARMLESS = {code: "\ufffd" for code in [*range(32), *range(127, 160)] if chr(code) not in KEPT}


class NoTemplate(RuntimeError):
    """The model holds no conversations."""


@dataclass(slots=True)
class Answer:
    """text: so far. began, first, last: when it was asked for, and its first and newest tokens came, in seconds."""

    began: float
    text: str = ""
    first: float | None = None
    last: float = 0.0
    early: int = 0  # tokens that came with the first message
    tokens: int = 0
    usage: pb.Usage | None = None
    finish: str = ""
    seed: int = 0

    def take(self, message: pb.StreamGenerateResponse, now: float) -> str:
        """Its new text."""
        new = "".join(delta.text for delta in message.deltas if delta.index == 0)
        count = sum(delta.token_count for delta in message.deltas)
        self.seed = message.prompt_info.seed or self.seed
        for delta in message.deltas:
            if delta.finish_reason:
                self.finish = pb.FinishReason.Name(delta.finish_reason).removeprefix("FINISH_REASON_").lower()
        if self.first is None:
            self.first, self.early = now, count
        self.text, self.tokens, self.last = self.text + new, self.tokens + count, now
        if message.HasField("usage"):
            self.usage = message.usage
        return new

    def summary(self) -> str:
        """How it was, in a line."""
        said = []
        if self.usage is not None:
            said.append(f"{self.usage.prompt_tokens} prompt tokens ({self.usage.cached_prompt_tokens} cached)")
        said.append(f"{self.tokens} generated")
        if self.first is not None:
            seconds, after = self.last - self.first, self.tokens - self.early
            if seconds > 0 and after:
                said.append(f"{after / seconds:.1f} tokens/s")
            said.append(f"first after {1000 * (self.first - self.began):.0f} ms")
        return ", ".join([*said, self.finish or "stopped", f"seed {self.seed}"])


def talk(
    client: Client,
    conversation: Conversation,
    model: str,
    said: Callable[[Exception], str],
    read: Callable[[str], str] = input,
) -> None:
    """Until /quit or the end of the input. said: a failure, as a person is told it.

    Raises:
        NoTemplate: The model holds no conversations.
        QuireError: No server answers. Raised before the first line is read.
        ValueError: The server has no model of this name. Raised before the first line is read.
    """
    _check(client, conversation, model)
    prompt = PROMPT if sys.stdin.isatty() else ""
    while not conversation.over:
        try:
            line = read(prompt).strip()
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print("\n/quit or Ctrl-D ends")
            continue
        if line.startswith("/") and not line.startswith("//"):
            _do(conversation, line)
        elif line:
            _answer(client, conversation, line.removeprefix("/") if line.startswith("//") else line, model, said)


def _check(client: Client, conversation: Conversation, model: str) -> None:
    """Asks the server whether it has the model and, for a conversation, a chat template.

    Raises NoTemplate, QuireError, ValueError for another model's name.
    """
    served = client.models(SECONDS)
    if model and model not in {one.name for one in served}:
        raise ValueError(f"model {model!r} is not served here, {', '.join(repr(one.name) for one in served)} is")
    asked = [one for one in served if not model or one.name == model]
    if not conversation.plain and any(one.HasField("chat_template") and not one.chat_template for one in asked):
        raise NoTemplate(NO_TEMPLATE)


def _do(conversation: Conversation, line: str) -> None:
    try:
        said = conversation.command(line)
    except (NotThatWay, OSError) as error:
        said = str(error)
    if said:
        print(said)


def _answer(
    client: Client, conversation: Conversation, words: str, model: str, said: Callable[[Exception], str]
) -> None:
    """Prints it as it comes. Where there is none, the words are taken back."""
    prompt, images = conversation.ask(words)
    answer = Answer(time.monotonic())
    failure = ""
    try:
        spec = spec_of(prompt, images, **conversation.options, model=model)
        with client.stream_request(pb.StreamGenerateRequest(spec=spec)) as stream:
            for message in stream:
                # A model may write what a terminal takes for a command: it shows that there was something.
                print(answer.take(message, time.monotonic()).translate(HARMLESS), end="", flush=True)
    except KeyboardInterrupt:
        pass  # what there is of the answer counts
    except (QuireError, ValueError) as error:
        if isinstance(error, InvalidRequestError) and error.reason == "NO_CHAT_TEMPLATE":
            conversation.withdrawn()
            raise NoTemplate(NO_TEMPLATE) from None
        failure = f"quire: {said(error)}"
    print()
    if answer.text:
        conversation.answered(answer.text)
    else:
        conversation.withdrawn()
    print(failure or f"[{answer.summary()}]")
