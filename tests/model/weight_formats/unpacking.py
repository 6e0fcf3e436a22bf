"""The law of formats of groups: what is unpacked is what the plain statement of the writer says."""

from pathlib import Path

import numpy as np
import torch
from hypothesis import strategies as st

from bench.quantized.words import Quantized, Scheme, indices
from model.fields import Fields
from model.weight_formats.groups import GroupFormat, bring_back
from model.weight_formats.registry import STORED
from model.weight_formats.stored import StoredWeight


def draw(scheme: Scheme, out: int, width: int, seed: int) -> Quantized:
    """Draws integers, zero points and scales from all that can be stored."""
    rng = np.random.default_rng(seed)
    index = indices(width, scheme.group, scheme.ordered, rng)
    groups, most = int(index.max()) + 1, 2**scheme.bits
    zeros = np.full((groups, out), most // 2) if scheme.symmetric else rng.integers(0, most, (groups, out))
    scales = torch.from_numpy(rng.uniform(1e-3, 0.1, (groups, out)).astype(np.float32)).to(scheme.scales)
    return Quantized(scheme.bits, rng.integers(0, most, (out, width)), zeros, scales, index)


def stored(scheme: Scheme, linear: Quantized, **options: object) -> tuple[GroupFormat, StoredWeight]:
    """Packs a linear. Returns it with the product's format."""
    said = scheme.options() | options
    made = STORED[said["quant_method"]](Fields(Path("config.json"), said))
    assert isinstance(made, GroupFormat)
    out, width = linear.values.shape
    tensors = scheme.pack(linear)
    described = [one for one in made.tensors(out, width) if not one.optional or one.key in tensors]
    assert {one.key: one.shape for one in described} == {key: tuple(one.shape) for key, one in tensors.items()}
    return made, StoredWeight("model.layers.0.mlp.up_proj", out, width, described, tensors)


def runs(size: int, block: int) -> st.SearchStrategy[slice]:
    """Parts of outputs or inputs that keep blocks together; the last block may be shorter."""
    edges = sorted({*range(0, size, block), size})
    return st.lists(st.sampled_from(edges), min_size=2, max_size=2, unique=True).map(lambda two: slice(*sorted(two)))


def check(scheme: Scheme, linear: Quantized, rows: slice, columns: slice) -> None:
    """Unpacks some outputs and inputs of a packed linear, and compares with numpy's, bit for bit."""
    made, weight = stored(scheme, linear)
    if rows != slice(0, weight.outputs):
        weight = weight.rows(rows)
    if columns != slice(0, weight.inputs):
        weight = weight.columns(columns)
    np.testing.assert_array_equal(bring_back(made.groups(weight)).numpy(), linear.plain()[rows, columns].numpy())
