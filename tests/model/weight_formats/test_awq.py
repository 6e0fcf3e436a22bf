"""Law: an AWQ checkpoint computes, bit for bit, what the plain weights compute that its tensors stand for."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from model.architectures.registry import build_model
from model.config import read_config
from model.errors import CheckpointError
from model.fields import Fields
from model.footprint import weight_bytes
from model.settings import ModelSettings
from model.tensors import Tensors
from model.weight_formats import awq
from model.weight_formats.awq import AwqFormat
from model.weight_formats.groups import GroupWeights
from model.weight_formats.plain import PLAIN
from model.weight_formats.registry import open_weight_format
from model.weight_formats.stored import StoredWeight
from model.weight_formats.words import unpack_words
from model.weights import Checkpoint
from rpc.cli.estimate import estimate
from tests.model.families import reference
from tests.model.families.cases import BY_NAME
from tests.model.families.conftest import Shelf
from tests.model.families.parity import ask, compare
from tests.model.families.prompts import FEW, PROMPTS
from tests.model.families.styles import edit_config, edit_tensors
from tests.model.test_weights import load_it
from tests.model.weight_formats.packing import Quantized, Scheme, write_twins
from tests.model.weight_formats.test_groups import bits, divided, linears
from tests.model.weight_formats.unpacking import check, draw, runs, stored
from tests.support.marks import few

pytestmark = pytest.mark.sample(3)

CPU = torch.device("cpu")
SCHEMES = {
    "llama-biases": Scheme(32, version="gemm"),
    "phi3": Scheme(32, symmetric=True, version="gemm"),
    "starcoder2": Scheme(16, version="gemm"),
    "falcon-new": Scheme(-1, version="gemm"),
    "gpt-neox": Scheme(32, version="gemm"),
    "deepseek-v2": Scheme(8, version="gemm"),
    "qwen3-moe": Scheme(8, version="gemm", scales=torch.bfloat16),
    "mixtral": Scheme(32, version="gemm", changes=(("modules_to_not_convert", ["gate"]),)),
}


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Shelf:
    return Shelf(tmp_path_factory.mktemp("awq"))


def twins_of(case: str, shelf: Shelf, root: Path, scheme: Scheme | None = None) -> tuple[Path, Path]:
    source = shelf.checkpoint(BY_NAME[case])
    scheme = SCHEMES[case] if scheme is None else scheme
    return write_twins(source, root, linears(source), lambda _: scheme)


# The weights.


@st.composite
def drawn(draws: st.DrawFn) -> tuple[Scheme, Quantized, slice, slice]:
    """A linear, and the outputs and inputs of a part that no block is cut in."""
    scheme = Scheme(
        draws(st.sampled_from([-1, 1, 5, 16, 32])),
        symmetric=draws(st.booleans()),
        scales=draws(st.sampled_from([torch.float16, torch.bfloat16])),
        version="gemm",
    )
    out = 8 * draws(st.integers(1, 20))
    width = draws(st.integers(1, 8)) * (7 if scheme.group == -1 else scheme.group)
    linear = draw(scheme, out, width, draws(st.integers(0, 2**32)))
    made, _ = stored(scheme, linear)
    return scheme, linear, draws(runs(out, made.blocks.rows)), draws(runs(width, made.blocks.columns))


@given(drawn())
def test_weights_are_those_of_the_published_layout(one: tuple[Scheme, Quantized, slice, slice]) -> None:
    check(*one)


def test_outputs_of_a_word() -> None:
    """An example by hand: each output of 8 holds its own number."""
    assert awq.unpack_outputs(torch.tensor([[0x75316420]], dtype=torch.int32)).tolist() == [[0, 1, 2, 3, 4, 5, 6, 7]]


EXAMPLE = Scheme(8, version="gemm")


def off_by_one(self: AwqFormat, weight: StoredWeight) -> GroupWeights:
    """Zero points as GPTQ's, less 1."""
    zeros = weight["qzeros"] + 0x11111111
    return GROUPS(self, replace(weight, tensors={**weight.tensors, "qzeros": zeros}))


def neighbours(self: AwqFormat, weight: StoredWeight) -> GroupWeights:
    groups = GROUPS(self, weight)
    return replace(groups, scales=groups.scales.roll(1, 1))


def in_places(words: Tensor) -> Tensor:
    """The order of a word applied the wrong way round."""
    return unpack_words(words, 4).unflatten(1, (-1, 8))[..., awq.ORDER].flatten(1)


GROUPS = AwqFormat.groups
FAULTS: dict[str, tuple[object, str, Callable[..., object]]] = {
    "zero points are off by one": (AwqFormat, "groups", off_by_one),
    "outputs are in their order": (awq, "unpack_outputs", lambda words: unpack_words(words, 4)),
    "the order is taken the other way": (awq, "unpack_outputs", in_places),
    "scales are those of the next group": (AwqFormat, "groups", neighbours),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_harness_catches(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    linear = draw(EXAMPLE, 32, 64, 0)
    whole = (slice(0, 32), slice(0, 64))
    check(EXAMPLE, linear, *whole)
    monkeypatch.setattr(*FAULTS[fault])
    with pytest.raises(AssertionError, match="Arrays are not equal"):
        check(EXAMPLE, linear, *whole)


# Models.


@few("ranks", [1, 2], [1])
@pytest.mark.parametrize("case", SCHEMES)
@pytest.mark.sample(3)
def test_bits_are_those_of_the_plain_weights(case: str, ranks: int, shelf: Shelf, tmp_path: Path) -> None:
    quantized, plain = twins_of(case, shelf, tmp_path)
    assert bits(quantized, ranks) == bits(plain, ranks)


@pytest.mark.parametrize("case", SCHEMES)
@pytest.mark.sample(4)
def test_ids_are_those_of_transformers(case: str, shelf: Shelf, tmp_path: Path) -> None:
    quantized, plain = twins_of(case, shelf, tmp_path)
    compare(ask(quantized, FEW), reference.read(plain, PROMPTS, FEW))


@pytest.mark.parametrize("case", SCHEMES)
def test_the_estimate_is_what_is_held(case: str, shelf: Shelf, tmp_path: Path) -> None:
    quantized, plain = twins_of(case, shelf, tmp_path)
    config = read_config(quantized)
    tensors = Tensors(Checkpoint(quantized), torch.float32, CPU, open_weight_format(config))
    build_model(config, tensors)
    assert tensors.held.bytes == weight_bytes(config, "float32") < weight_bytes(read_config(plain), "float32")
    assert estimate(quantized, ModelSettings(str(quantized)))["quantization"] == "awq"


def test_options_by_the_names_of_autoawq(shelf: Shelf, tmp_path: Path) -> None:
    quantized, plain = twins_of("llama-biases", shelf, tmp_path)
    expected = bits(plain, 1)
    own = {"quant_method": "awq", "w_bit": 4, "q_group_size": 32, "version": "GEMM", "modules_to_not_convert": None}
    edit_config(quantized, lambda values: values | {"quantization_config": own})
    assert bits(quantized, 1) == expected


def test_modules_that_are_plain(shelf: Shelf, tmp_path: Path) -> None:
    """A name stands for whole components: "gate" is no gate_proj."""
    source = shelf.checkpoint(BY_NAME["llama-biases"])
    plain_ones = ["gate", "0.self_attn", "model.layers.1.mlp.down_proj"]
    scheme = Scheme(32, version="gemm", changes=(("modules_to_not_convert", plain_ones),))
    names = [name for name in linears(source) if not re.search(r"0\.self_attn|1\.mlp\.down", name)]
    quantized, plain = write_twins(source, tmp_path, names, lambda _: scheme)
    assert bits(quantized, 1) == bits(plain, 1)


@pytest.mark.parametrize(
    ("name", "stored_so"),
    [
        ("model.layers.10.mlp.gate_proj", True),
        ("model.layers.1.mlp.gate_proj", False),
        ("h.0.mlp.c_fc", True),
        ("model.layers.2.mlp.gate_proj", False),
        ("lm_head", False),
        ("model.decoder.project_in", False),
    ],
)
def test_names(name: str, stored_so: bool) -> None:
    changes = (("modules_to_not_convert", ["layers.1"]), ("dynamic", {r"-:model\.layers\.2\.": {}}))
    made = AwqFormat(Fields(Path("config.json"), Scheme(32, version="gemm", changes=changes).options()))
    assert made.for_linear(name) is (made if stored_so else PLAIN)


def test_degrees_that_would_cut_a_group_are_refused(shelf: Shelf, tmp_path: Path) -> None:
    quantized, _ = twins_of("llama-biases", shelf, tmp_path)
    message = r"--tensor-parallel is 4: .* 4 heads over 2 .*, awq keeps 8 outputs and 32 inputs together; 1 or 2 can be"
    with pytest.raises(ValueError, match=message):
        divided(quantized, 4)


# Refusals.

ANOTHER = "is not served; use a checkpoint of version gemm, or plain weights with --quantization int8"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bits": 8}, "'bits' is 8, which is not served for AWQ; 4 is"),
        ({"bits": None, "w_bit": 3}, "'bits' is 3, which is not served"),
        ({"group_size": -2}, "'group_size' is -2, must be at least 1"),
        ({"zero_point": 1}, "'zero_point' is 1, must be of type bool"),
        *[
            ({"version": version}, f"'version' is '{version}', which {ANOTHER}")
            for version in ("gemv", "GEMV_fast", "marlin", "exllama", "ipex", "llm-awq")
        ],
        ({"version": None, "checkpoint_format": "gemv"}, f"'checkpoint_format' is 'gemv', which {ANOTHER}"),
        ({"backend": "llm-awq"}, f"'backend' is 'llm-awq', whose layout {ANOTHER}"),
        ({"pack_dtype": "int16"}, "'pack_dtype' is 'int16', which is not served; int32 is"),
        ({"dynamic": {"+:.*": {"bits": 8}}}, """'dynamic' is .*, of which only rules with "-:" are served for AWQ"""),
        ({"modules_to_not_convert": "lm_head"}, "'modules_to_not_convert' is 'lm_head', must be of type list"),
    ],
)
def test_options_that_are_not_served(changes: dict[str, Any], message: str) -> None:
    said = Scheme(32, version="gemm").options() | changes
    with pytest.raises(CheckpointError, match=f"config.json: {message}"):
        AwqFormat(Fields(Path("config.json"), said))


LINEAR = "model.layers.1.mlp.down_proj"


@pytest.mark.parametrize(
    ("key", "change", "message"),
    [
        ("qweight", lambda q: q[:, 1:], r"\.qweight .* has shape \[96, 7\], config.json needs \[96, 8\]"),
        ("qweight", lambda q: q.float(), r"\.qweight .* is of torch.float32, must be torch.int32"),
        ("qweight", None, r"\.qweight is missing"),
        (
            "qzeros",
            lambda q: q + 1,
            r"\.qzeros holds the zero point 9; 'zero_point' is false in .*config.json, so that",
        ),
        ("scales", lambda s: s[1:], r"\.scales .* has shape \[2, 64\], config.json needs \[3, 64\]"),
        ("scales", lambda s: s / 0, r"\.scales holds a value that is infinite or not a number"),
    ],
)
def test_damaged_tensors(
    key: str, change: Callable[[Tensor], Tensor] | None, message: str, shelf: Shelf, tmp_path: Path
) -> None:
    quantized, _ = twins_of("llama-biases", shelf, tmp_path, Scheme(32, symmetric=True, version="gemm"))
    name = f"{LINEAR}.{key}"

    def damage(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        left = {other: tensor for other, tensor in tensors.items() if other != name}
        return left if change is None else left | {name: change(tensors[name])}

    edit_tensors(quantized, damage)
    with pytest.raises(CheckpointError, match=re.escape(LINEAR) + message):
        load_it(quantized)


def test_tensors_of_another_format_are_left_over(shelf: Shelf, tmp_path: Path) -> None:
    quantized, _ = twins_of("llama-biases", shelf, tmp_path)
    index = {f"{LINEAR}.g_idx": torch.zeros(96, dtype=torch.int32)}
    edit_tensors(quantized, lambda tensors: tensors | index)
    with pytest.raises(CheckpointError, match=rf"{re.escape(LINEAR)}\.g_idx in model.safetensors is not part of the"):
        load_it(quantized)


def test_outputs_that_do_not_fill_words() -> None:
    made = AwqFormat(Fields(Path("config.json"), Scheme(32, version="gemm").options()))
    with pytest.raises(CheckpointError, match=r"config.json: a linear has 60 outputs, must be a multiple of 8"):
        made.tensors(60, 64)
