"""Runs a conversation at a terminal: the person types, the model's answers stream."""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from quire.v1 import generation_service_pb2 as pb

from rpc.client import Client, InvalidRequestError, QuireError
from rpc.client.specs import spec_of
from rpc.terminal.conversation import Conversation, NotThatWay
from rpc.terminal.interrupt import cancelled_by_ctrl_c

PROMPT = "> "
SECONDS = 15  # for a server's first response
KEPT = "\n\t"  # control characters that are printed as they are
NO_TEMPLATE = "the model has no chat template; `quire chat --text` goes on from plain text"
HARMLESS = {code: "\ufffd" for code in [*range(32), *range(127, 160)] if chr(code) not in KEPT}


class NoTemplate(RuntimeError):
    """The model has no chat template, so it cannot hold conversations."""


@dataclass(slots=True)
class ChatAnswer:
    """An answer and its figures. Times are seconds of time.monotonic.

    Attributes:
        began: Time of the request.
        text: Text so far.
        first: Arrival of the first message; None before it.
        last: Arrival of the newest message.
        early: Number of tokens in the first message.
        tokens: Number of tokens so far.
        usage: The server's token counts, once known.
        finish: Finish reason; "" before the end.
        seed: Seed of the draws.
        thinks: What was shown last is reasoning.
    """

    began: float
    text: str = ""
    first: float | None = None
    last: float = 0.0
    early: int = 0
    tokens: int = 0
    usage: pb.Usage | None = None
    finish: str = ""
    seed: int = 0
    thinks: bool = False

    def add_message(self, message: pb.StreamGenerateResponse, now: float) -> tuple[str, str]:
        """Records a message, and returns its new reasoning and text."""
        new = "".join(delta.text for delta in message.deltas if delta.index == 0)
        thought = "".join(delta.reasoning for delta in message.deltas if delta.index == 0)
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
        return thought, new

    def summary(self) -> str:
        """Returns the figures as one line."""
        figures = []
        if self.usage is not None:
            figures.append(f"{self.usage.prompt_tokens} prompt tokens ({self.usage.cached_prompt_tokens} cached)")
        figures.append(f"{self.tokens} generated")
        if self.first is not None:
            seconds, after = self.last - self.first, self.tokens - self.early
            if seconds > 0 and after:
                figures.append(f"{after / seconds:.1f} tokens/s")
            figures.append(f"first after {1000 * (self.first - self.began):.0f} ms")
        return ", ".join([*figures, self.finish or "stopped", f"seed {self.seed}"])


def talk(
    client: Client,
    conversation: Conversation,
    model: str,
    said: Callable[[Exception], str],
    read: Callable[[str], str] = input,
) -> None:
    """Runs a conversation until /quit or the end of the input.

    Args:
        client: Client of the server.
        conversation: The conversation.
        model: Name of the model; "" is the only one.
        said: Returns a failure as a sentence.
        read: Prints a prompt and reads a line.

    Raises:
        NoTemplate: The model cannot hold conversations.
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
    """Checks that the server has the model and, for a conversation, a chat template.

    Raises:
        NoTemplate: The model has no chat template.
        QuireError: No server answers.
        ValueError: The server has no model of this name.
    """
    served = client.models(SECONDS)
    if model and model not in {one.name for one in served}:
        raise ValueError(f"model {model!r} is not served here, {', '.join(repr(one.name) for one in served)} is")
    candidates = [one for one in served if not model or one.name == model]
    if not conversation.plain and any(one.HasField("chat_template") and not one.chat_template for one in candidates):
        raise NoTemplate(NO_TEMPLATE)


def _do(conversation: Conversation, line: str) -> None:
    try:
        reply = conversation.command(line)
    except (NotThatWay, OSError) as error:
        reply = str(error)
    if reply:
        print(reply)


def _show_thought(text: str, before: bool) -> None:
    """Shows reasoning; before: text follows, on a line of its own."""
    dim, plain = ("\x1b[2m", "\x1b[0m") if sys.stdout.isatty() else ("", "")
    if text:
        print(f"{dim}{text}{plain}", end="", flush=True)
    if before:
        print("\n")


def _answer(
    client: Client, conversation: Conversation, words: str, model: str, said: Callable[[Exception], str]
) -> None:
    """Prints an answer as it comes. Words without an answer are withdrawn."""
    prompt, images = conversation.ask(words)
    answer = ChatAnswer(time.monotonic())
    failure = ""
    try:
        spec = spec_of(prompt, images, **conversation.options, model=model)
        stream = client.stream_request(pb.StreamGenerateRequest(spec=spec))
        with cancelled_by_ctrl_c(stream), stream:
            for message in stream:
                thought, text = answer.add_message(message, time.monotonic())
                # Control characters of a model could be commands to the terminal: each is shown as U+FFFD.
                _show_thought(thought.translate(HARMLESS), before=bool(text and answer.thinks))
                answer.thinks = bool(thought) or (answer.thinks and not text)
                print(text.translate(HARMLESS), end="", flush=True)
    except KeyboardInterrupt:
        pass  # the answer so far counts
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
