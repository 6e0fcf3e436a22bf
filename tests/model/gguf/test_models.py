"""A GGUF file alone computes, bit for bit, what a checkpoint with the plain weights computes that it stands for."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFValueType, GGUFWriter
from gguf.gguf_writer import GGUFValue

from model.architectures.registry import build_model
from model.config import read_config
from model.errors import CheckpointError
from model.footprint import weight_bytes
from model.gguf.split import open_model
from model.gguf_weights import GGUFCheckpoint
from model.rope import read_rope
from model.tensors import Tensors
from model.weight_formats.registry import open_weight_format
from model.weight_formats.tiles import HeadTiles
from scheduler.settings import SchedulerSettings
from tests.model.families.cases import BY_NAME, Case
from tests.model.families.conftest import Shelf
from tests.model.families.prompts import FEW, PROMPTS
from tests.model.gguf.apart import APART
from tests.model.gguf.kinds import Kinds, all_in
from tests.model.gguf.writer import Conversion, convert
from tests.support.checkpoints import write_llama
from tests.support.engines import make_request, make_rig
from tests.support.marks import few
from tests.support.planted import plant

CPU = torch.device("cpu")


def with_values(name: str, **changes: Any) -> Case:
    """A case as llama.cpp can write it: it has no place for some values of config.json."""
    case = BY_NAME[name]
    return replace(case, name=f"{name}-gguf", changes={**case.changes, **changes})


OSS_YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64,
    "beta_fast": 4.0, "beta_slow": 0.25, "truncate": False,
}  # fmt: skip
LLAMA4 = {"attention_chunk_size": 8192, "floor_scale": 8192, "attn_scale": 0.1}
PHI_ROPE = dict(BY_NAME["phimoe"].changes)["rope_parameters"] | dict.fromkeys(
    ("short_mscale", "long_mscale"), 1.243163121016122
)
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
        with_values("gemma4", hidden_size_per_layer_input=32),
        with_values("gemma4-moe", moe_intermediate_size=64),
        *map(BY_NAME.__getitem__, ("phi3", "phi3-partial", "phi3-longrope", "gpt2", "starcoder2-plain", "olmo2")),
        with_values("starcoder2", sliding_window=None),
        *map(
            BY_NAME.__getitem__, ("falcon", "falcon-new", "falcon-one-norm", "phi", "gpt-neox", "gpt-neox-sequential")
        ),
        *map(
            BY_NAME.__getitem__,
            ("smollm3", "seed-oss", "granite", "ernie4.5", "cohere", "cohere2"),
        ),
        *map(BY_NAME.__getitem__, ("stablelm", "glm4", "glm4-whole", "exaone4", "exaone4-full", "hunyuan")),
        with_values("cohere-qk-norm", tie_word_embeddings=True),
        with_values("deepseek-v2", q_lora_rank=32),
        with_values("deepseek-v3", q_lora_rank=32),
        with_values("qwen2-moe", norm_topk_prob=False),
        *map(BY_NAME.__getitem__, ("granite-moe", "granite-moe-biases")),
        with_values("phimoe", router_jitter_noise=0.01, rope_parameters=PHI_ROPE),
        with_values("phimoe-window", router_jitter_noise=0.01),
        with_values("ernie4.5-moe", moe_layer_end_index=-1, moe_norm_min=1e-12),
        *map(BY_NAME.__getitem__, ("ernie4.5-moe-biases", "ernie4.5-moe-unshared", "minimax-m2", "minimax-m2-wide")),
        *map(BY_NAME.__getitem__, ("glm4-moe", "glm4-moe-plain")),
        with_values("qwen3.5", linear_value_head_dim=128, linear_num_value_heads=6),
        with_values("qwen3.5-wide", linear_value_head_dim=32, attention_bias=False),
        with_values("qwen3.5-moe", linear_value_head_dim=128),
        with_values("qwen3-next", norm_topk_prob=True, mlp_only_layers=[]),
        *map(BY_NAME.__getitem__, ("granite-hybrid", "granite-hybrid-dense", "lfm2", "lfm2-biases")),
        with_values("lfm2-moe", routed_scaling_factor=1.0),
        *map(BY_NAME.__getitem__, ("mamba2", "mamba2-biases", "nemotron-h")),
        with_values("nemotron-h-moe", n_group=1, topk_group=1),
        with_values("falcon-h1", mamba_norm_before_gate=False),
        BY_NAME["falcon-h1-gated"],
        with_values("falcon-h1-normed", mamba_norm_before_gate=False),
        with_values("kimi-linear", q_lora_rank=32, linear_head_dim=32),
        with_values(
            "kimi-linear-plain", linear_num_heads=4, norm_topk_prob=True, mlp_layer_types=["dense", "sparse", "sparse"]
        ),
        with_values("llama4", **LLAMA4),
        with_values(
            "llama4-dense",
            **LLAMA4,
            intermediate_size_mlp=128,
            use_qk_norm=True,
            attn_temperature_tuning=True,
            no_rope_layers=[1] * 3 + [0],
        ),
        *map(BY_NAME.__getitem__, ("bloom", "mpt")),
        with_values("gpt-oss", swiglu_limit=7.0, rope_parameters=OSS_YARN),
        with_values(
            "gpt-oss-limit",
            swiglu_limit=7.0,
            layer_types=["sliding_attention", "full_attention"] * 2,
            num_hidden_layers=4,
        ),
    )
}
OF_40 = (
    "qwen3-moe", "qwen2-moe", "deepseek-v2", "deepseek-v3", "ernie4.5-moe", "ernie4.5-moe-biases",
    "ernie4.5-moe-unshared", "qwen3-next", "glm4-moe", "glm4-moe-plain", "lfm2-moe",
    "granite-hybrid", "nemotron-h-moe", "kimi-linear", "kimi-linear-plain",
)  # fmt: skip
"""Their experts have 40 or 48 columns, which no type but plain ones holds."""


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
        return lambda name: Kind.F16 if "exp" in name and "down" in name else Kind.Q5_1
    if "gpt-oss" in case:  # as it is published
        return lambda name: Kind.MXFP4 if "exps" in name else Kind.Q8_0 if "attn" in name else Kind.BF16
    if case.startswith("qwen3.5"):  # blocks of two heads
        out = {"qwen3.5": Kind.Q4_K, "qwen3.5-wide": Kind.Q8_0, "qwen3.5-moe": Kind.Q6_K}[case]
        return lambda name: out if "ssm_out" in name else Kind.F16 if "exp" in name else Kind.Q5_1
    mixed = {"attn_v": Kind.Q8_0, "ffn_down": Kind.Q5_0, "ffn_up": Kind.IQ4_NL, "attn_k": Kind.BF16}
    return lambda name: next((kind for part, kind in mixed.items() if part in name), Kind.Q4_1)


@few("kinds", ["F32", "mixed"], ["mixed"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.sample(2)
def test_bits_are_those_of_the_plain_weights(case: str, kinds: str, shelf: Shelf, tmp_path: Path) -> None:
    """Names, orders of rows, offsets of norms, and all that config.json says."""
    path = tmp_path / "model.gguf"
    plain = convert(shelf.checkpoint(CASES[case]), path, all_in(Kind.F32) if kinds == "F32" else quantized(case))
    assert bits(path) == bits(plain)


@few(
    "case",
    [
        "granite-hybrid",
        "nemotron-h-moe",
        "lfm2-moe",
        "mamba2",
        "glm4-moe",
        "minimax-m2",
        "ernie4.5-moe",
        "qwen3-next",
        "falcon-h1",
        "kimi-linear",
        "llama4",
        "bloom",
        "mpt",
    ],
    ["granite-hybrid"],
)
def test_bits_are_those_of_the_plain_weights_on_two_ranks(case: str, shelf: Shelf, tmp_path: Path) -> None:
    """In types whose blocks two ranks can divide: two models are too narrow for any."""
    path, kinds = tmp_path / "model.gguf", all_in(Kind.F16) if case in ("glm4-moe", "qwen3-next") else quantized(case)
    plain = convert(shelf.checkpoint(CASES[case]), path, kinds)
    assert bits(path, ranks=2) == bits(plain, ranks=2)


@pytest.mark.parametrize("case", ["glm4-moe", "qwen3-next", "qwen3.5"])
def test_layers_that_predict_further_tokens_are_passed_over(case: str, shelf: Shelf, tmp_path: Path) -> None:
    """As the converter writes them: layers after the last, which the count of layers has too."""
    path, made = tmp_path / "model.gguf", Conversion(shelf.checkpoint(CASES[case]), all_in(Kind.F32))
    layers, name = made.config["num_hidden_layers"], made.architecture

    def more(writer: GGUFWriter) -> None:
        writer.kv_data[0][f"{name}.block_count"] = GGUFValue(layers + 1, GGUFValueType.UINT32)
        writer.add_nextn_predict_layers(1)
        for part in ("nextn.eh_proj", "nextn.enorm", "attn_q", "post_attention_norm"):
            writer.add_tensor(f"blk.{layers}.{part}.weight", np.ones((8, 8), dtype=np.float32))

    made.write(path, more)
    assert bits(path) == bits(shelf.checkpoint(CASES[case]))


@few("case", ["qwen3-moe", "mixtral", "deepseek-v3", "kimi-linear", "gpt-oss"], ["qwen3-moe", "gpt-oss"])
@few("ranks", [1, 2], [1])
def test_gates_and_ups_of_experts_in_one_tensor(case: str, ranks: int, shelf: Shelf, tmp_path: Path) -> None:
    """As the converter writes them where it is asked to: of each expert the rows of its gate first."""
    made = Conversion(shelf.checkpoint(CASES[case]), lambda name: Kind.F16 if "down" in name else Kind.Q8_0)
    made.write(tmp_path / "apart.gguf")
    for name in [name for name in made.stored if "ffn_gate_exps" in name]:
        (gates, kind), (ups, _) = made.stored.pop(name), made.stored.pop(name.replace("gate", "up"))
        made.stored[name.replace("gate", "gate_up")] = np.concatenate((gates, ups), 1), kind
    made.write(tmp_path / "together.gguf")
    assert not any("ffn_up_exps" in name for name in open_model(tmp_path / "together.gguf").tensors)
    assert bits(tmp_path / "together.gguf", ranks) == bits(tmp_path / "apart.gguf", ranks)


def test_older_files_of_kimi_linear(shelf: Shelf, tmp_path: Path) -> None:
    """The product that expands latents is one tensor, and rates have one dimension."""
    made, path = Conversion(shelf.checkpoint(CASES["kimi-linear"]), all_in(Kind.F32)), tmp_path / "model.gguf"
    for name in [name for name in made.stored if name.endswith("ssm_a")]:
        made.stored[name] = made.stored[name][0].flatten(), Kind.F32
    for name in [name for name in made.stored if "attn_k_b" in name]:
        keys, values = (made.stored.pop(one)[0] for one in (name, name.replace("k_b", "v_b")))
        whole = np.concatenate((keys.swapaxes(1, 2), values), 1).reshape(-1, values.shape[2])
        made.stored[name.replace("attn_k_b", "attn_kv_b")] = whole, Kind.F32
    made.write(path)
    assert bits(path) == bits(shelf.checkpoint(CASES["kimi-linear"]))


def test_older_files_of_qwen3_next(shelf: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have projections by key head, and an interval for the layers of attention."""
    monkeypatch.setitem(APART, "qwen3next", ())
    source, path = shelf.checkpoint(CASES["qwen3-next"]), tmp_path / "model.gguf"

    def more(writer: GGUFWriter) -> None:
        del writer.kv_data[0]["qwen3next.attention.recurrent_layers"]
        writer.kv_data[0]["qwen3next.full_attention_interval"] = GGUFValue(2, GGUFValueType.UINT32)

    plain = convert(source, path, all_in(Kind.F32), more=more)
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


@pytest.mark.parametrize("kinds", ["F32", "mixed"])
def test_heads_in_another_order_are_seen(
    kinds: str, shelf: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of the projections before a gated delta rule, and inputs of that after it."""
    path = tmp_path / "model.gguf"
    types = all_in(Kind.F32) if kinds == "F32" else quantized("qwen3.5")
    plain = convert(shelf.checkpoint(CASES["qwen3.5"]), path, types)
    plant(monkeypatch, HeadTiles, "together", lambda _: lambda self, tensor, dimension: tensor)
    assert bits(path) != bits(plain)


def test_groups_of_several_heads_are_refused(shelf: Shelf, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    case = replace(CASES["qwen3.5"], name="narrow", changes={**CASES["qwen3.5"].changes, "linear_value_head_dim": 16})
    convert(
        shelf.checkpoint(replace(case, changes=dict(case.changes, linear_num_value_heads=4))), path, all_in(Kind.Q8_0)
    )
    with pytest.raises(CheckpointError, match="64 inputs in groups of 32 are no 2 x 2 heads of 16"):
        bits(path)


def test_the_kernels_have_blocks_of_two_heads(shelf: Shelf, tmp_path: Path) -> None:
    """Qwen 3.5's value heads are put in another order, in blocks too."""
    path, found = tmp_path / "model.gguf", []
    convert(shelf.checkpoint(CASES["qwen3.5"]), path, quantized("qwen3.5"))
    for backend in ("cpu", "reference"):
        rig = make_rig(path, 16, 2048, SchedulerSettings(), True, dtype="float32", backend=backend)
        rig.run({place: make_request(rig, PROMPTS[place], 4) for place in FEW[:3]})
        found.append(np.stack([rig.logits[place, position] for place in FEW[:3] for position in range(4)]))
    np.testing.assert_allclose(*found, atol=2e-3)


@pytest.mark.parametrize("kind", [Kind.Q3_K, Kind.Q4_K], ids=lambda kind: kind.name)
def test_k_types_run_on_the_kernels(kind: Kind, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    source = write_llama(tmp_path / "source", hidden_size=256, intermediate_size=512, num_hidden_layers=1)
    convert(source, path, all_in(kind))
    found = []
    for backend in ("cpu", "reference"):
        rig = make_rig(path, 16, 2048, SchedulerSettings(), True, dtype="float32", backend=backend)
        rig.run({place: make_request(rig, PROMPTS[place], 4) for place in FEW[:3]})
        found.append(np.stack([rig.logits[place, position] for place in FEW[:3] for position in range(4)]))
    np.testing.assert_allclose(*found, atol=2e-4)


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


@pytest.mark.parametrize(
    "case",
    ["llama", "qwen3-moe", "phi3", "gpt2", "gpt-oss", "qwen3-next", "qwen3.5", "kimi-linear", "falcon-h1", "llama4"],
)
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
    convert(
        source,
        tmp_path / "m.gguf",
        lambda name: Kind.Q6_K if name in ("output.weight", "token_embd.weight") else Kind.Q4_0,
    )
    assert open_weight_format(read_config(tmp_path / "m.gguf")).blocks == (1, 32)


def test_factors_of_frequencies_are_llamas_rule(shelf: Shelf, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    convert(shelf.checkpoint(CASES["llama-llama3"]), path, all_in(Kind.F32))
    ours, theirs = (read_config(place) for place in (path, shelf.checkpoint(CASES["llama-llama3"])))
    rules = [read_rope(config.fields, config.head_dim) for config in (ours, theirs)]
    torch.testing.assert_close(*rules, rtol=1e-6, atol=0)


@pytest.mark.parametrize("case", ["llama", "mpt", "gpt2"])
def test_dtype_is_that_of_the_weights(case: str, shelf: Shelf, tmp_path: Path) -> None:
    said = {}
    for kind in (Kind.F32, Kind.F16, Kind.BF16, Kind.Q4_0):
        path = tmp_path / f"{kind.name}.gguf"
        convert(shelf.checkpoint(CASES[case]), path, all_in(kind))
        said[kind.name] = (read_config(path).dtype, read_config(path).stored_format)
    assert said == {
        "F32": ("float32", ""), "F16": ("float16", ""), "BF16": ("bfloat16", ""), "Q4_0": ("bfloat16", "gguf")
    }  # fmt: skip
