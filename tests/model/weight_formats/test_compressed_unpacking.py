"""A law: any part of a compressed linear stands for that part of the weights. Planted faults break it."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from model.fields import Fields
from model.weight_formats import compressed_tensors_scheme as scheme_file
from model.weight_formats.compressed_tensors import CompressedTensors
from model.weight_formats.groups import GroupFormat, bring_back
from model.weight_formats.levels import unpack_bits
from model.weight_formats.scales import ScaleLayout
from model.weight_formats.stored import StoredWeight
from tests.model.weight_formats.compressed import Recipe, config_of, stored
from tests.model.weight_formats.recipes import FP8_BLOCK, INT8, RECIPES, W4, W4_ORDER, W4_ZEROS
from tests.support.planted import plant

pytestmark = pytest.mark.sample(3)


def in_memory(weight: Tensor, recipe: Recipe) -> tuple[GroupFormat, StoredWeight, Tensor]:
    """The format, a linear as it would be read, and what it stands for."""
    options = Fields(Path("config.json"), config_of([recipe], ["lm_head"]))
    form = CompressedTensors(options).for_linear("a.linear")
    assert isinstance(form, GroupFormat)
    made, (out, width) = stored(weight, recipe), weight.shape
    described = form.tensors(out, width)
    # A scale may be of any float dtype.
    assert {one.key: (one.shape, one.dtype or torch.float32) for one in described} == {
        key: (tuple(tensor.shape), tensor.dtype) for key, tensor in made.tensors.items()
    }
    return form, StoredWeight("a.linear", out, width, described, made.tensors), made.meant


def drawn_weight(out: int, width: int, seed: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(out, width)).astype(np.float32))


def runs(size: int, block: int) -> st.SearchStrategy[slice]:
    """Outputs or inputs between blocks; the last block may be smaller."""
    blocks = st.integers(0, -(-size // block))
    pairs = st.tuples(blocks, blocks).filter(lambda pair: pair[0] < pair[1])
    return pairs.map(lambda pair: slice(pair[0] * block, min(pair[1] * block, size)))


@given(st.sampled_from(RECIPES), st.integers(1, 70), st.integers(1, 70), st.integers(0, 2**32 - 1), st.data())
def test_any_part_stands_for_that_part_of_the_weights(
    recipe: Recipe, out: int, width: int, seed: int, data: st.DataObject
) -> None:
    form, linear, meant = in_memory(drawn_weight(out, width, seed), recipe)
    rows = data.draw(runs(out, form.blocks.rows))
    columns = data.draw(runs(width, form.blocks.columns))
    assert torch.equal(bring_back(form.groups(linear.rows(rows).columns(columns))), meant[rows, columns])


Function = Callable[..., Tensor | None]


def swapped(_: Function) -> Function:
    def unpack_words(words: Tensor, bits: int) -> Tensor:
        octets = words.clone(memory_format=torch.contiguous_format).view(torch.uint8)
        return unpack_bits(octets >> 4 | octets << 4, bits, words.shape[1] * 8)

    return unpack_words


def neighbours(right: Function) -> Function:
    return lambda layout, scales, outputs: right(layout, scales, outputs).roll(1, 1)  # type: ignore[union-attr]


def turned(right: Function) -> Function:
    return lambda layout, scales, outputs: right(layout, scales.T, outputs)


def unturned(_: Function) -> Function:
    return lambda _, weight: weight["weight"].view(torch.uint8)


def one_more(right: Function) -> Function:
    return lambda *given: right(*given) + 1  # type: ignore[operator]


FAULTS: dict[str, tuple[Recipe, object, str, Callable[[Function], Function]]] = {
    "zero point off by one": (W4_ZEROS, scheme_file.SchemeFormat, "_zeros", one_more),
    "nibbles in the other order": (W4, scheme_file, "unpack_words", swapped),
    "scale of the neighbour": (W4, ScaleLayout, "of_outputs", neighbours),
    "order of activations ignored": (W4_ORDER, scheme_file, "_group_of_inputs", lambda _: lambda *_: None),
    "scales of blocks transposed": (FP8_BLOCK, ScaleLayout, "of_outputs", turned),
    "two's complement taken for an offset": (INT8, scheme_file.SchemeFormat, "_values", unturned),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_caught(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, owner, name, stand_in = FAULTS[fault]
    form, linear, meant = in_memory(drawn_weight(64, 64, 1), recipe)
    assert torch.equal(bring_back(form.groups(linear)), meant)
    plant(monkeypatch, owner, name, stand_in)
    assert not torch.equal(bring_back(form.groups(linear)), meant)
