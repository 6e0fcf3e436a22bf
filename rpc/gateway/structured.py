"""Fields of requests that constrain the output: OpenAI's response_format and vLLM's structured_outputs."""

from typing import Annotated, Any

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError
from quire.v1 import generation_service_pb2 as pb

from rpc.client.structured_output import structured_of
from rpc.gateway.fields import Strict, Strings, among, only


class JsonSchema(Strict):
    """A named JSON schema. `strict` says what is done anyway: the output is valid by it."""

    name: str | None = None  # a hint, as the next one
    description: Any = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


def tags_given(structures: Any, triggers: Any, form: Any) -> dict[str, Any]:
    """Returns the fields of structural tags that a client has given, in one of vLLM's two forms."""
    values = {"structures": structures, "triggers": triggers, "format": form}
    return {key: value for key, value in values.items() if value is not None}


class ResponseFormat(Strict):
    """Form of the output. Structural tags are vLLM's, in one of its two forms."""

    type: Annotated[str, among("text", "json_object", "json_schema", "structural_tag")]
    json_schema: JsonSchema | None = None
    structures: Any = None
    triggers: Any = None
    format: Any = None

    @model_validator(mode="after")
    def _one(self) -> "ResponseFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise PydanticCustomError(
                "response_format", "has json_schema where its type is json_schema, and only there"
            )
        if self.type != "structural_tag" and self._tags():
            raise PydanticCustomError(
                "response_format", "has structures, triggers and format only where its type is structural_tag"
            )
        return self

    def _tags(self) -> dict[str, Any]:
        return tags_given(self.structures, self.triggers, self.format)

    def message(self) -> pb.StructuredOutput | None:
        """Returns the constraint; None for any text."""
        if self.type == "text":
            return None
        if self.type == "structural_tag":
            return structured_of({"structural_tag": self._tags()})
        schema = None if self.json_schema is None else self.json_schema.schema_
        return structured_of({"json_object": True} if schema is None else {"json_schema": schema})


class StructuredOutputs(Strict):
    """One constraint; vLLM's names."""

    json_: dict[str, Any] | str | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: Strings | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: dict[str, Any] | str | None = None

    disable_any_whitespace: Annotated[Any, only(False)] = None
    disable_additional_properties: Annotated[Any, only(False)] = None
    whitespace_pattern: Annotated[Any, only()] = None

    @model_validator(mode="after")
    def _one(self) -> "StructuredOutputs":
        if len(self._given()) > 1:
            raise PydanticCustomError("structured_outputs", "must have one constraint")
        return self

    def _given(self) -> dict[str, Any]:
        values = {
            "json_schema": self.json_, "regex": self.regex, "choice": self.choice, "grammar": self.grammar,
            "json_object": self.json_object or None, "structural_tag": self.structural_tag,
        }  # fmt: skip
        return {kind: value for kind, value in values.items() if value is not None}

    def message(self) -> pb.StructuredOutput | None:
        """Returns the constraint; None where there is none."""
        given = self._given()
        return structured_of(given) if given else None


class Constrained(Strict):
    """The fields."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None

    @property
    def constraints(self) -> dict[str, pb.StructuredOutput]:
        """Constraints by the name of their field."""
        fields = {"response_format": self.response_format, "structured_outputs": self.structured_outputs}
        made = {name: field.message() for name, field in fields.items() if field is not None}
        return {name: message for name, message in made.items() if message is not None}
