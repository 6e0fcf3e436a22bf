"""Prompts of a request that are more than text: conversations, and how a prompt that is too long is cut."""

from collections.abc import Sequence
from dataclasses import dataclass

from scheduler.invalid import require
from scheduler.limits import Limits
from scheduler.parameters import Stopping
from scheduler.tools import MOST_CALLS, NO_TOOLS, ToolCall, ToolUse

MOST_MESSAGES = 4096  # messages of a conversation


@dataclass(frozen=True, slots=True)
class ImageHere:
    """A part of a message: the first of the request's images that no part before it stands for."""


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a conversation.

    Attributes:
        role: "system", "user", "assistant", "tool", or another that the model's template knows.
        content: Text, or texts and images in their order.
        tool_calls: Calls of an assistant's message.
        tool_call_id: Id of the call that a tool's message has the result of; "" for none.
        name: Name of the tool, or of who speaks; "" for none.
        reasoning: Text that an assistant thought before its content; "" for none.
    """

    role: str
    content: str | tuple[str | ImageHere, ...]
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""
    reasoning: str = ""

    @property
    def parts(self) -> tuple[str | ImageHere, ...]:
        return (self.content,) if isinstance(self.content, str) else self.content


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation, oldest message first.

    Attributes:
        arguments: Arguments of the model's template, pairs of name and JSON.
        add_generation_prompt: Value of the template's variable of this name: it begins the model's next message.
        continue_final_message: The prompt ends with the text of the last message.
        tool_use: Tools that the model may call.
    """

    messages: tuple[ChatMessage, ...]
    arguments: tuple[tuple[str, str], ...] = ()
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tool_use: ToolUse = NO_TOOLS

    def __post_init__(self) -> None:
        check_message_count(len(self.messages))
        for i, message in enumerate(self.messages):
            role, content = message.role, message.content
            require(isinstance(role, str) and role, f"chat.messages[{i}].role", role, "must be text, and not empty")
            name, known = f"chat.messages[{i}].content", isinstance(content, str | tuple)
            known = known and all(isinstance(part, str | ImageHere) for part in message.parts)
            require(known, name, content, "must be text, or texts and images")
            name, count = f"chat.messages[{i}].tool_calls", len(message.tool_calls)
            require(not count or role == "assistant", name, f"{count} calls", "are an assistant's alone")
            require(count <= MOST_CALLS, name, f"{count} calls", f"at most {MOST_CALLS}")
            said = message.reasoning
            require(not said or role == "assistant", f"chat.messages[{i}].reasoning", said, "is an assistant's alone")
        if self.continue_final_message:
            name = "chat.continue_final_message"
            require(not self.add_generation_prompt, name, True, "goes without chat.add_generation_prompt")
            texts = any(isinstance(part, str) for part in self.messages[-1].parts)
            require(texts, name, True, "the last message has no text")

    @property
    def image_fields(self) -> tuple[str, ...]:
        """Returns the client's names of its images, in their order."""
        return tuple(
            f"chat.messages[{i}].parts[{j}].image"
            for i, message in enumerate(self.messages)
            for j, part in enumerate(message.parts)
            if isinstance(part, ImageHere)
        )


def check_message_count(count: int) -> None:
    """Checks the number of messages, before a `Chat` is made of them. Raises InvalidRequest."""
    require(1 <= count <= MOST_MESSAGES, "chat.messages", f"{count} messages", f"must be 1 to {MOST_MESSAGES}")


@dataclass(frozen=True, slots=True)
class Truncation:
    """Rule by which a prompt that is too long is cut.

    Attributes:
        tokens: Tokens that are kept; None for as many as leave room for the output.
        keep_first: Keeps the first tokens; else the last ones, behind the special tokens that begin a text.
    """

    tokens: int | None = None
    keep_first: bool = False

    def __post_init__(self) -> None:
        known = self.tokens is None or self.tokens > 0
        require(known, "prompt_truncation.tokens", self.tokens, "must be at least 1; unset it for what fits")

    def cut(self, prompt: Sequence[int], beginning: int, stopping: Stopping, limits: Limits) -> list[int]:
        """Returns the tokens of the prompt that are kept. beginning: number of special tokens that begin it."""
        keep = self.tokens if self.tokens is not None else max(1, limits.longest - (stopping.max_tokens or 1))
        if len(prompt) <= keep or self.keep_first:
            return list(prompt[:keep])
        beginning = min(beginning, keep)
        return [*prompt[:beginning], *prompt[len(prompt) - keep + beginning :]]
