"""MXFP4 experts compute, bit for bit, what the plain weights compute that they stand for: gpt-oss, and Mixtral."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from bench.quantized.numbers import as_tensor
from model.architectures.registry import build_model
from model.config import read_config
from model.errors import CheckpointError
from model.fields import Fields
from model.footprint import weight_bytes
from model.tensors import Tensors
from model.weight_formats import mxfp4 as mxfp4_file
from model.weight_formats.groups import bring_back
from model.weight_formats.levels import unpack_bits
from model.weight_formats.mxfp4 import Mxfp4
from model.weight_formats.plain import PLAIN
from model.weight_formats.registry import open_weight_format
from model.weight_formats.stored import StoredWeight
from model.weights import Checkpoint
from tests.model.families.cases import BY_NAME
from tests.model.families.conftest import Shelf
from tests.model.families.styles import edit_config, edit_tensors, fused_experts
from tests.model.test_weights import load_it
from tests.model.weight_formats.test_groups import bits

pytestmark = pytest.mark.sample(3)

CPU = torch.device("cpu")
FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=np.float32)
EXPERTS = re.compile(r".*\.experts\.(gate_up|down)_proj")


def to_mxfp4(weights: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """weights: [..., in]. Returns blocks, scales and what they stand for: the nearest numbers under the largest."""
    groups = weights.reshape(*weights.shape[:-1], -1, 32)
    largest = np.abs(groups).max(-1, keepdims=True)
    exponents = np.floor(np.log2(np.where(largest > 0, largest, 1))).astype(np.int64) - 2
    scales = np.float32(2) ** exponents.astype(np.float32)
    codes = np.abs((groups / scales)[..., None] - FP4).argmin(-1).astype(np.uint8)
    blocks = codes[..., ::2] + 16 * codes[..., 1::2]
    return blocks, (exponents[..., 0] + 127).astype(np.uint8), (FP4[codes] * scales).reshape(weights.shape)


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Shelf:
    return Shelf(tmp_path_factory.mktemp("mxfp4"))


def twins(shelf: Shelf, root: Path, case: str = "mixtral", **options: object) -> tuple[Path, Path]:
    """A model with its experts in MXFP4, and with the plain weights that they stand for. Those of gpt-oss are [in, out]
    where they are plain.
    """
    source, turned = shelf.checkpoint(BY_NAME[case]), case == "gpt-oss"
    mxfp4, plain = (Path(shutil.copytree(source, root / name)) for name in ("mxfp4", "plain"))
    meant: dict[str, Tensor] = {}

    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        kept = {}
        for name, tensor in (tensors if turned else fused_experts(tensors)).items():
            if not EXPERTS.fullmatch(name):
                kept[name] = tensor
                continue
            made = [as_tensor(one) for one in to_mxfp4((tensor.mT.contiguous() if turned else tensor).numpy())]
            kept |= {f"{name}_blocks": made[0], f"{name}_scales": made[1]}
            meant[name] = made[2].mT.contiguous() if turned else made[2]
        return kept

    edit_tensors(mxfp4, change)
    plain_experts = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    stored = {"quant_method": "mxfp4", "modules_to_not_convert": plain_experts} | options
    edit_config(mxfp4, lambda values: values | {"quantization_config": stored})
    edit_tensors(plain, lambda tensors: (tensors if turned else fused_experts(tensors)) | meant)
    return mxfp4, plain


@pytest.mark.parametrize("case", ["mixtral", "gpt-oss"])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.sample(2)
def test_bits_are_those_of_the_plain_weights(ranks: int, case: str, shelf: Shelf, tmp_path: Path) -> None:
    mxfp4, plain = twins(shelf, tmp_path, case)
    assert bits(mxfp4, ranks) == bits(plain, ranks)


@pytest.mark.parametrize("case", ["mixtral", "gpt-oss"])
def test_the_estimate_is_what_is_held(case: str, shelf: Shelf, tmp_path: Path) -> None:
    mxfp4, plain = twins(shelf, tmp_path, case)
    config = read_config(mxfp4)
    tensors = Tensors(Checkpoint(mxfp4), torch.float32, CPU, open_weight_format(config))
    build_model(config, tensors)
    assert tensors.held.bytes == weight_bytes(config, "float32") < weight_bytes(read_config(plain), "float32")


def opened(**options: Any) -> Mxfp4:
    return Mxfp4(Fields(Path("config.json"), options))


@given(st.integers(1, 20), st.integers(1, 5), st.integers(0, 2**32 - 1), st.data())
def test_any_part_stands_for_that_part_of_the_weights(out: int, groups: int, seed: int, data: st.DataObject) -> None:
    """All bytes, and all exponents whose numbers are finite in float32."""
    rng, width = np.random.default_rng(seed), 32 * groups
    blocks = rng.integers(0, 256, (out, groups, 16), dtype=np.uint8)
    scales = rng.integers(0, 253, (out, groups), dtype=np.uint8)
    codes = np.stack([blocks & 15, blocks >> 4], -1).reshape(out, groups, 32)
    meant = (FP4[codes].astype(np.float64) * 2.0 ** (scales[..., None].astype(np.int64) - 127)).astype(np.float32)
    first, last = (data.draw(st.integers(0, groups - 1)) for _ in range(2))
    row = data.draw(st.integers(0, out - 1))
    form = opened()
    tensors = {"blocks": as_tensor(blocks), "scales": as_tensor(scales)}
    linear = StoredWeight("a", out, width, form.stacked(out, width), tensors)
    columns = slice(min(first, last) * 32, max(first, last) * 32 + 32)
    part = bring_back(form.groups(linear.rows(slice(row, out)).columns(columns)))
    assert torch.equal(part, as_tensor(meant.reshape(out, width))[row:, columns])


def _swapped(packed: Tensor, bits_: int, width: int) -> Tensor:
    return unpack_bits(packed >> 4 | packed << 4, bits_, width)


FAULTS: dict[str, tuple[object, str, Callable[..., object]]] = {
    "nibbles in the other order": (mxfp4_file, "unpack_bits", _swapped),
    "a bias of 126": (Mxfp4, "groups", lambda form, weight: true_groups(form, _moved(weight, lambda t: t + 1))),
    "scale of the neighbour": (
        Mxfp4,
        "groups",
        lambda form, weight: true_groups(form, _moved(weight, lambda t: t.roll(1, 1))),
    ),
}
true_groups = Mxfp4.groups


def _moved(weight: StoredWeight, change: Callable[[Tensor], Tensor]) -> StoredWeight:
    tensors = {"blocks": weight["blocks"], "scales": change(weight["scales"])}
    return StoredWeight(weight.name, weight.outputs, weight.inputs, weight.described, tensors)


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_caught(fault: str, shelf: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mxfp4, plain = twins(shelf, tmp_path)
    owner, name, wrong = FAULTS[fault]
    monkeypatch.setattr(owner, name, wrong)
    assert bits(mxfp4, 1) != bits(plain, 1)


def test_damaged_tensors_are_named(shelf: Shelf, tmp_path: Path) -> None:
    mxfp4, _ = twins(shelf, tmp_path)
    name = "model.layers.1.mlp.experts.down_proj"

    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        tensors[f"{name}_scales"][2, 5, 1] = 255
        return tensors

    edit_tensors(mxfp4, change)
    with pytest.raises(CheckpointError, match=rf"{name}\[2\]_scales holds 255, which is not a number"):
        load_it(mxfp4, backend="reference")
    edit_tensors(mxfp4, lambda tensors: {key: one for key, one in tensors.items() if key != f"{name}_scales"})
    with pytest.raises(CheckpointError, match=f"{name}_scales is missing"):
        load_it(mxfp4, backend="reference")


def test_inputs_that_are_no_groups_are_refused() -> None:
    with pytest.raises(CheckpointError, match="40 inputs of an expert are no multiple of 32"):
        opened().stacked(8, 40)


def test_only_experts_are_quantized() -> None:
    form = opened(modules_to_not_convert=["model.layers.*.mlp.experts.7"])
    assert form.for_linear("model.layers.0.mlp.experts.gate_up_proj") is form
    for name in ("model.layers.0.self_attn.q_proj", "lm_head", "model.layers.1.mlp.experts.7.w1"):
        assert form.for_linear(name) is PLAIN
