"""Fields of requests whose names and types come from the table of parameters."""

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, create_model

from rpc.gateway.fields import Strict, Strings, TokenIds, Uint32
from scheduler.parameter import UINT32, Parameter
from scheduler.parameters import PARAMETERS

READ_BY_HAND = ("seed", "logit_bias", "max_tokens", "text", "logprobs", "prompt_logprobs")
REGULAR = tuple(entry for entry in PARAMETERS if entry.vllm and entry.name not in READ_BY_HAND)
"""Entries whose value goes to the server as it is. `CommonRequest` declares those again whose type is narrower."""


def _type(entry: Parameter) -> Any:
    if entry.item is not None:
        return Strings if entry.item is str else TokenIds
    if entry.kind is not int:
        return entry.kind
    return Uint32 if entry.off is None else Annotated[int, Field(ge=entry.off, le=UINT32)]


if TYPE_CHECKING:

    class RegularFields(Strict):
        """The fields that other files read by name, for a type checker, which cannot see the class below."""

        n: int | None = None
        skip_special_tokens: bool | None = None
        stop_token_ids: list[int] | None = None
else:
    RegularFields = create_model(
        "RegularFields", __base__=Strict, **{entry.vllm: (_type(entry) | None, None) for entry in REGULAR}
    )
