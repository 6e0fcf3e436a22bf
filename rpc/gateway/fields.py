"""Types of the fields of requests.

They accept what a server's message can carry; the server checks the values. Sizes of lists and objects are bounded,
since checking them is work.
"""

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

MOST_KEYS = 256  # keys of an object: pydantic lists all unknown keys before it refuses them
MOST_STRINGS = 2**12  # strings of a list
MOST_BIASES = 2**14
UINT32, INT32 = 2**32 - 1, 2**31 - 1

ModelName = Annotated[str, Field(max_length=1024)]  # it goes into logs
Uint32 = Annotated[int, Field(ge=0, le=UINT32)]
Int32 = Annotated[int, Field(ge=-INT32 - 1, le=INT32)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**64)]
TokenIds = Annotated[list[Uint32], Field(fail_fast=True)]
Strings = Annotated[list[str], Field(fail_fast=True, max_length=MOST_STRINGS)]


class Strict(BaseModel):
    """An object without unknown fields, each value of its field's exact type."""

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
    """Returns pairs of token id and bias."""
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
    """Returns a validator of an unsupported field: accepts null and the neutral values, which ask for nothing."""

    def check(value: Any) -> Any:
        if value is not None and not any(type(value) is type(one) and value == one for one in neutral):
            raise PydanticCustomError("unsupported_parameter", "is not supported")
        return value

    return AfterValidator(check)


def among(*allowed: str) -> AfterValidator:
    """Returns a validator of a text field that accepts only these values."""

    def check(value: str) -> str:
        if value not in allowed:
            known = ", ".join(map(repr, allowed))
            raise PydanticCustomError("unsupported_value", "is not supported unless it is {known}", {"known": known})
        return value

    return AfterValidator(check)
