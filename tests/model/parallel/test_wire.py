"""Messages of ranks come back as they were; other bytes are refused with an error, and nothing worse."""

import json
import socket
import struct
import threading
from dataclasses import replace
from typing import cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from model.attention.backend import AttentionBackend, StepShape
from model.forward import ForwardBatch, ImageFeatures
from model.loading import words_of
from model.logit_parts import LogitParts
from model.parallel.collective import Collective
from model.parallel.steps import StepInputs, pack_step, receive_inputs, send_inputs, unpack_moves, unpack_step
from model.parallel.wire import (
    DTYPES,
    FRAME,
    MOST_WORDS,
    FrameKind,
    WireError,
    pack_arrays,
    pack_words,
    receive,
    send,
    unpack_arrays,
    unpack_words,
)
from tests.model.parallel.test_collectives import group, together

CPU = torch.device("cpu")

arrays = st.lists(
    st.sampled_from(DTYPES).flatmap(
        lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=5))
    ),
    max_size=5,
)


@given(arrays)
def test_arrays_come_back(sent: list[NDArray]) -> None:
    got = unpack_arrays(bytearray(pack_arrays(*sent)))
    assert [(a.dtype, a.shape, a.tobytes()) for a in got] == [(a.dtype, a.shape, a.tobytes()) for a in sent]


@given(arrays, st.data())
def test_other_bytes_are_told_so(sent: list[NDArray], data: st.DataObject) -> None:
    content = bytearray(pack_arrays(*sent))
    kind = data.draw(st.sampled_from(["cut", "longer", "changed"]))
    if kind == "cut":
        content = content[: data.draw(st.integers(0, len(content) - 1))]
    elif kind == "longer":
        content += data.draw(st.binary(min_size=1, max_size=20))
    else:
        content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        unpack_arrays(content)
    except WireError:
        return
    assert kind == "changed"  # which numbers there are cannot be known


@given(st.binary(max_size=200))
def test_any_bytes_are_a_step_or_none(content: bytes) -> None:
    for read in (unpack_step, unpack_moves):
        with pytest.raises(WireError):
            read(bytearray(content), *((torch.float32, CPU) if read is unpack_step else (2,)))


def test_frames_come_back_and_the_end_is_seen() -> None:
    one, other = socket.socketpair()
    content = bytes(range(256)) * 4096
    thread = threading.Thread(
        target=lambda: (send(one, FrameKind.STEP, content), send(one, FrameKind.COPY), one.close())
    )
    thread.start()
    assert receive(other) == (FrameKind.STEP, bytearray(content))
    assert receive(other) == (FrameKind.COPY, bytearray())
    assert receive(other) is None
    thread.join()
    other.close()


@pytest.mark.parametrize(
    ("sent", "says"),
    [
        (FRAME.pack(1001, FrameKind.SAID), "has 1001 bytes, at most 1000"),
        (FRAME.pack(0, 99), "of kind 99"),
        (FRAME.pack(5, FrameKind.SAID) + b"abc", "cut off after 3 of 5"),
        (FRAME.pack(5, FrameKind.SAID), "was cut off"),
        (b"\0\0", "cut off after 2 of 5"),
    ],
)
def test_frames_that_are_none(sent: bytes, says: str) -> None:
    one, other = socket.socketpair()
    one.sendall(sent)
    one.close()
    with pytest.raises(WireError, match=says):
        receive(other, 1000)
    other.close()


def test_words_are_json() -> None:
    assert unpack_words(json.dumps({"a": [1, "b"]}).encode()) == {"a": [1, "b"]}
    for wrong in (b"{", b"\xff", b""):
        with pytest.raises(WireError, match="no JSON"):
            unpack_words(wrong)


def a_step(images: ImageFeatures | None = None) -> tuple[ForwardBatch, StepShape]:
    """Rows 5 and 2 of 7: 3 tokens from the 4th on, and the 9th, in pages of 4."""
    slices = np.array([[5, 3, 3], [2, 8, 1]], np.int32)
    tables = np.arange(2 * 7 * 8, dtype=np.int32).reshape(2, 7, 8)
    positions = np.array([3, 4, 5, 8])
    slots = np.stack([tables[g, [5, 5, 5, 2], positions // 4] * 4 + positions % 4 for g in range(2)]).astype(np.int64)
    shape = StepShape(slices, positions, slots, tables, np.zeros(2, np.int64))
    places = torch.from_numpy(np.stack([positions, positions + 100]))  # a second axis, as vision-language models have
    batch = ForwardBatch(
        torch.tensor([7, 8, 9, 10]), places, torch.tensor([2, 3]), cast(AttentionBackend, None), None, images,
        parts=LogitParts(torch.tensor([0, 1]), lambda _: None),
    )  # fmt: skip
    return batch, shape


def test_a_step_comes_back_with_the_pages_that_it_needs() -> None:
    images = ImageFeatures(torch.tensor([0, 2]), torch.randn(3, 2, 6).to(torch.bfloat16))
    batch, shape = a_step(images)
    step = unpack_step(bytearray(pack_step(batch, shape, 4)), torch.bfloat16, CPU)
    assert step.inputs is not None
    assert step.inputs.tokens.tolist() == batch.tokens.tolist()
    assert step.inputs.wanted.tolist() == batch.wanted.tolist()
    assert step.inputs.positions.tolist() == batch.positions.tolist()
    assert step.sizes == (2, 2)
    assert step.parts.tolist() == [0, 1]
    assert step.shape.slices.tolist() == [[0, 3, 3], [1, 8, 1]]
    assert step.shape.tables.tolist() == shape.tables[:, [5, 2], :3].tolist()
    assert step.shape.slots.tolist() == shape.slots.tolist()
    assert step.shape.positions.tolist() == shape.positions.tolist()
    assert step.images is not None
    assert torch.equal(step.images.places, images.places)
    assert torch.equal(step.images.features, images.features)


def test_inputs_go_from_device_to_device_where_steps_are_launched_ahead() -> None:
    images = ImageFeatures(torch.tensor([0, 2]), torch.randn(3, 2, 6))
    batch, shape = a_step(images)
    step = unpack_step(bytearray(pack_step(batch, shape, 4, inputs=False)), torch.float32, CPU)
    assert step.inputs is None
    assert step.images is not None
    assert step.shape.positions.tolist() == shape.positions.tolist()
    # Three tokens do not fill up 16 bytes.
    batch = replace(batch, tokens=batch.tokens[:3], positions=batch.positions[:, :3])
    step = replace(step, shape=replace(step.shape, positions=shape.positions[:3]))

    def exchange(rank: int, one: Collective) -> StepInputs | None:
        return receive_inputs(one, step, CPU) if rank else send_inputs(one, batch)

    with group("gloo", 3) as members:
        _, *found = together(members, exchange)
    for inputs in found:
        assert inputs is not None
        assert torch.equal(inputs.tokens, batch.tokens)
        assert torch.equal(inputs.positions, batch.positions)
        assert torch.equal(inputs.wanted, batch.wanted)
        assert inputs.positions.data_ptr() % 16 == 0, "Triton compiles another kernel for it"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_features_of_images_take_as_many_bytes_as_in_the_model(dtype: torch.dtype) -> None:
    images = ImageFeatures(torch.tensor([0, 2]), torch.randn(2, 3000, 3).to(dtype).mT[:, :2])
    sent = bytearray(pack_step(*a_step(images), 4))
    step = unpack_step(sent, dtype, CPU)
    assert step.images is not None
    assert torch.equal(step.images.features, images.features)
    assert len(sent) < images.features.nbytes + 1000
    with pytest.raises(WireError, match="arrays of"):
        unpack_step(sent, torch.bfloat16 if dtype is torch.float32 else torch.float32, CPU)


@pytest.mark.parametrize(
    ("number", "wrong", "name"),
    [
        (0, np.array([0, 2]), "sizes"),
        (0, np.array([2, -1]), "sizes"),
        (1, np.zeros((2, 2), np.int32), "slices"),
        (2, np.zeros(3, np.int64), "positions"),
        (3, np.zeros((2, 3), np.int64), "positions"),
        (4, np.zeros((1, 2, 3), np.int32), "tables"),
        (5, np.zeros(3, np.int64), "bidirectional"),
        (5, np.zeros(2, np.int32), "arrays of"),
        (6, np.array([4]), "parts"),
        (7, np.zeros(3, np.int64), "tokens"),
        (8, np.zeros((1, 4), np.int64), "positions"),
        (9, np.array([4, 0]), "wanted"),
        (9, np.array([0]), "wanted"),
    ],
)
def test_a_step_that_does_not_fit_together(number: int, wrong: NDArray, name: str) -> None:
    parts = unpack_arrays(bytearray(pack_step(*a_step(), 4)))
    parts[number] = wrong
    with pytest.raises(WireError, match=name):
        unpack_step(bytearray(pack_arrays(*parts)), torch.float32, CPU)


def test_an_array_of_more_than_there_is_is_not_made() -> None:
    head = struct.pack("<BBBIII", 1, 0, 3, 2**32 - 1, 2**32 - 1, 2**32 - 1)
    with pytest.raises(WireError, match="does not fit"):
        unpack_arrays(bytearray(head.ljust(16, b"\0")))


def test_what_ranks_say_fits_a_frame_whatever_they_compute_with() -> None:
    """The layout of a model with many recurrent layers, as Nemotron-H 56B, takes 600 KB of text."""
    numerics = bytes(32) + b"bfloat16 none bfloat16 cuda " + b"StateUnit(...)" * 50_000
    words = words_of(numerics, 10**7, 10**7)
    assert len(pack_words([words] * 64)) <= MOST_WORDS
    assert words == words_of(numerics, 10**7, 10**7)
    assert words != words_of(numerics + b"x", 10**7, 10**7), "a difference behind what is said is one"
    assert "bfloat16 none" in words["named"]
