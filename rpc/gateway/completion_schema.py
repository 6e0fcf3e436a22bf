"""Schema of the requests of POST /v1/completions."""

from typing import Annotated, Any

from pydantic import BeforeValidator, TypeAdapter, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from rpc.gateway.errors import ApiError
from rpc.gateway.fields import TokenIds, Uint32, only
from rpc.gateway.schema import CommonRequest

MAX_TOKENS = 16  # OpenAI's default
MOST_PROMPTS = 2**12  # worth looking at; --max-prompts is less
Prompt = str | list[int]

IDS = TypeAdapter(TokenIds)


def _prompts(value: Any) -> list[Prompt]:
    """Returns a list of prompts: of a string, token ids, or a list of these. Raises PydanticCustomError."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise PydanticCustomError("prompt", "must be text, token ids, or a list of these that is not empty")
    if isinstance(value[0], int):
        return [_ids(value, "")]
    if len(value) > MOST_PROMPTS:
        raise PydanticCustomError("prompt", "has too many entries")
    return [one if isinstance(one, str) else _ids(one, f"its part {i} ") for i, one in enumerate(value)]


def _ids(value: Any, which: str) -> list[int]:
    try:
        ids = IDS.validate_python(value, strict=True)
    except ValidationError:
        raise PydanticCustomError("prompt", "{which}must be text or token ids", {"which": which}) from None
    if not ids:
        raise PydanticCustomError("prompt", "{which}has no tokens", {"which": which})
    return ids


class CompletionRequest(CommonRequest):
    """A request for completions of one or several prompts. `suffix` and `best_of` may only have neutral values."""

    prompt: Annotated[list[Any], BeforeValidator(_prompts)]
    echo: bool | None = None
    thinking_token_budget: Annotated[Any, only(-1)] = None  # vLLM's, for models that reason in chats
    logprobs: Uint32 | None = None
    add_special_tokens: bool | None = None
    best_of: Uint32 | None = None
    suffix: Annotated[Any, only("")] = None
    prompt_embeds: Annotated[Any, only([])] = None

    @model_validator(mode="after")
    def _of_completions(self) -> "CompletionRequest":
        if self.best_of is not None and self.best_of != self.sequences:
            raise ApiError(400, "best_of is not supported unless it is n", "best_of", code="unsupported_parameter")
        return self

    @property
    def scores_alone(self) -> bool:
        """Whether the client wants the scores of its prompt alone: an echo, without output tokens."""
        return bool(self.echo) and self.max_tokens == 0

    @property
    def longest(self) -> int | None:
        if self.scores_alone:
            return 1  # the least that a server gives
        return MAX_TOKENS if self.max_tokens is None else self.max_tokens
