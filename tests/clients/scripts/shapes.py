"""Types of answers and of tools' arguments that several clients ask for.

The demo model writes nonsense. Only a constraint makes its text valid by these types, so a client that parses its
answer shows that the constraint arrived.
"""

from datetime import date
from enum import Enum
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Closed(BaseModel):
    """A type without other properties, which the model would write until `max_tokens`."""

    model_config = ConfigDict(extra="forbid")


class Mood(Enum):
    GLAD = "glad"
    SAD = "sad"


class Person(Closed):
    name: str = Field(max_length=8)
    age: int = Field(ge=0, le=150)
    mood: Mood


class Trip(Closed):
    """A type with another one in it, a list of them, a value that may be null, and a format."""

    host: Person
    guests: list[Person] = Field(min_length=1, max_length=2)
    note: str | None = Field(max_length=8)
    start: date


class Weather(Closed):
    """Arguments of a tool."""

    city: Literal["Oslo", "Rome"]
    days: int = Field(ge=1, le=7)


class Anything(BaseModel):
    """Any JSON object, for modes that only the prompt tells the schema."""

    model_config = ConfigDict(extra="allow")


# Without the penalty the model indents each token of JSON by 40 spaces.
SAYING: dict[str, Any] = {"max_tokens": 600, "temperature": 1.0, "seed": 3, "frequency_penalty": 2.0}
QUESTION: list[Any] = [{"role": "user", "content": "Who goes where?"}]

# The same for /v1/responses, which has no frequency_penalty.
RESPONDING: dict[str, Any] = {
    "max_output_tokens": 1200,
    "temperature": 1.0,
    "extra_body": {"seed": 3, "repetition_penalty": 1.5},
}
