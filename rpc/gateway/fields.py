"""Types of the fields of requests. What a value may be is the server's to say; here is what its messages can carry, and
what is work to look at is bounded.
"""

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

MOST_KEYS = 256  # of an object: what is unknown is listed before it is refused
MOST_STRINGS = 2**12  # of a list
MOST_BIASES = 2**14
UINT32, INT32 = 2**32 - 1, 2**31 - 1

Uint32 = Annotated[int, Field(ge=0, le=UINT32)]
Int32 = Annotated[int, Field(ge=-INT32 - 1, le=INT32)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**64)]
TopK = Annotated[int, Field(ge=-1, le=UINT32)]
TokenIds = Annotated[list[Uint32], Field(fail_fast=True)]
Strings = Annotated[list[str], Field(fail_fast=True, max_length=MOST_STRINGS)]


class Strict(BaseModel):
    """An object of which every field is known and of its type."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _bounded(cls, value: Any) -> Any:
        if isinstance(value, dict) and len(value) > MOST_KEYS:
            raise PydanticCustomError("too_many_keys", "has too many keys")
        return value


def _one_or_more(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


OneOrMore = Annotated[Strings, BeforeValidator(_one_or_more)]
"""A string, or a list of them."""


def _biases(value: Any) -> Any:
    """Pairs of token id and bias."""
    if not isinstance(value, dict):
        raise PydanticCustomError("dict_type", "must be an object of token ids and numbers")
    if len(value) > MOST_BIASES:
        raise PydanticCustomError("too_many_keys", "has too many keys")
    pairs = []
    for key, bias in value.items():
        if not (isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= 10 and int(key) <= UINT32):
            raise PydanticCustomError("token_id", "its keys must be token ids")
        if isinstance(bias, bool) or not isinstance(bias, int | float):
            raise PydanticCustomError("bias", "its values must be numbers")
        pairs.append((int(key), float(min(max(bias, -1e30), 1e30))))
    return pairs


Biases = Annotated[list[tuple[int, float]], BeforeValidator(_biases)]


def only(*neutral: Any) -> AfterValidator:
    """Of a field that is not supported: null, or one of the values that ask for nothing."""

    def check(value: Any) -> Any:
        if value is not None and not any(type(value) is type(one) and value == one for one in neutral):
            raise PydanticCustomError("unsupported_parameter", "is not supported")
        return value

    return AfterValidator(check)


def among(*allowed: str) -> AfterValidator:
    """Of a text field of which only some values are supported."""

    def check(value: str) -> str:
        if value not in allowed:
            known = ", ".join(map(repr, allowed))
            raise PydanticCustomError("unsupported_value", "is not supported unless it is {known}", {"known": known})
        return value

    return AfterValidator(check)
