"""A GGUF file alone computes, bit for bit, what a checkpoint with the plain weights computes that it stands for."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from model.architectures.registry import build_model
from model.config import read_config
from model.footprint import weight_bytes
from model.gguf_weights import GGUFCheckpoint
from model.rope import read_rope
from model.tensors import Tensors
from model.weight_formats.registry import open_weight_format
from scheduler.settings import SchedulerSettings
from tests.model.families.cases import BY_NAME, Case
from tests.model.families.conftest import Shelf
from tests.model.families.prompts import FEW, PROMPTS
from tests.model.gguf.writer import Kinds, all_in, convert
from tests.support.checkpoints import write_llama
from tests.support.engines import make_request, make_rig
from tests.support.planted import plant

CPU = torch.device("cpu")


def with_values(name: str, **changes: Any) -> Case:
    """A case as llama.cpp can write it: it has no place for some values of config.json."""
    case = BY_NAME[name]
    return replace(case, name=f"{name}-gguf", changes={**case.changes, **changes})


CASES = {
    case.name.removesuffix("-gguf"): case
    for case in (
        *map(
            BY_NAME.__getitem__, ("llama", "llama-biases", "llama-tied", "llama-llama3", "llama-linear", "llama-yarn")
        ),
        *map(BY_NAME.__getitem__, ("mistral", "mixtral", "qwen2", "qwen3", "qwen3-yarn", "qwen3-moe", "gemma")),
        with_values("gemma2", query_pre_attn_scalar=16),
        with_values("gemma3", query_pre_attn_scalar=16),
        BY_NAME["gemma3-linear"],
        *map(BY_NAME.__getitem__, ("phi3", "phi3-partial", "phi3-longrope", "gpt2", "starcoder2-plain", "olmo2")),
        with_values("starcoder2", sliding_window=None),
        *map(
            BY_NAME.__getitem__, ("falcon", "falcon-new", "falcon-one-norm", "phi", "gpt-neox", "gpt-neox-sequential")
        ),
    )
}
OF_40 = ("qwen3-moe",)  # experts of 40 columns, which no type but plain ones holds


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Shelf:
    return Shelf(tmp_path_factory.mktemp("gguf"))


def bits(location: Path, ranks: int = 1) -> list[object]:
    settings = SchedulerSettings()
    rig = make_rig(location, 16, 2048, settings, True, dtype="float32", backend="reference", ranks=ranks)
    rig.run({place: make_request(rig, PROMPTS[place], 8) for place in FEW})
    return [(rig.results[place].tokens, rig.logits_of(place)) for place in FEW]


def quantized(case: str) -> Kinds:
    """Types of 32 weights a block; values in another one than queries, one matrix plain."""
    if case in OF_40:
        return lambda name: Kind.F16 if "_exps" in name and "down" in name else Kind.Q5_1
    mixed = {"attn_v": Kind.Q8_0, "ffn_down": Kind.Q5_0, "ffn_up": Kind.IQ4_NL, "attn_k": Kind.BF16}
    return lambda name: next((kind for part, kind in mixed.items() if part in name), Kind.Q4_1)


@pytest.mark.parametrize("kinds", ["F32", "mixed"])
@pytest.mark.parametrize("case", CASES)
def test_bits_are_those_of_the_plain_weights(case: str, kinds: str, shelf: Shelf, tmp_path: Path) -> None:
    """Names, orders of rows, offsets of norms, and all that config.json says."""
    path = tmp_path / "model.gguf"
    plain = convert(shelf.checkpoint(CASES[case]), path, all_in(Kind.F32) if kinds == "F32" else quantized(case))
    assert bits(path) == bits(plain)


def test_super_blocks_and_several_types_in_one_product(tmp_path: Path) -> None:
    """As Q4_K_M, Q2_K and IQ4_XS files have them; in one rank and in two."""
    source = write_llama(tmp_path / "source", hidden_size=512, intermediate_size=1024, num_hidden_layers=2)
    types = {
        "attn_q": Kind.Q4_K, "attn_k": Kind.Q2_K, "attn_v": Kind.Q6_K, "ffn_gate": Kind.Q3_K, "ffn_up": Kind.Q5_K,
        "token_embd": Kind.Q6_K,
    }  # fmt: skip
    path = tmp_path / "model.gguf"
    plain = convert(source, path, lambda name: next((k for part, k in types.items() if part in name), Kind.IQ4_XS))
    assert bits(path) == bits(plain)
    assert bits(path, ranks=2) == bits(plain, ranks=2)


@pytest.mark.parametrize("parts", [1, 7, 100])
def test_a_model_in_several_files(parts: int, tmp_path: Path) -> None:
    source, path = write_llama(tmp_path / "source"), tmp_path / "model.gguf"
    plain = convert(source, path, all_in(Kind.Q8_0), parts=parts)
    first = path if path.exists() else next(tmp_path.glob("model-00001-of-*.gguf"))
    assert len(list(tmp_path.glob("*.gguf"))) == max(1, -(-30 // parts))
    assert bits(first) == bits(plain)


@pytest.mark.parametrize("case", ["llama", "falcon-new", "gemma2"])
def test_a_change_that_is_not_undone_is_seen(
    case: str, shelf: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows in pairs, queries apart from keys, norms plus 1."""
    path = tmp_path / "model.gguf"
    plain = convert(shelf.checkpoint(CASES[case]), path, all_in(Kind.F32))
    plant(monkeypatch, GGUFCheckpoint, "_changed", lambda _: lambda self, one, tensor: tensor)
    assert bits(path) != bits(plain)


@pytest.mark.parametrize("case", ["llama", "qwen3-moe", "phi3", "gpt2"])
def test_the_estimate_is_what_is_held(case: str, shelf: Shelf, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    plain = convert(shelf.checkpoint(CASES[case]), path, quantized(case))
    config = read_config(path)
    tensors = Tensors(GGUFCheckpoint(path, config), torch.float32, CPU, open_weight_format(config))
    build_model(config, tensors)
    assert tensors.held.bytes == weight_bytes(config, "float32") < weight_bytes(read_config(plain), "float32")


def test_the_output_layer_sets_no_blocks_of_inputs(tmp_path: Path) -> None:
    """Files in Q4_0 have it in Q6_K."""
    source = write_llama(tmp_path / "source", hidden_size=256, intermediate_size=96)
    convert(source, tmp_path / "m.gguf", lambda name: Kind.Q6_K if name in ("output", "token_embd") else Kind.Q4_0)
    assert open_weight_format(read_config(tmp_path / "m.gguf")).blocks == (1, 32)


def test_factors_of_frequencies_are_llamas_rule(shelf: Shelf, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    convert(shelf.checkpoint(CASES["llama-llama3"]), path, all_in(Kind.F32))
    ours, theirs = (read_config(place) for place in (path, shelf.checkpoint(CASES["llama-llama3"])))
    rules = [read_rope(config.fields, config.head_dim) for config in (ours, theirs)]
    torch.testing.assert_close(*rules, rtol=1e-6, atol=0)


def test_dtype_is_that_of_the_weights(shelf: Shelf, tmp_path: Path) -> None:
    said = {}
    for kind in (Kind.F32, Kind.F16, Kind.BF16, Kind.Q4_0):
        path = tmp_path / f"{kind.name}.gguf"
        convert(shelf.checkpoint(CASES["llama"]), path, all_in(kind))
        said[kind.name] = (read_config(path).dtype, read_config(path).stored_format)
    assert said == {
        "F32": ("float32", ""), "F16": ("float16", ""), "BF16": ("bfloat16", ""), "Q4_0": ("bfloat16", "gguf")
    }  # fmt: skip
