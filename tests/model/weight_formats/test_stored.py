"""Cuts of stored weights: what belongs to a linear's outputs and inputs, in each tensor that it is stored in."""

import pytest
import torch

from model.errors import CheckpointError
from model.tensors import in_halves, runs_of
from model.weight_formats.plain import plain_weight
from model.weight_formats.stored import Axis, StoredTensor, StoredWeight

pytestmark = pytest.mark.sample(3)


def numbered(*shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel()).view(shape)


def weight_of(out: int, width: int, *described: StoredTensor) -> StoredWeight:
    return StoredWeight("model.up", out, width, described, {one.key: numbered(*one.shape) for one in described})


def test_plain_cuts_are_views() -> None:
    whole = numbered(6, 8).float()
    part = plain_weight(whole).rows(slice(2, 5)).columns(slice(4, 8))
    assert (part.outputs, part.inputs) == (3, 4)
    assert torch.equal(part["weight"], whole[2:5, 4:8])
    assert part["weight"].untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


def test_outputs_and_inputs_stand_where_the_format_says() -> None:
    """As in GPTQ: packed inputs by outputs, zeros packed the other way, an order of inputs, and one for all."""
    weight = weight_of(
        32, 64,
        StoredTensor("qweight", (8, 32), torch.int32, rows=Axis(1), columns=Axis(0, 8)),
        StoredTensor("qzeros", (4, 4), torch.int32, rows=Axis(1, 8), columns=Axis(0, 16)),
        StoredTensor("g_idx", (64,), torch.int32, columns=Axis(0)),
        StoredTensor("scale", (1,)),
    )  # fmt: skip
    part = weight.rows(slice(8, 24)).columns(slice(32, 64))
    assert torch.equal(part["qweight"], numbered(8, 32)[4:, 8:24])
    assert torch.equal(part["qzeros"], numbered(4, 4)[2:, 1:3])
    assert torch.equal(part["g_idx"], torch.arange(32, 64))
    assert torch.equal(part["scale"], weight["scale"])


def test_a_block_may_be_several_elements() -> None:
    """As in GGUF: 32 inputs are 18 bytes."""
    weight = weight_of(4, 96, StoredTensor("blocks", (4, 54), torch.uint8, rows=Axis(0), columns=Axis(1, 32, 18)))
    assert torch.equal(weight.columns(slice(32, 96))["blocks"], numbered(4, 54)[:, 18:])


def test_the_last_block_may_be_shorter() -> None:
    """As in FP8 by blocks."""
    scales = StoredTensor("weight_scale_inv", (3, 2), torch.float32, rows=Axis(0, 128), columns=Axis(1, 128))
    weight = weight_of(300, 200, scales)
    part = weight.rows(slice(128, 300)).columns(slice(128, 200))
    assert torch.equal(part["weight_scale_inv"], numbered(3, 2)[1:, 1:])
    assert (part.outputs, part.inputs) == (172, 72)


@pytest.mark.parametrize(("start", "stop"), [(0, 64), (64, 256), (1, 128), (128, 299)])
def test_a_cut_through_a_block_is_refused_with_the_tensors_name(start: int, stop: int) -> None:
    scales = StoredTensor("weight_scale_inv", (3, 3), rows=Axis(0, 128), columns=Axis(1, 128))
    weight, run = weight_of(300, 300, scales), slice(start, stop)
    for what, cut in (("outputs", weight.rows), ("inputs", weight.columns)):
        message = f"model.up.weight_scale_inv keeps blocks of 128 {what} .* {start} to {stop} of 300"
        with pytest.raises(ValueError, match=message):
            cut(run)


def test_runs_that_follow_each_other_are_one() -> None:
    """Fused products that are not divided, queries, keys and values or gates, are not cut at all."""
    assert runs_of([12], [slice(0, 8), slice(8, 10), slice(10, 12)]) == [(0, slice(0, 12))]
    assert runs_of([8, 2, 2], [slice(4, 8), slice(8, 9), slice(10, 11)]) == [
        (0, slice(4, 8)), (1, slice(0, 1)), (2, slice(0, 1)),
    ]  # fmt: skip
    assert runs_of([6], [slice(4, 6), slice(0, 2), slice(2, 4)]) == [(0, slice(4, 6)), (0, slice(0, 4))]


def test_pairs_of_neighbours_become_halves() -> None:
    """Two heads of 6 elements, 4 of which are rotated."""
    runs = in_halves(slice(12, 24), 6, 4)
    assert [row for run in runs for row in range(30)[run]] == [12, 14, 13, 15, 16, 17, 18, 20, 19, 21, 22, 23]
    weight = plain_weight(numbered(24, 3))
    cuts = [weight.rows(run) for _, run in runs_of([24], runs)]
    assert [cut.outputs for cut in cuts] == [2, 2, 2, 2, 2, 2]
    assert torch.cat([cut["weight"] for cut in cuts])[:, 0].tolist() == [
        3 * row for row in (12, 14, 13, 15, 16, 17, 18, 20, 19, 21, 22, 23)
    ]


def test_runs_with_a_step_stay_apart() -> None:
    assert runs_of([4, 4], [slice(0, 4, 2), slice(4, 8, 2)]) == [(0, slice(0, 4, 2)), (1, slice(0, 4, 2))]
    assert runs_of([8], [slice(0, 4, 2), slice(4, 8)]) == [(0, slice(0, 4, 2)), (0, slice(4, 8))]


def test_blocks_of_outputs_are_not_taken_apart() -> None:
    zeros = StoredTensor("qzeros", (2, 4), torch.int32, rows=Axis(1, 8), columns=Axis(0, 32))
    with pytest.raises(CheckpointError, match=r"model.up.qzeros keeps blocks of 8 outputs together.*not served"):
        weight_of(32, 64, zeros).rows(slice(0, 16, 2))
