"""Schema of the requests of POST /v1/chat/completions."""

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from rpc.gateway.errors import ApiError
from rpc.gateway.extras import NotServedInChats
from rpc.gateway.fields import MOST_KEYS, Strict, Uint32, among, only
from rpc.gateway.images import image_bytes
from rpc.gateway.schema import CommonRequest
from rpc.gateway.tools import MOST_CALLS, CallField, Tooled

MOST_MESSAGES = 2**12  # the servers' own limit
MOST_PARTS = 2**12  # parts of all messages: 17 ms of the loop


class ImageUrl(Strict):
    """An image of a message.

    Attributes:
        url: Bytes of the image, decoded from its data URL.
    """

    url: Annotated[bytes, BeforeValidator(image_bytes)]
    detail: Any = None  # a hint: a model here has one resolution
    uuid: Any = None  # vLLM's name for a cached image; here its pixels name it


class ContentPart(Strict):
    """Text, an image, or a refusal of an earlier answer, which is text too."""

    type: Annotated[str, among("text", "image_url", "refusal")]
    text: str | None = None
    image_url: ImageUrl | None = None
    refusal: str | None = None
    cache_control: Any = None  # Anthropic's hint
    prompt_cache_breakpoint: Any = None  # OpenAI's

    @field_validator("image_url", mode="before")
    @classmethod
    def _short_form(cls, value: Any) -> Any:
        return {"url": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _one(self) -> "ContentPart":
        given = [name for name in ("text", "image_url", "refusal") if getattr(self, name) is not None]
        if given != [self.type]:
            raise PydanticCustomError("part", "must have {name}, and nothing else", {"name": self.type})
        return self


def _parts(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


def _bounded(value: Any) -> Any:
    """Checks the counts of messages and parts before pydantic checks the messages themselves."""
    if isinstance(value, list):
        if not value:
            raise PydanticCustomError("messages", "there must be at least one")
        if len(value) > MOST_MESSAGES:
            raise PydanticCustomError("messages", f"there must be at most {MOST_MESSAGES}")
        contents = [one["content"] for one in value if isinstance(one, dict) and isinstance(one.get("content"), list)]
        if sum(map(len, contents)) > MOST_PARTS:
            raise PydanticCustomError("messages", f"their contents have more than {MOST_PARTS} parts")
    return value


class Message(Strict):
    """One message of a conversation.

    Of a response that clients send back, `audio`, `annotations` and `function_call` are accepted if empty. Only
    an assistant's message may have no content, or a refusal.
    """

    role: str
    content: Annotated[
        list[ContentPart] | None, Field(fail_fast=True, validate_default=True), BeforeValidator(_parts)
    ] = None
    name: str | None = None
    tool_calls: Annotated[list[CallField], Field(fail_fast=True, max_length=MOST_CALLS)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # vLLM's newer name
    cache_control: Any = None  # a hint, as the next one
    provider_specific_fields: Any = None  # litellm's, in the answers that its clients send back
    thinking_blocks: Any = None  # litellm's, and OpenRouter's: beside the reasoning itself
    reasoning_details: Any = None
    refusal: str | None = None
    audio: Annotated[Any, only()] = None
    annotations: Annotated[Any, only([])] = None
    function_call: Annotated[Any, only()] = None
    parsed: Any = None  # of openai's `parse`, in messages that it sends back: the content again

    @field_validator("content")
    @classmethod
    def _says(cls, value: Any, info: ValidationInfo) -> Any:
        if value is None and info.data.get("role") != "assistant":
            raise PydanticCustomError("content", "must be text or a list of parts, unless the role is assistant")
        return value

    @model_validator(mode="after")
    def _refuses(self) -> "Message":
        refuses = self.refusal is not None or any(part.refusal is not None for part in self.content or ())
        if refuses and self.role != "assistant":
            raise PydanticCustomError("refusal", "has a refusal, which only a message of the role assistant may have")
        return self

    @property
    def parts(self) -> list[ContentPart]:
        """The content, and a refusal, with which an earlier answer may have had none."""
        said = [] if not self.refusal else [ContentPart(type="refusal", refusal=self.refusal)]
        return [*(self.content or ()), *said]


class ChatRequest(CommonRequest, Tooled, NotServedInChats):
    """A request for the next message of a conversation."""

    messages: Annotated[list[Message], Field(fail_fast=True), BeforeValidator(_bounded)]
    max_completion_tokens: Uint32 | None = None
    logprobs: bool | None = None
    top_logprobs: Uint32 | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(default=None, max_length=MOST_KEYS)

    reasoning_effort: Annotated[str, among("none", "minimal", "low", "medium", "high", "xhigh", "max")] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    @model_validator(mode="after")
    def _of_chats(self) -> "ChatRequest":
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs", "top_logprobs")
        both = self.max_tokens is not None and self.max_completion_tokens is not None
        if both and self.max_tokens != self.max_completion_tokens:
            raise ApiError(400, "max_tokens and max_completion_tokens are the same: give one", "max_tokens")
        if self.continue_final_message and self.add_generation_prompt:
            name = "continue_final_message"
            raise ApiError(400, f"{name} excludes add_generation_prompt", name)
        return self

    @property
    def longest(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
