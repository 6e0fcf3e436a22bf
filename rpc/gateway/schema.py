"""Fields that the requests of both endpoints share, under OpenAI's names, else vLLM's."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, model_validator

from rpc.gateway.errors import ApiError
from rpc.gateway.extras import Hints, NotServed
from rpc.gateway.fields import (
    MOST_KEYS,
    UINT32,
    Biases,
    Int32,
    ModelName,
    OneOrMore,
    Seed,
    Strict,
    TokenIds,
    Uint32,
    among,
    only,
)
from rpc.gateway.regular import RegularFields
from rpc.gateway.structured import Constrained

NO_PENALTY = 1.0  # vLLM's default for length_penalty, which its clients send with any request
REQUEST_ID = r"^[!-~]{1,96}$"  # visible ASCII; a server takes it with what is added to it


class StreamOptions(Strict):
    """Options of a stream.

    Attributes:
        include_usage: A chunk of its own at the end has the counts of tokens.
        continuous_usage_stats: Each chunk has its choice's counts so far; goes with include_usage.
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Annotated[Any, only(False)] = None


class CommonRequest(RegularFields, Constrained, Hints, NotServed):
    """A request of either endpoint. None is unset, as null is. Raises ApiError for fields that do not go together."""

    model: ModelName | None = None
    stop: OneOrMore | None = None
    seed: Seed | None = None
    logit_bias: Biases | None = None
    max_tokens: Uint32 | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    # vLLM's
    allowed_token_ids: TokenIds | None = Field(default=None, min_length=1)
    priority: Int32 | None = None
    cache_salt: str | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    logits_processors_args: dict[str, dict[str, Any]] | None = Field(default=None, max_length=MOST_KEYS)
    prompt_logprobs: Uint32 | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=UINT32)] | None = None
    truncation_side: Annotated[str, among("left", "right")] | None = None
    stream_interval: Annotated[int, Field(ge=1, le=UINT32)] | None = None
    request_id: Annotated[str, Field(pattern=REQUEST_ID)] | None = None

    @model_validator(mode="after")
    def _together(self) -> "CommonRequest":
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options goes with stream alone", "stream_options")
        if self.prompt_logprobs and self.stream:
            raise ApiError(400, "prompt_logprobs is not available with stream", "prompt_logprobs")
        if self.length_penalty not in (None, NO_PENALTY) and not self.use_beam_search:
            raise ApiError(400, "length_penalty goes with use_beam_search alone", "length_penalty")
        if len(self.constraints) > 1:
            raise ApiError(400, "response_format and structured_outputs exclude each other", "structured_outputs")
        return self

    @property
    def own_names(self) -> Mapping[str, str]:
        """The client's names of the spec's fields, where they are other than those of its endpoint's kin."""
        return {}

    @property
    def sequences(self) -> int:
        """Sequences of each prompt."""
        return 1 if self.n is None else self.n

    @property
    def longest(self) -> int | None:
        """Most tokens of each sequence; None for as many as fit."""
        return self.max_tokens

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def counts_continuously(self) -> bool:
        options = self.stream_options
        return self.includes_usage and options is not None and bool(options.continuous_usage_stats)
