"""What both endpoints' requests have, in OpenAI's words and, for what OpenAI does not have, in vLLM's."""

from typing import Annotated, Any

from pydantic import Field, model_validator

from rpc.gateway.errors import ApiError
from rpc.gateway.fields import (
    Biases,
    Int32,
    OneOrMore,
    Seed,
    Strict,
    Strings,
    TokenIds,
    TopK,
    Uint32,
    only,
)


class StreamOptions(Strict):
    """include_usage: a chunk of its own at the end has the counts of tokens."""

    include_usage: bool | None = None
    include_obfuscation: Annotated[Any, only(False)] = None


class Asked(Strict):
    """A request of either endpoint. None is unset, as null is. Raises ApiError for fields that do not go together."""

    model: str | None = None
    n: Uint32 | None = None
    stop: OneOrMore | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: Seed | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: Biases | None = None
    max_tokens: Uint32 | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    """Of no consequence here."""

    # vLLM's
    top_k: TopK | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: Uint32 | None = None
    ignore_eos: bool | None = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    bad_words: Strings | None = None
    allowed_token_ids: TokenIds | None = Field(default=None, min_length=1)
    priority: Int32 | None = None
    cache_salt: str | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None

    @model_validator(mode="after")
    def _together(self) -> "Asked":
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options goes with stream alone", "stream_options")
        if self.length_penalty is not None and not self.use_beam_search:
            raise ApiError(400, "length_penalty goes with use_beam_search alone", "length_penalty")
        return self

    @property
    def sequences(self) -> int:
        """Of each prompt."""
        return 1 if self.n is None else self.n

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)
