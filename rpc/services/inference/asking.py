"""Turns a request's tensors and parameters into a `Spec`, and into the outputs that its client asks for."""

import binascii
from collections.abc import Mapping
from dataclasses import dataclass

from rpc.frontend.errors import RequestFailed, invalid
from rpc.services.inference import pb
from rpc.services.inference.parameters import Parameters, read_parameters
from rpc.services.inference.tensors import (
    EXCLUDE,
    FLAGS,
    IMAGE,
    PARAMETERS,
    SHOWN,
    STREAM,
    TEXT,
    Inputs,
    read_inputs,
    read_output_names,
)
from rpc.services.inference.values import MOST_VALUES, Values, read_json, value_of
from scheduler.invalid import InvalidRequest
from scheduler.parameters import Output
from scheduler.spec import Spec

VERSION = "1"  # the model's only version
EMPTY_FINAL = "triton_enable_empty_final_response"
OWN = (
    "sequence_id",
    "sequence_start",
    "sequence_end",
    "priority",
    "timeout",
    "headers",
    "binary_data_output",
    EMPTY_FINAL,
)
"""Parameters of a request that are the protocol's own, and never those of sampling."""
FILES = (b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff")  # beginnings of PNG and JPEG, which base64 cannot have
TAGS = "structured_output.structural_tag"
NAMES = {
    "text": TEXT.name,
    "images": IMAGE.name,
    "sampling": PARAMETERS.name,
    "sampling.sequence_count": "n",
    "stopping.include_stop": "include_stop_str_in_output",
    "output.top_logprobs": "logprobs",
    "max_queue_time": "timeout",
    "structured_output.json_schema": "structured_outputs.json",
    "structured_output.json_object": "structured_outputs.json_object",
    "structured_output.regex": "structured_outputs.regex",
    "structured_output.choice": "structured_outputs.choice",
    "structured_output.grammar": "structured_outputs.grammar",
    TAGS: "structured_outputs.structural_tag",
}
"""This protocol's names of Spec's fields, where the two differ."""


@dataclass(frozen=True, slots=True)
class InferRequest:
    """A request as its client states it.

    Attributes:
        id: The client's id, which comes back in the answers.
        spec: The request for the frontend.
        stream: Answers come as output does; else one answer comes at the end.
        before: Text that each sequence's output begins with.
        outputs: Names of the outputs, in the order of an answer.
        raw: Elements of the outputs go into raw_output_contents.
        logprobs: See `Parameters`.
        prompt_logprobs: See `Parameters`.
    """

    id: str
    spec: Spec
    stream: bool
    before: str
    outputs: tuple[str, ...]
    raw: bool
    logprobs: int | None
    prompt_logprobs: int | None


def read_request(message: pb.ModelInferRequest, most_id_bytes: int) -> InferRequest:
    """Reads a request.

    Args:
        message: The request.
        most_id_bytes: Characters that its id may have.

    Raises:
        RequestFailed: The request cannot be served.
    """
    try:
        if len(message.id) > most_id_bytes:
            raise InvalidRequest("id", f"{len(message.id)} characters", f"at most {most_id_bytes}")
        check_version(message.model_version)
        return _asked(message)
    except InvalidRequest as error:
        raise invalid(error) from None


def check_version(version: str) -> None:
    """Raises RequestFailed NOT_FOUND unless the version is the model's only one, or empty."""
    if version not in ("", VERSION):
        message = f"there is no version {version[:SHOWN]!r} of a model, only {VERSION!r}"
        raise RequestFailed("NOT_FOUND", "MODEL_NOT_FOUND", message, field=version[:SHOWN])


def _asked(message: pb.ModelInferRequest) -> InferRequest:
    inputs, named = read_inputs(message), read_output_names(message)
    if TEXT.name not in inputs.elements:
        raise InvalidRequest(TEXT.name, None, "every request needs it")
    own, beside = _beside(message.parameters)
    given = inputs.elements.get(PARAMETERS.name)
    parameters = read_parameters(beside if given is None else _object(PARAMETERS.name, given[0]))
    text, stream = _text(inputs.elements[TEXT.name][0]), inputs.flags.get(STREAM.name, False)
    return InferRequest(
        id=message.id,
        spec=_spec(message.model_name, text, inputs, parameters, own),
        stream=stream,
        before="" if _excludes(inputs, stream) else text,
        outputs=named or _outputs(inputs, parameters),
        raw=bool(message.raw_input_contents),
        logprobs=parameters.logprobs,
        prompt_logprobs=parameters.prompt_logprobs,
    )


def _spec(model: str, text: str, inputs: Inputs, parameters: Parameters, own: Values) -> Spec:
    timeout = own.integer("timeout", 0)  # microseconds
    return Spec(
        prompt=text,
        images=tuple(_file(f"{IMAGE.name}[{i}]", data) for i, data in enumerate(inputs.elements.get(IMAGE.name, ()))),
        model=model,
        sampling=parameters.sampling,
        stopping=parameters.stopping,
        output=Output(
            text=parameters.text,
            logprobs=parameters.logprobs is not None,
            top_logprobs=parameters.top_logprobs,
            prompt_logprobs=parameters.prompt_logprobs is not None,
            skip_special_tokens=parameters.skip_special_tokens,
        ),
        max_queue_time=timeout / 1e6 if timeout else None,
        structured=parameters.structured,
    )


def _beside(given: Mapping[str, pb.InferParameter]) -> tuple[Values, dict[str, object]]:
    """Splits a request's parameters into the protocol's own and the others, which are read as sampling parameters."""
    if len(given) > MOST_VALUES:
        raise InvalidRequest("parameters", f"{len(given)} of them", f"at most {MOST_VALUES}")
    values = {name: value_of(parameter) for name, parameter in given.items()}
    own = Values({name: values.pop(name) for name in OWN if name in values})
    own.truth(EMPTY_FINAL, False)  # it changes nothing: the last answer has data anyway
    for name in ("sequence_id", "priority"):
        if own.left.get(name) not in (None, 0, ""):
            raise RequestFailed("INVALID_ARGUMENT", "NOT_SUPPORTED", f"{name} is not supported", field=name)
    return own, values


def _object(name: str, data: bytes) -> dict[str, object]:
    value = read_json(name, data)
    if not isinstance(value, dict):
        raise InvalidRequest(name, f"a JSON {type(value).__name__}", "must be a JSON object")
    return value


def _text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(TEXT.name, f"{len(data)} bytes", f"is no UTF-8 text: {error.reason}") from None


def _file(name: str, data: bytes) -> bytes:
    """Returns the file of an image, which is sent as it is or as base64."""
    if data.startswith(FILES):
        return data
    try:
        return binascii.a2b_base64(data)
    except ValueError:
        raise InvalidRequest(name, f"{len(data)} bytes", "is neither PNG, JPEG nor base64") from None


def _excludes(inputs: Inputs, stream: bool) -> bool:
    """Returns whether the prompt stays out of the output."""
    excludes = inputs.flags.get(EXCLUDE.name, stream)
    if stream and not excludes:
        raise InvalidRequest(EXCLUDE.name, False, "a stream does not repeat the prompt")
    return excludes


def _outputs(inputs: Inputs, parameters: Parameters) -> tuple[str, ...]:
    flagged = (name for flag, name in FLAGS.items() if inputs.flags.get(flag))
    return ("text_output", *flagged, *(() if parameters.prompt_logprobs is None else ("prompt_logprobs",)))


def renamed(failure: RequestFailed) -> RequestFailed:
    """Returns the failure with its field under this protocol's name."""
    base, bracket, rest = failure.field.partition("[")
    name = NAMES.get(base, base.removeprefix("sampling.").removeprefix("stopping.").removeprefix("output."))
    if base.startswith(f"{TAGS}."):
        name = NAMES[TAGS] + base.removeprefix(TAGS)
    if failure.code != "INVALID_ARGUMENT" or name == base:
        return failure
    name += bracket + rest
    message = failure.message.removeprefix(failure.field)
    shown = failure.message if message == failure.message else name + message
    return RequestFailed(failure.code, failure.reason, shown, name, failure.retry_after)
