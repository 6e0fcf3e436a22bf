"""Sampling parameters as vLLM names them.

A missing parameter has vLLM's default rather than the model's, as in Triton's vLLM back end.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from rpc.frontend.errors import RequestFailed
from rpc.services.inference.tensors import SHOWN
from rpc.services.inference.values import Values
from scheduler.invalid import InvalidRequest
from scheduler.limits import ModelDefaults
from scheduler.parameter import Parameter, parameters_of
from scheduler.parameters import Sampling, Stopping
from scheduler.structured import FIELD, Structured

T = TypeVar("T")

MAX_TOKENS = 16
SILENT = ModelDefaults()  # vLLM's defaults where a model has none
NEUTRAL: dict[str, object] = {
    "best_of": 1,
    "early_stopping": False,
    "flat_logprobs": False,
    "length_penalty": 1.0,
    "spaces_between_special_tokens": True,
    "use_beam_search": False,
}
"""Parameters that are not supported, and the neutral values that are accepted."""


@dataclass(frozen=True, slots=True)
class Parameters:
    """Parameters of one request.

    Attributes:
        logprobs: Alternatives at each output token; None without logprobs.
        prompt_logprobs: Alternatives at each prompt token; None without logprobs.
        text: Text is made of the tokens.
    """

    sampling: Sampling
    stopping: Stopping
    logprobs: int | None
    prompt_logprobs: int | None
    text: bool
    skip_special_tokens: bool
    structured: Structured | None = None

    @property
    def top_logprobs(self) -> int:
        """Alternatives that are enough for output and prompt; below 0 where one of them is."""
        asked = [count for count in (self.logprobs, self.prompt_logprobs) if count is not None]
        return min((count for count in asked if count < 0), default=max(asked, default=0))


def read_parameters(given: Mapping[str, object]) -> Parameters:
    """Reads the parameters of an inference request.

    Raises:
        InvalidRequest: A value is wrong, under the name of its field in `Spec`.
        RequestFailed: There is no such parameter.
    """
    values = Values(given)
    made = Parameters(
        _sampling(values),
        _stopping(values),
        values.integer("logprobs", None),
        values.integer("prompt_logprobs", None),
        values.truth("detokenize", True),
        values.truth("skip_special_tokens", True),
        _structured(values),
    )
    for name, value in values.left.items():
        if name not in NEUTRAL or value != NEUTRAL[name]:
            shown = name[:SHOWN]
            message = f"{shown} is no sampling parameter here: docs/guides/open-inference.md names those that are"
            raise RequestFailed("INVALID_ARGUMENT", "NOT_SUPPORTED", message, field=shown)
    return made


def _read(values: Values, group: Callable[..., T], **own: object) -> T:
    """Returns a group of parameters. own: values that are read otherwise."""
    entries = (entry for entry in parameters_of(group) if entry.vllm and entry.name not in own)
    return group(**{entry.name: _value(values, entry) for entry in entries}, **own)


def _value(values: Values, entry: Parameter) -> object:
    if entry.item is not None:
        return values.texts(entry.vllm) if entry.item is str else values.integers(entry.vllm) or ()
    default = getattr(SILENT, entry.name, entry.default)
    if entry.kind is bool:
        return values.truth(entry.vllm, default)
    read = values.integer if entry.kind is int else values.number
    return entry.read(read(entry.vllm, default))


def _sampling(values: Values) -> Sampling:
    seed, allowed = values.integer("seed", None), values.integers("allowed_token_ids")
    if allowed == ():
        raise InvalidRequest("allowed_token_ids", [], "leaves no token to draw")
    return _read(
        values,
        Sampling,
        seed=None if seed == -1 else seed,
        logit_bias=values.pairs("logit_bias"),
        allowed_token_ids=allowed or (),
    )


def _structured(values: Values) -> Structured | None:
    given = values.constraint("structured_outputs")
    try:
        return _constraint(given) if given else None
    except InvalidRequest as error:  # its names are the native API's
        raise error.of(error.field.replace(FIELD, "structured_outputs").replace(".json_schema", ".json")) from None


def _constraint(given: Mapping[str, object]) -> Structured:
    match given:
        case {"json": dict() | str() as schema, **rest} if not rest:
            return Structured.json_schema(schema)
        case {"regex": str(text), **rest} if not rest:
            return Structured.regex(text)
        case {"choice": list() as texts, **rest} if not rest:
            return Structured.choice(texts)
        case {"grammar": str(text), **rest} if not rest:
            return Structured.grammar(text)
        case {"json_object": True, **rest} if not rest:
            return Structured.json_object()
        case {"structural_tag": dict() | str() as tags, **rest} if not rest:
            return Structured.structural_tag(tags)
    found = ", ".join(given)[:SHOWN]
    raise InvalidRequest(FIELD, found, "must have one of json, regex, choice, grammar, json_object and structural_tag")


def _stopping(values: Values) -> Stopping:
    return _read(values, Stopping, max_tokens=values.integer("max_tokens", MAX_TOKENS))
