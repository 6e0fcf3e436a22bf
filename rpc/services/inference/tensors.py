"""Tensors of the protocol, to values and back, with all checks that untrusted bytes need.

The model has the tensors that Triton's vLLM back end gives a text model, see
https://github.com/triton-inference-server/vllm_backend.
"""

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rpc.services.inference import pb
from scheduler.invalid import InvalidRequest

MOST_ELEMENTS = 2**12  # elements of a tensor
SHOWN = 64  # characters of a client's name that an error quotes
CONTENTS = {
    "BYTES": "bytes_contents",
    "BOOL": "bool_contents",
    "FP32": "fp32_contents",
    "UINT32": "uint_contents",
}
"""Field of `InferTensorContents` that has a datatype's elements."""
NUMBERS = {"FP32": "f", "UINT32": "I"}
"""Format of a datatype's elements in `struct`."""
ELSEWHERE = ("shared_memory_region", "classification")
"""Parameters of a tensor that change the place or the meaning of its elements."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """An input or output of the model.

    Attributes:
        name: Name of the tensor.
        datatype: Datatype of its elements, by the protocol's name.
        size: Count of its elements; -1 for any count.
    """

    name: str
    datatype: str
    size: int = 1


TEXT, IMAGE, STREAM = Tensor("text_input", "BYTES"), Tensor("image", "BYTES", -1), Tensor("stream", "BOOL")
PARAMETERS, EXCLUDE = Tensor("sampling_parameters", "BYTES"), Tensor("exclude_input_in_output", "BOOL")
FLAGS = {
    f"return_{name}": name
    for name in ("finish_reason", "cumulative_logprob", "logprobs", "num_input_tokens", "num_output_tokens")
}
"""Inputs that ask for an output: name of the output by name of the input."""
INPUTS = (TEXT, IMAGE, STREAM, PARAMETERS, EXCLUDE, *(Tensor(flag, "BOOL") for flag in FLAGS))
OUTPUTS = (
    Tensor("text_output", "BYTES", -1),
    Tensor("finish_reason", "BYTES", -1),
    Tensor("cumulative_logprob", "FP32", -1),
    Tensor("logprobs", "BYTES", -1),
    Tensor("prompt_logprobs", "BYTES"),
    Tensor("num_input_tokens", "UINT32"),
    Tensor("num_output_tokens", "UINT32", -1),
)
_INPUTS, _OUTPUTS = ({tensor.name: tensor for tensor in tensors} for tensors in (INPUTS, OUTPUTS))

Elements = Sequence[Any]
"""Elements of one datatype: bytes, float or int."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """Inputs that a request has.

    Attributes:
        elements: Elements of its BYTES tensors, by name.
        flags: Values of its BOOL tensors, by name.
    """

    elements: dict[str, list[bytes]] = field(default_factory=dict)
    flags: dict[str, bool] = field(default_factory=dict)


def read_inputs(message: pb.ModelInferRequest) -> Inputs:
    """Reads the inputs of a request.

    Raises:
        InvalidRequest: A tensor is none of the model's, or its bytes are not as its datatype and shape say.
    """
    raw = message.raw_input_contents
    if raw and len(raw) != len(message.inputs):
        reason = f"there must be one for each of the {len(message.inputs)} inputs, or none"
        raise InvalidRequest("raw_input_contents", f"{len(raw)} of them", reason)
    found = Inputs()
    for i, given in enumerate(message.inputs):
        tensor = _INPUTS.get(given.name)
        if tensor is None:
            reason = f"is no input of the model, which are {', '.join(_INPUTS)}"
            raise InvalidRequest(f"inputs[{i}].name", given.name[:SHOWN], reason)
        if tensor.name in found.elements or tensor.name in found.flags:
            raise InvalidRequest(tensor.name, "a tensor", "is there more than once")
        _check_type(given, tensor)
        count = _element_count(given, tensor)
        if raw and given.HasField("contents"):
            raise InvalidRequest(tensor.name, "in contents", "is in raw_input_contents too")
        if tensor.datatype == "BOOL":
            found.flags[tensor.name] = _flag(given, raw[i] if raw else None)
        else:
            found.elements[tensor.name] = split(tensor.name, raw[i], count) if raw else _typed(given, tensor, count)
    return found


def read_output_names(message: pb.ModelInferRequest) -> tuple[str, ...]:
    """Returns the outputs that a request asks for by name, in its order.

    Raises:
        InvalidRequest: An output is none of the model's, or is asked for twice.
    """
    names = dict[str, None]()
    for i, wanted in enumerate(message.outputs):
        if wanted.name not in _OUTPUTS:
            reason = f"is no output of the model, which are {', '.join(_OUTPUTS)}"
            raise InvalidRequest(f"outputs[{i}].name", wanted.name[:SHOWN], reason)
        if wanted.name in names:
            raise InvalidRequest(wanted.name, "an output", "is asked for more than once")
        _refuse_elsewhere(wanted.parameters, wanted.name)
        names[wanted.name] = None
    return tuple(names)


def add_outputs(message: pb.ModelInferResponse, outputs: Mapping[str, Elements], raw: bool) -> None:
    """Adds outputs to a response, each a row of elements.

    Args:
        message: The response.
        outputs: Elements by output.
        raw: The elements go into raw_output_contents.
    """
    for name, values in outputs.items():
        datatype = _OUTPUTS[name].datatype
        tensor = message.outputs.add(name=name, datatype=datatype, shape=(len(values),))
        if raw:
            message.raw_output_contents.append(join(datatype, values))
        else:
            getattr(tensor.contents, CONTENTS[datatype]).extend(values)


def split(name: str, raw: bytes, count: int) -> list[bytes]:
    """Splits the raw contents of a BYTES tensor into its elements.

    Each element is its length, 4 bytes little-endian, and its bytes.

    Args:
        name: Name of the tensor, for errors.
        raw: The raw contents.
        count: Count of elements that there have to be.

    Raises:
        InvalidRequest: The contents do not have this count of elements.
    """
    elements, at = list[bytes](), 0
    for i in range(count):
        end = at + 4 + int.from_bytes(raw[at : at + 4], "little")
        if at + 4 > len(raw) or end > len(raw):
            raise InvalidRequest(name, f"{len(raw)} raw bytes", f"they end within element {i} of {count}")
        elements.append(raw[at + 4 : end])
        at = end
    if at != len(raw):
        raise InvalidRequest(name, f"{len(raw)} raw bytes", f"{len(raw) - at} are left over after {count} elements")
    return elements


def join(datatype: str, values: Elements) -> bytes:
    """Returns the raw contents of a tensor with these elements."""
    if datatype == "BYTES":
        return b"".join(len(value).to_bytes(4, "little") + value for value in values)
    return struct.pack(f"<{len(values)}{NUMBERS[datatype]}", *values)


def _check_type(given: pb.ModelInferRequest.InferInputTensor, tensor: Tensor) -> None:
    if given.datatype != tensor.datatype:
        raise InvalidRequest(tensor.name, f"of datatype {given.datatype[:SHOWN]}", f"must be {tensor.datatype}")
    _refuse_elsewhere(given.parameters, tensor.name)


def _refuse_elsewhere(parameters: Iterable[str], name: str) -> None:
    for parameter in ELSEWHERE:
        if parameter in parameters:
            raise InvalidRequest(name, f"a tensor with {parameter}", "is not supported: send it in the message")


def _element_count(given: pb.ModelInferRequest.InferInputTensor, tensor: Tensor) -> int:
    """Returns the count of elements by the tensor's shape, [n] or [1, n]. Raises InvalidRequest for another shape."""
    shape = tuple(given.shape[:3])
    most = MOST_ELEMENTS if tensor.size < 0 else tensor.size
    least = 0 if tensor.size < 0 else tensor.size
    if len(shape) not in (1, 2) or shape[:-1] not in ((), (1,)) or not least <= shape[-1] <= most:
        wanted = f"[{tensor.size}]" if tensor.size > 0 else f"[n] with n of at most {most}"
        raise InvalidRequest(tensor.name, f"of shape {list(given.shape[:8])}", f"must be {wanted}, or a batch of one")
    return shape[-1]


def _typed(given: pb.ModelInferRequest.InferInputTensor, tensor: Tensor, count: int) -> list[bytes]:
    _check_contents(given, tensor.datatype, count)
    return list(given.contents.bytes_contents)


def _flag(given: pb.ModelInferRequest.InferInputTensor, raw: bytes | None) -> bool:
    if raw is None:
        _check_contents(given, "BOOL", 1)
        return given.contents.bool_contents[0]
    if raw not in (b"\0", b"\1"):
        raise InvalidRequest(given.name, f"{len(raw)} raw bytes", "must be one byte, 0 or 1")
    return raw == b"\1"


def _check_contents(given: pb.ModelInferRequest.InferInputTensor, datatype: str, count: int) -> None:
    wanted = CONTENTS[datatype]
    others = [one.name for one, _ in given.contents.ListFields() if one.name != wanted]
    if others:
        raise InvalidRequest(given.name, f"in {others[0]}", f"elements of {datatype} belong in {wanted}")
    if (size := len(getattr(given.contents, wanted))) != count:
        raise InvalidRequest(given.name, f"{size} elements", f"its shape says {count}")
