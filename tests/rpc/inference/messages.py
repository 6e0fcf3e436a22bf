"""Requests of the Open Inference Protocol, well made and otherwise."""

from collections.abc import Sequence

from hypothesis import strategies as st

from rpc.services.inference import pb
from rpc.services.inference.tensors import INPUTS, OUTPUTS, join

Elements = Sequence[bytes] | bool


def request(raw: bool = True, **inputs: Elements) -> pb.ModelInferRequest:
    """With these tensors: a truth value is one of BOOL. raw: their elements are beside them."""
    message = pb.ModelInferRequest(id="mine")
    for name, values in inputs.items():
        if isinstance(values, bool):
            tensor = message.inputs.add(name=name, datatype="BOOL", shape=[1])
            if raw:
                message.raw_input_contents.append(bytes([values]))
            else:
                tensor.contents.bool_contents.append(values)
        else:
            tensor = message.inputs.add(name=name, datatype="BYTES", shape=[len(values)])
            if raw:
                message.raw_input_contents.append(join("BYTES", values))
            else:
                tensor.contents.bytes_contents.extend(values)
    return message


SIZES = st.one_of(st.integers(-1, 3), st.sampled_from([2**31 - 1, 2**31, 2**63 - 1, -(2**63)]))
NAMES = st.one_of(st.sampled_from([tensor.name for tensor in (*INPUTS, *OUTPUTS)]), st.text(max_size=5))
LENGTHS = st.sampled_from([b"\0\0\0\0", b"\1\0\0\0", b"\xff\xff\xff\xff", b"\5\0\0\0hello", b"\2\0\0\0{}"])
RAW = st.one_of(st.binary(max_size=12), LENGTHS, st.sampled_from([b"\0", b"\1", b"\2"]))
PARAMETERS = st.one_of(
    st.builds(lambda v: pb.InferParameter(bool_param=v), st.booleans()),
    st.builds(lambda v: pb.InferParameter(int64_param=v), st.integers(-(2**63), 2**63 - 1)),
    st.builds(lambda v: pb.InferParameter(string_param=v), st.text(max_size=6)),
    st.builds(lambda v: pb.InferParameter(double_param=v), st.floats()),
    st.just(pb.InferParameter()),
)
CONTENTS = st.one_of(
    st.builds(lambda v: pb.InferTensorContents(bytes_contents=v), st.lists(st.binary(max_size=6), max_size=2)),
    st.builds(lambda v: pb.InferTensorContents(bool_contents=v), st.lists(st.booleans(), max_size=2)),
    st.builds(lambda v: pb.InferTensorContents(int_contents=v), st.lists(st.integers(0, 2), max_size=2)),
)


@st.composite
def strange(draw: st.DrawFn) -> pb.ModelInferRequest:
    """A message whose parts need not belong together; it can be read all the same."""
    message = pb.ModelInferRequest(model_version=draw(st.sampled_from(["", "", "1", "7"])))
    datatypes = st.sampled_from(["BYTES", "BOOL", "FP32", "", "B" * 300])
    for _ in range(draw(st.integers(0, 4))):
        tensor = message.inputs.add(name=draw(NAMES), datatype=draw(datatypes), shape=draw(st.lists(SIZES, max_size=3)))
        if draw(st.booleans()):
            tensor.contents.CopyFrom(draw(CONTENTS))
    if draw(st.booleans()):
        message.raw_input_contents.extend(draw(st.lists(RAW, max_size=4)))
    for name in draw(st.lists(NAMES, max_size=2)):
        message.outputs.add(name=name)
    for name in draw(st.lists(st.sampled_from(["n", "stop", "logit_bias", "timeout", "x"]), max_size=3)):
        message.parameters[name].CopyFrom(draw(PARAMETERS))
    return message
