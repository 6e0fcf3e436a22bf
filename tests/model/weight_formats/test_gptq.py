"""Law: a GPTQ checkpoint computes, bit for bit, what the plain weights compute that its tensors stand for."""

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
from model.weight_formats import gptq
from model.weight_formats.gptq import GptqFormat
from model.weight_formats.groups import GroupWeights, bring_back
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
from tests.model.weight_formats.compressed import half_scales
from tests.model.weight_formats.packing import Quantized, Scheme, write_twins
from tests.model.weight_formats.test_groups import bits, divided, linears
from tests.model.weight_formats.unpacking import check, draw, runs, stored
from tests.support.marks import few

pytestmark = pytest.mark.sample(3)

CPU = torch.device("cpu")
LINEAR = "model.layers.1.mlp.down_proj"
SCHEMES = {
    "llama-biases": Scheme(32, symmetric=True, scales=torch.float32),
    "phi3": Scheme(32, bits=8, version="gptq_v2"),
    "gpt2": Scheme(-1),
    "gpt-neox": Scheme(64, ordered=True, symmetric=True),
    "qwen3-moe": Scheme(32),  # the last group of an expert's 40 inputs has 8
    "deepseek-v2": Scheme(16, ordered=True),
    "mixtral": Scheme(32, ordered=True, scales=torch.bfloat16),
    "gemma2": Scheme(16, bits=8, ordered=True, version="gptq_v2"),
}


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Shelf:
    return Shelf(tmp_path_factory.mktemp("gptq"))


def twins_of(case: str, shelf: Shelf, root: Path, scheme: Scheme | None = None) -> tuple[Path, Path]:
    source = shelf.checkpoint(BY_NAME[case])
    scheme = SCHEMES[case] if scheme is None else scheme
    return write_twins(source, root, linears(source), lambda _: scheme, lying=case == "gpt2")


def options(directory: Path, **changes: object) -> None:
    """Changes options of 'quantization_config'; None takes one out."""

    def change(values: dict[str, Any]) -> dict[str, Any]:
        section = values["quantization_config"] | changes
        return values | {"quantization_config": {key: value for key, value in section.items() if value is not None}}

    edit_config(directory, change)


# The weights.


@st.composite
def drawn(draws: st.DrawFn) -> tuple[Scheme, Quantized, slice, slice]:
    """A linear, and the outputs and inputs of a part that no block is cut in."""
    bits, symmetric = draws(st.sampled_from([4, 8])), draws(st.booleans())
    wide = st.just(torch.float32) if symmetric else st.nothing()
    scheme = Scheme(
        draws(st.sampled_from([-1, 1, 8, 24, 32, 128])),
        bits,
        symmetric,
        draws(st.booleans()),
        draws(st.sampled_from([torch.float16, torch.bfloat16]) | wide),
        draws(st.sampled_from(["gptq", "gptq_v2"])),
    )
    word = 32 // bits
    out, width = word * draws(st.integers(1, 20)), word * draws(st.integers(1, 20))
    linear = draw(scheme, out, width, draws(st.integers(0, 2**32)))
    made, _ = stored(scheme, linear)
    return scheme, linear, draws(runs(out, made.blocks.rows)), draws(runs(width, made.blocks.columns))


@given(drawn())
def test_weights_are_those_of_the_published_layout(one: tuple[Scheme, Quantized, slice, slice]) -> None:
    check(*one)


def test_scales_in_float32_with_zero_points_round_in_the_last_bits() -> None:
    scheme = Scheme(32, scales=torch.float32)
    linear = draw(scheme, 64, 96, 1)
    made, weight = stored(scheme, linear)
    torch.testing.assert_close(bring_back(made.groups(weight)), linear.plain(), rtol=1e-5, atol=1e-7)


def test_a_zero_point_of_0_borrows_from_the_next() -> None:
    """An example by hand: 0, 8 and six times 15, less 1 in one word."""
    word = 0xFFFFFF80 - 0x11111111 - 2**32
    zeros = gptq.read_zeros(torch.tensor([[word]], dtype=torch.int32), 4, True)
    assert zeros.tolist() == [[0, 8, 15, 15, 15, 15, 15, 15]]


EXAMPLE = Scheme(8, ordered=True)


def reversed_words(words: Tensor, bits: int) -> Tensor:
    return unpack_words(words, bits).unflatten(1, (-1, 32 // bits)).flip(2).flatten(1)


def neighbours(self: GptqFormat, weight: StoredWeight) -> GroupWeights:
    groups = GROUPS(self, weight)
    return replace(groups, scales=groups.scales.roll(1, 1))


GROUPS, READ_ZEROS = GptqFormat.groups, gptq.read_zeros
FAULTS: dict[str, tuple[object, str, Callable[..., object]]] = {
    "zero points are off by one": (gptq, "read_zeros", lambda w, b, less_one: READ_ZEROS(w, b, not less_one)),
    "the 1 of zero points has no carry": (gptq, "read_zeros", lambda w, b, _: (unpack_words(w, b) + 1) & (2**b - 1)),
    "integers are in the other order": (gptq, "unpack_words", reversed_words),
    "scales are those of the next group": (GptqFormat, "groups", neighbours),
    "desc_act is ignored": (GptqFormat, "_index", lambda _, __: None),
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
@pytest.mark.sample(2)
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
    edit_tensors(quantized, half_scales)
    config = read_config(quantized)
    tensors = Tensors(Checkpoint(quantized), torch.float32, CPU, open_weight_format(config))
    build_model(config, tensors)
    assert tensors.held.bytes == weight_bytes(config, "float32") < weight_bytes(read_config(plain), "float32")
    assert estimate(quantized, ModelSettings(str(quantized)))["quantization"] == "gptq"


def test_linears_with_other_options(shelf: Shelf, tmp_path: Path) -> None:
    """The output layer is quantized, some linears are plain, others have 8 bits."""
    source = shelf.checkpoint(BY_NAME["llama-biases"])
    dynamic = {r"-:.*\.1\.mlp\.": {}, r"+:.*\.down_proj": {"bits": 8, "group_size": -1, "sym": True}, r".*\.2\.": {}}
    base = Scheme(32, changes=(("lm_head", True), ("dynamic", dynamic), ("pack_dtype", "int32")))
    wide = replace(base, bits=8, group=-1, symmetric=True)
    names = [name for name in linears(source) if ".1.mlp." not in name]
    quantized, plain = write_twins(
        source, tmp_path, [*names, "lm_head.weight"], lambda name: wide if "down_proj" in name else base
    )
    assert bits(quantized, 1) == bits(plain, 1)
    assert bits(quantized, 2) == bits(plain, 2)
    made = open_weight_format(read_config(quantized))
    assert made.for_linear("model.layers.0.mlp.up_proj") is made.for_linear("model.layers.2.mlp.up_proj") is made
    assert made.for_linear("model.layers.0.mlp.down_proj") is made.for_linear("model.layers.2.mlp.down_proj")
    assert made.for_linear("model.layers.1.mlp.down_proj") is PLAIN


def test_modules_that_are_chosen(shelf: Shelf, tmp_path: Path) -> None:
    source = shelf.checkpoint(BY_NAME["llama-biases"])
    chosen = [["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], ["mlp.down_proj"]]
    scheme = Scheme(32, changes=(("modules_in_block_to_quantize", chosen),))
    names = [name for name in linears(source) if re.search("[qkv]_proj|down_proj", name)]
    quantized, plain = write_twins(source, tmp_path, names, lambda _: scheme)
    assert bits(quantized, 1) == bits(plain, 1)


# Keys that config.json lacks.


def test_options_that_are_missing_are_read_from_the_tensors(shelf: Shelf, tmp_path: Path) -> None:
    """Zero points and an order of inputs are kept then."""
    quantized, plain = twins_of("llama-biases", shelf, tmp_path, Scheme(32, symmetric=True, ordered=True))
    expected = bits(plain, 1)
    assert bits(quantized, 1) == expected
    options(quantized, sym=None, desc_act=None, checkpoint_format=None)
    assert bits(quantized, 1) == expected


def test_groups_that_are_all_0_are_runs_without_desc_act() -> None:
    scheme = Scheme(8)
    linear = draw(scheme, 16, 32, 0)
    made, weight = stored(scheme, linear)
    zeroed = replace(weight, tensors={**weight.tensors, "g_idx": torch.zeros(32, dtype=torch.int32)})
    assert torch.equal(bring_back(made.groups(zeroed)), linear.plain())


def test_biases_of_zeros_are_none(shelf: Shelf, tmp_path: Path) -> None:
    """As AutoGPTQ wrote them for models that have no biases."""
    source = shelf.checkpoint(BY_NAME["mistral"])
    quantized, plain = write_twins(source, tmp_path, linears(source), lambda _: Scheme(16))

    def biased(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        linears_ = {name.removesuffix(".qweight"): t.shape[1] for name, t in tensors.items() if ".qweight" in name}
        return tensors | {f"{name}.bias": torch.zeros(out, dtype=torch.float16) for name, out in linears_.items()}

    edit_tensors(quantized, biased)
    assert bits(quantized, 1) == bits(plain, 1)
    assert bits(quantized, 2) == bits(plain, 2)
    name = f"{LINEAR}.bias"
    edit_tensors(quantized, lambda tensors: tensors | {name: tensors[name] + torch.eye(64, dtype=torch.float16)[5]})
    with pytest.raises(CheckpointError, match=rf"{re.escape(name)} is not zero, and not part of the model"):
        load_it(quantized)


def test_g_idx_may_be_missing_without_desc_act(shelf: Shelf, tmp_path: Path) -> None:
    quantized, plain = twins_of("llama-biases", shelf, tmp_path, Scheme(32))
    edit_tensors(quantized, lambda tensors: {name: one for name, one in tensors.items() if ".g_idx" not in name})
    assert bits(quantized, 2) == bits(plain, 2)
    options(quantized, desc_act=True)
    with pytest.raises(CheckpointError, match=r"self_attn.q_proj.g_idx is missing"):
        load_it(quantized)


# Ranks.


def test_degrees_that_would_cut_a_group_are_refused(shelf: Shelf, tmp_path: Path) -> None:
    """Heads of 16: two to a group. With desc_act no group is cut: 8 values of a word stay together."""
    runs_, _ = twins_of("llama-biases", shelf, tmp_path / "runs", Scheme(32))
    message = (
        r"--tensor-parallel is 4: .* 4 heads over 2 .*, gptq keeps 8 outputs and 32 inputs together; 1 or 2 can be"
    )
    with pytest.raises(ValueError, match=message):
        divided(runs_, 4)
    ordered, plain = twins_of("llama-biases", shelf, tmp_path / "ordered", Scheme(32, ordered=True))
    assert bits(ordered, 4) == bits(plain, 4)


# Refusals.


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bits": 3}, "'bits' is 3, which is not served for GPTQ; 4 and 8 are"),
        ({"bits": 2}, "'bits' is 2, which is not served"),
        ({"bits": None}, "'bits' is missing"),
        ({"group_size": 0}, "'group_size' is 0, must be at least 1"),
        ({"group_size": None}, "'group_size' is missing"),
        ({"sym": "yes"}, "'sym' is 'yes', must be of type bool"),
        (
            {"checkpoint_format": "marlin"},
            "'checkpoint_format' is 'marlin', which is not served; use a checkpoint with",
        ),
        ({"checkpoint_format": None, "format": "bitblas"}, "'format' is 'bitblas', which is not served"),
        ({"is_marlin_format": True}, "'is_marlin_format' is True, which is not served"),
        ({"pack_dtype": "int64"}, "'pack_dtype' is 'int64', which is not served; int32 is"),
        ({"dynamic": {".*": {"bits": 3}}}, "'bits' is 3, which is not served"),
        ({"dynamic": {".*": {"bits": [4]}}}, r"'bits' is \[4\], must be of type int"),
        ({"dynamic": {"+:.*": 4}}, r"the rule '\+:\.\*' of 'dynamic' is 4, no object"),
        ({"dynamic": {"-:(a": {}}}, "the regex of the rule '-:.a' of 'dynamic' is not served: a group is not closed"),
        ({"dynamic": {f"-:{i}": {} for i in range(257)}}, "'dynamic' has 257 rules, may have 256"),
        ({"dynamic": []}, "'dynamic' is .*, must be of type dict"),
        ({"modules_in_block_to_quantize": [[4]]}, "'modules_in_block_to_quantize' is .*, must be a list of names"),
    ],
)
def test_options_that_are_not_served(changes: dict[str, Any], message: str) -> None:
    said = Scheme(32).options() | changes
    with pytest.raises(CheckpointError, match=f"config.json: .*{message}"):
        GptqFormat(Fields(Path("config.json"), said))


@pytest.mark.parametrize(("out", "width", "what"), [(60, 64, "60 outputs"), (64, 60, "60 inputs")])
def test_linears_that_do_not_fill_words(out: int, width: int, what: str) -> None:
    made = GptqFormat(Fields(Path("config.json"), Scheme(32).options()))
    with pytest.raises(CheckpointError, match=f"config.json: a linear has {what}, must be a multiple of 8"):
        made.tensors(out, width)


@pytest.mark.parametrize(
    ("key", "change", "message"),
    [
        ("g_idx", lambda g: torch.where(g == 2, 3, g), r"\.g_idx holds the group 3, must be in \[0, 2\]"),
        ("g_idx", lambda g: -g, r"\.g_idx holds the group -1, must be in"),
        ("g_idx", lambda g: g.flip(0), r"\.g_idx orders inputs by activation; 'desc_act' is false in .*config.json: "),
        ("g_idx", lambda g: g[:-1], r"\.g_idx in model.safetensors has shape \[95\], config.json needs \[96\]"),
        ("g_idx", lambda g: g.long(), r"\.g_idx .* is of torch.int64, must be torch.int32"),
        ("qweight", None, r"\.qweight is missing"),
        ("qweight", lambda q: q[:-1], r"\.qweight .* has shape \[11, 64\], config.json needs \[12, 64\]"),
        ("qzeros", lambda q: q + 1, r"\.qzeros holds the zero point 9; 'sym' is true in .*config.json, so that all"),
        ("qzeros", lambda q: q[:, :-1], r"\.qzeros .* has shape \[3, 7\], config.json needs \[3, 8\]"),
        ("scales", lambda s: s.int(), r"\.scales .* is of torch.int32, must be floating point"),
        ("scales", lambda s: s * torch.inf, r"\.scales holds a value that is infinite or not a number"),
    ],
)
def test_damaged_tensors(
    key: str, change: Callable[[Tensor], Tensor] | None, message: str, shelf: Shelf, tmp_path: Path
) -> None:
    quantized, _ = twins_of("llama-biases", shelf, tmp_path, Scheme(32, symmetric=True))
    name = f"{LINEAR}.{key}"

    def damage(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        left = {other: tensor for other, tensor in tensors.items() if other != name}
        return left if change is None else left | {name: change(tensors[name])}

    edit_tensors(quantized, damage)
    with pytest.raises(CheckpointError, match=re.escape(LINEAR) + message):
        load_it(quantized)
