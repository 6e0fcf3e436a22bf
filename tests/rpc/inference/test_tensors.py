"""The codec of tensors gives back what went in, and takes nothing that is not as it says."""

import math
import struct
from contextlib import suppress

import numpy as np
import pytest
import tritonclient.utils
from hypothesis import given, settings
from hypothesis import strategies as st

from rpc.frontend.errors import RequestFailed
from rpc.services.inference import pb, tensors
from rpc.services.inference.asking import read_request
from rpc.services.inference.tensors import MOST_ELEMENTS, add_outputs, join, read_inputs, read_output_names, split
from scheduler.invalid import InvalidRequest
from tests.rpc.inference.messages import request, strange

ELEMENTS = st.lists(st.binary(max_size=20), max_size=6)


@settings(max_examples=100)  # with fewer a planted fault may not show
@given(ELEMENTS)
def test_elements_come_back_and_are_triton_s(elements: list[bytes]) -> None:
    raw = join("BYTES", elements)
    assert split("image", raw, len(elements)) == elements
    theirs = tritonclient.utils.serialize_byte_tensor(np.array(elements, dtype=object))
    assert raw == (theirs.item() if theirs.size else b"")


@given(st.lists(st.floats(width=32)), st.lists(st.integers(0, 2**32 - 1)))
def test_numbers_are_numpy_s(floats: list[float], counts: list[int]) -> None:
    assert join("FP32", floats) == np.array(floats, np.float32).tobytes()
    assert join("UINT32", counts) == np.array(counts, np.uint32).tobytes()


@settings(max_examples=100)  # with fewer a planted fault may not show
@given(st.binary(max_size=40), st.integers(0, 5))
def test_raw_bytes_are_read_to_the_last_or_refused(raw: bytes, count: int) -> None:
    with suppress(InvalidRequest):
        elements = split("image", raw, count)
        assert len(elements) == count
        assert join("BYTES", elements) == raw


@pytest.mark.parametrize("fault", ["big end first", "nothing is checked", "rest is ignored"])
def test_these_would_catch_a_wrong_codec(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(_name: str, raw: bytes, count: int) -> list[bytes]:
        elements, at = list[bytes](), 0
        for _ in range(count):
            size = int.from_bytes(raw[at : at + 4], "big" if fault == "big end first" else "little")
            if fault != "nothing is checked" and at + 4 + size > len(raw):
                raise InvalidRequest("image", b"", "")
            elements.append(raw[at + 4 : at + 4 + size])
            at += 4 + size
        if fault == "big end first" and at != len(raw):
            raise InvalidRequest("image", b"", "")
        return elements

    monkeypatch.setitem(globals(), "split", wrong)
    law = test_elements_come_back_and_are_triton_s
    if fault != "big end first":
        law = test_raw_bytes_are_read_to_the_last_or_refused
    with pytest.raises((AssertionError, InvalidRequest, ExceptionGroup)):
        law()


@pytest.mark.parametrize("raw", [True, False])
def test_raw_and_typed_contents_are_read_alike(raw: bool) -> None:
    found = read_inputs(request(raw, text_input=[b"cat"], stream=True, image=[b"a", b"", b"c"], return_logprobs=False))
    assert found.elements == {"text_input": [b"cat"], "image": [b"a", b"", b"c"]}
    assert found.flags == {"stream": True, "return_logprobs": False}


def changed(change: str) -> pb.ModelInferRequest:
    """A good request with one thing wrong; the statement works on `m` and its tensor `t`, which is text_input."""
    message = request("typed" not in change, text_input=[b"cat"], stream=True)
    exec(change, {"m": message, "t": message.inputs[0], "pb": pb})  # noqa: S102 - our own words
    return message


@pytest.mark.parametrize(
    ("named", "change"),
    [
        ("text_input", "t.datatype = 'BOOL'"),
        ("text_input", "t.shape[:] = [2**31]"),
        ("text_input", "t.shape[:] = [0]"),
        ("text_input", "t.shape[:] = [-1]"),
        ("text_input", "t.shape[:] = []"),
        ("text_input", "t.shape[:] = [2, 1]"),
        ("text_input", "t.shape[:] = [1, 1, 1]"),
        ("text_input", "t.shape[:] = [1] * 100_000"),
        ("text_input", "m.raw_input_contents[0] += b'x'"),
        ("text_input", "m.raw_input_contents[0] = b'\\xff\\xff\\xff\\xffcat'"),
        ("text_input", "m.raw_input_contents[0] = b'\\xff'"),
        ("text_input", "m.inputs.append(t); m.raw_input_contents.append(m.raw_input_contents[0])"),
        ("text_input", "t.parameters['shared_memory_region'].string_param = 'r'"),
        ("text_input", "t.contents.bytes_contents.append(b'dog')  # typed"),
        ("text_input", "t.contents.ClearField('bytes_contents')  # typed"),
        ("text_input", "t.contents.int_contents.append(1)  # typed"),
        ("stream", "m.raw_input_contents[1] = b'\\2'"),
        ("stream", "m.raw_input_contents[1] = b''"),
        ("stream", "m.inputs[1].contents.ClearField('bool_contents')  # typed"),
        ("image", "t.name, t.shape[:] = 'image', [4097]"),
        ("raw_input_contents", "m.raw_input_contents.append(b'')"),
        ("inputs[0].name", "t.name = 'prompt'"),
        ("text_output", "m.outputs.add(name='text_output'); m.outputs.add(name='text_output')"),
        ("text_output", "m.outputs.add(name='text_output').parameters['classification'].int64_param = 3"),
        ("outputs[0].name", "m.outputs.add(name='text_input')"),
    ],
)
def test_a_tensor_that_is_not_as_it_says_is_refused_by_name(named: str, change: str) -> None:
    message = changed(change)
    read = read_output_names if "output" in change else read_inputs
    with pytest.raises(InvalidRequest) as refused:
        read(message)
    assert refused.value.field == named
    assert len(str(refused.value)) < 500


def test_contents_beside_raw_ones_are_not_read() -> None:
    message = request(text_input=[b"cat"])
    message.inputs[0].contents.bytes_contents.append(b"dog")
    with pytest.raises(InvalidRequest, match=r"text_input is .*: is in raw_input_contents too"):
        read_inputs(message)


def test_a_batch_of_one_is_a_row() -> None:
    message = request(text_input=[b"cat"], image=[b"a", b"b"])
    message.inputs[0].shape[:], message.inputs[1].shape[:] = [1, 1], [1, 2]
    assert read_inputs(message).elements == {"text_input": [b"cat"], "image": [b"a", b"b"]}
    assert MOST_ELEMENTS * 4 < 2**16, "elements of nothing must not fill a message"


@given(strange())
def test_no_message_raises_anything_else(message: pb.ModelInferRequest) -> None:
    failure = None
    try:
        read_request(message, 128)
    except RequestFailed as raised:
        failure = raised
    assert failure is None or (failure.code in ("INVALID_ARGUMENT", "NOT_FOUND") and failure.field)


@pytest.mark.parametrize("raw", [True, False])
def test_outputs_are_rows_of_their_datatype(raw: bool) -> None:
    message = pb.ModelInferResponse()
    outputs = {"text_output": [b"a", b""], "cumulative_logprob": [-1.5, math.nan], "num_output_tokens": [2**32 - 1, 0]}
    add_outputs(message, outputs, raw)
    assert [(t.name, t.datatype, list(t.shape)) for t in message.outputs] == [
        ("text_output", "BYTES", [2]), ("cumulative_logprob", "FP32", [2]), ("num_output_tokens", "UINT32", [2])
    ]  # fmt: skip
    if raw:
        floats = struct.unpack("<2f", message.raw_output_contents[1])
        assert split("text_output", message.raw_output_contents[0], 2) == [b"a", b""]
        assert np.frombuffer(message.raw_output_contents[2], np.uint32).tolist() == [2**32 - 1, 0]
    else:
        floats = tuple(message.outputs[1].contents.fp32_contents)
        assert list(message.outputs[0].contents.bytes_contents) == [b"a", b""]
        assert list(message.outputs[2].contents.uint_contents) == [2**32 - 1, 0]
    assert floats[0] == -1.5
    assert math.isnan(floats[1])
    assert set(tensors.CONTENTS) == {"BYTES", "BOOL", "FP32", "UINT32"}
