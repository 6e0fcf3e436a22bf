"""FP8, in blocks and with one scale for a tensor: bits are those of the weights that it stands for."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from model import config as config_file
from model.architectures.registry import build_model
from model.config import STORED_FORMATS, read_config
from model.errors import CheckpointError
from model.fields import Fields
from model.footprint import weight_bytes
from model.settings import ModelSettings
from model.tensors import Tensors
from model.weight_formats import registry
from model.weight_formats.fp8 import Fp8
from model.weight_formats.groups import GroupFormat, bring_back
from model.weight_formats.plain import PLAIN
from model.weight_formats.registry import open_weight_format
from model.weight_formats.scales import ScaleLayout
from model.weight_formats.stored import StoredWeight
from model.weights import Checkpoint
from rpc.cli.estimate import estimate
from tests.model.families.cases import BY_NAME
from tests.model.families.conftest import Shelf
from tests.model.families.styles import edit_config, edit_tensors
from tests.model.test_weights import load_it
from tests.model.weight_formats.compressed import Recipe, compress, half_scales, stored
from tests.model.weight_formats.recipes import FP8_BLOCK, FP8_TENSOR
from tests.model.weight_formats.stated import Stated, state
from tests.model.weight_formats.test_groups import bits, divided, linears
from tests.support.marks import few

pytestmark = pytest.mark.sample(3)

CPU = torch.device("cpu")
STATIC = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}


@dataclass(frozen=True)
class Writer:
    """options: of 'quantization_config'. recipe: of what is stored. names: of its tensors. flat: scales are numbers."""

    options: dict[str, Any]
    recipe: Recipe
    names: dict[str, str]
    flat: bool = False

    def write(self, directory: Path, plain: Path, names: list[str]) -> None:
        made = compress(directory, plain, names, [self.recipe])

        def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
            renamed = {}
            for name, tensor in tensors.items():
                linear, _, key = name.rpartition(".")
                flat = self.flat and key in ("weight_scale", "input_scale")
                renamed[f"{linear}.{self.names.get(key, key)}"] = tensor.view(()) if flat else tensor
            return renamed

        edit_tensors(directory, change)
        edit_config(directory, lambda values: values | {"quantization_config": {"quant_method": "fp8"} | self.options})
        if self.recipe.inputs is not None:
            state(plain, "float", None, {name: one.scale for name, one in made.items()})


INVERSE = {"weight_scale": "weight_scale_inv", "input_scale": "activation_scale"}
BLOCKS = Writer({"weight_block_size": [16, 16], "activation_scheme": "dynamic", "fmt": "e4m3"}, FP8_BLOCK, INVERSE)
AUTOFP8 = Writer({"activation_scheme": "dynamic", "ignored_layers": ["lm_head"]}, FP8_TENSOR, {}, flat=True)
AUTOFP8_STATIC = Writer({"activation_scheme": "static"}, replace(FP8_TENSOR, inputs=STATIC), {})
TRANSFORMERS = Writer(
    {"weight_block_size": None, "activation_scheme": "static", "modules_to_not_convert": ["lm_head"]},
    replace(FP8_TENSOR, inputs=STATIC), INVERSE, flat=True,
)  # fmt: skip
BLOCKS_STATIC = Writer(
    {"weight_block_size": [16, 16], "activation_scheme": "static"}, replace(FP8_BLOCK, inputs=STATIC), INVERSE
)

CASES: dict[str, tuple[str, Writer]] = {
    "blocks": ("llama-biases", BLOCKS),
    "blocks, fused": ("phi3", BLOCKS),
    "blocks, experts": ("mixtral", BLOCKS),
    "blocks, small experts, the last smaller": ("qwen3-moe", BLOCKS),
    "blocks, latent attention": ("deepseek-v3", BLOCKS),
    "AutoFP8": ("llama-biases", AUTOFP8),
    "AutoFP8, experts": ("qwen3-moe", AUTOFP8),
    "AutoFP8, latent attention": ("deepseek-v3", AUTOFP8),
    "AutoFP8, static": ("mixtral", AUTOFP8_STATIC),
    "transformers, static": ("llama-biases", TRANSFORMERS),
    "blocks, static": ("llama-biases", BLOCKS_STATIC),
}


@pytest.fixture(autouse=True)
def served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.STORED, "stated", Stated)
    monkeypatch.setattr(config_file, "STORED_FORMATS", (*STORED_FORMATS, "stated"))


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Shelf:
    return Shelf(tmp_path_factory.mktemp("fp8"))


def twins(case: str, writer: Writer, shelf: Shelf, root: Path) -> tuple[Path, Path]:
    """The checkpoint in FP8, and the plain weights that it stands for."""
    source = shelf.checkpoint(BY_NAME[case])
    fp8, plain = (Path(shutil.copytree(source, root / name)) for name in ("fp8", "plain"))
    writer.write(fp8, plain, linears(source))
    return fp8, plain


@few("ranks", [1, 2], [1])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.sample(3)
def test_bits_are_those_of_the_plain_weights(name: str, ranks: int, shelf: Shelf, tmp_path: Path) -> None:
    fp8, plain = twins(*CASES[name], shelf, tmp_path)
    assert bits(fp8, ranks) == bits(plain, ranks)


@pytest.mark.parametrize("writer", [BLOCKS, TRANSFORMERS], ids=["blocks", "transformers"])
def test_the_estimate_is_what_is_held(writer: Writer, shelf: Shelf, tmp_path: Path) -> None:
    fp8, plain = twins("qwen3-moe", writer, shelf, tmp_path)
    edit_config(plain, lambda values: {key: value for key, value in values.items() if key != "quantization_config"})
    edit_tensors(fp8, half_scales)
    config = read_config(fp8)
    tensors = Tensors(Checkpoint(fp8), torch.float32, CPU, open_weight_format(config))
    build_model(config, tensors)
    assert tensors.held.bytes == weight_bytes(config, "float32") < weight_bytes(read_config(plain), "float32")
    assert estimate(fp8, ModelSettings(str(fp8)))["quantization"] == "fp8"


def opened(**options: Any) -> Fp8:
    return Fp8(Fields(Path("config.json"), {"quant_method": "fp8", "activation_scheme": "dynamic"} | options))


def in_memory(out: int, width: int, seed: int, block: tuple[int, int]) -> tuple[GroupFormat, StoredWeight, Tensor]:
    """The format, a linear as it would be read, and what it stands for."""
    weight = torch.from_numpy(np.random.default_rng(seed).normal(size=(out, width)).astype(np.float32))
    made = stored(weight, replace(FP8_BLOCK, block=block))
    form = opened(weight_block_size=list(block)).for_linear("model.layers.0.a")
    assert isinstance(form, GroupFormat)
    tensors = {INVERSE.get(key, key): tensor for key, tensor in made.tensors.items()}
    return form, StoredWeight("a", out, width, form.tensors(out, width), tensors), made.meant


BLOCK_SIZES = [(128, 128), (64, 48), (1, 128)]


@given(st.sampled_from(BLOCK_SIZES), st.integers(1, 300), st.integers(1, 300), st.integers(0, 2**32 - 1), st.data())
def test_any_part_stands_for_that_part_of_the_weights(
    block: tuple[int, int], out: int, width: int, seed: int, data: st.DataObject
) -> None:
    form, linear, meant = in_memory(out, width, seed, block)
    run = [data.draw(st.integers(0, (size - 1) // one)) * one for size, one in zip((out, width), block, strict=True)]
    part = bring_back(form.groups(linear.rows(slice(run[0], out)).columns(slice(run[1], width))))
    assert torch.equal(part, meant[run[0] :, run[1] :])


true_scales = ScaleLayout.of_outputs
FAULTS: dict[str, Callable[[ScaleLayout, Tensor, int], Tensor]] = {
    "scales transposed": lambda layout, scales, outputs: true_scales(layout, scales.T.contiguous(), outputs),
    "scale of the neighbour": lambda layout, scales, outputs: true_scales(layout, scales.roll(1, 0), outputs),
    "scales divide": lambda layout, scales, outputs: true_scales(layout, 1 / scales, outputs),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_caught(fault: str, shelf: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fp8, plain = twins("llama-biases", BLOCKS, shelf, tmp_path)
    expected = bits(plain, 1)
    form, linear, meant = in_memory(256, 256, 0, (128, 128))
    assert torch.equal(bring_back(form.groups(linear)), meant)
    monkeypatch.setattr(ScaleLayout, "of_outputs", FAULTS[fault])
    assert not torch.equal(bring_back(form.groups(linear)), meant)
    if fault != "scales transposed":  # scales of 64 x 96 have another shape then
        assert bits(fp8, 1) != expected


@pytest.mark.parametrize("byte", [0x7F, 0xFF])
def test_values_that_are_not_numbers_are_named(byte: int, shelf: Shelf, tmp_path: Path) -> None:
    fp8, _ = twins("llama-biases", BLOCKS, shelf, tmp_path)
    name = "model.layers.1.mlp.down_proj.weight"

    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        tensors[name].view(torch.uint8)[5, 7] = byte
        return tensors

    edit_tensors(fp8, change)
    with pytest.raises(CheckpointError, match=f"{name} holds float8 values that are not a number"):
        load_it(fp8, backend="reference")
    with pytest.raises(CheckpointError, match=f"{name} in .* has 1 of 6144 values that are infinite or not a number"):
        load_it(fp8, backend="reference", verify_weights=True)


def test_weights_whose_scales_config_does_not_name_are_refused(shelf: Shelf, tmp_path: Path) -> None:
    """A linear that config.json takes for a plain one has scales that are left over."""
    fp8, _ = twins("llama-biases", BLOCKS, shelf, tmp_path)
    options = {"quant_method": "fp8"} | BLOCKS.options | {"modules_to_not_convert": ["mlp"]}
    edit_config(fp8, lambda values: values | {"quantization_config": options})
    with pytest.raises(CheckpointError, match=r"weight_scale_inv in .* more is not part of the model"):
        load_it(fp8, backend="reference")


def test_degrees_that_would_cut_a_block_are_refused_with_those_that_do_not(shelf: Shelf, tmp_path: Path) -> None:
    tall = Writer(BLOCKS.options | {"weight_block_size": [32, 16]}, replace(FP8_BLOCK, block=(32, 16)), INVERSE)
    fp8, _ = twins("llama-biases", tall, shelf, tmp_path)
    with pytest.raises(
        ValueError, match=r"--tensor-parallel is 2: .* fp8 keeps 32 outputs and 16 inputs together; 1 c"
    ):
        divided(fp8, 2)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"weight_block_size": [128]}, r"'weight_block_size' is \[128\], must be outputs and inputs of a block"),
    ({"weight_block_size": [100, 128]}, r"'weight_block_size' is \[100, 128\], blocks may have a divisor of 128"),
    ({"weight_block_size": [128, 0]}, r"'weight_block_size' is \[128, 0\], blocks may have"),
    ({"weight_block_size": "wide"}, "'weight_block_size' is 'wide', must be outputs and inputs"),
    ({"activation_scheme": "local"}, "'activation_scheme' is 'local', must be dynamic or static"),
    ({"fmt": "e5m2"}, "'fmt' is 'e5m2', must be e4m3; use the model in GPTQ"),
    ({"expert_dtype": "fp4"}, "'expert_dtype' is 'fp4', must be fp8; use the model in GPTQ"),
    ({"modules_to_convert": ["embed"]}, r"'modules_to_convert' is \['embed'\], must be empty"),
    ({"modules_to_not_convert": "lm_head"}, "'modules_to_not_convert' is 'lm_head', must be of type list"),
    ({"ignored_layers": [1]}, r"'ignored_layers' is \[1\], must be a list of names"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_what_is_not_served_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=f"^config.json: {message}"):
        opened(**options)


def test_modules_that_are_not_converted() -> None:
    form = opened(modules_to_not_convert=["model.layers.1", "gate", "visual", "mtp.*.eh_proj", "self_attn.o_proj"])
    plain = ["lm_head", "model.layers.1.mlp.up_proj", "model.layers.2.mlp.gate", "model.layers.3.self_attn.o_proj",
             "mtp.7.eh_proj"]  # fmt: skip
    assert all(form.for_linear(name) is PLAIN for name in plain)
    assert all(
        form.for_linear(name) is not PLAIN for name in ("model.layers.11.mlp.up_proj", "h.0.gate_proj", "h.0.o_proj")
    )
