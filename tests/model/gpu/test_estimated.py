"""What a model takes on a GPU is known without one."""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from model.architectures.registry import load_model
from model.backend import NoKernels, StepSizes
from model.config import ModelConfig, read_config
from model.footprint import weight_bytes
from model.gguf_weights import open_checkpoint
from model.gpu.attention_backend import TritonAttention
from model.gpu.backend import TritonBackend, why_no_kernels
from model.gpu.estimated import BLOCK, HOST, META, AllocationCounter, CountedMemory, estimate_device
from model.gpu.graphs import graph_tokens
from model.gpu.parts import with_kernels
from model.gpu.unlaunched import unlaunched
from model.gpu.working_memory import WorkingMemory, measure_steps
from model.parallel.collective import ONE_RANK
from model.settings import ModelSettings
from model.weight_formats.scratch import Scratch
from rpc.cli.main import app
from rpc.paths import model_directory
from tests.model.families import checkpoints
from tests.model.families.cases import BY_NAME, CASES, Case
from tests.support.marks import few

MIB = 2**20
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128_256, "max_position_embeddings": 131_072,
    "torch_dtype": "bfloat16",
}  # fmt: skip
QWEN3_06B = {
    "architectures": ["Qwen3ForCausalLM"], "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936,
    "max_position_embeddings": 40_960, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
}  # fmt: skip


def written(directory: Path, values: dict[str, object]) -> Path:
    (directory / "config.json").write_text(json.dumps(values))
    return directory


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["estimate", *arguments], env={"COLUMNS": "100"})


def estimated(directory: Path, *arguments: str) -> dict[str, int]:
    done = run("--model", str(directory), "--json", *arguments)
    assert done.exit_code == 0, done.output
    values: dict[str, int] = json.loads(done.stdout)
    return values


def test_tensors_count_from_their_making_to_their_end() -> None:
    def work() -> None:
        a = torch.empty(MIB, dtype=torch.uint8, device=META)
        kept = a.view(-1)[:10]  # has the same memory
        b = a + 1
        del a, b
        c = torch.empty(3 * MIB, dtype=torch.uint8)  # on another device
        del kept
        d = torch.empty(MIB, dtype=torch.uint8, device=META)
        assert len(c) > len(d)

    assert CountedMemory().peak_of(work) == 4 * MIB
    old = torch.empty(MIB, dtype=torch.uint8, device=META)
    assert CountedMemory().peak_of(lambda: old.view(-1)[10:]) == 0, "its memory was there before"
    assert CountedMemory().peak_of(lambda: torch.empty(1, device=META)) == BLOCK
    assert CountedMemory().peak_of(lambda: None) == 0


def test_an_h200_measured_what_is_estimated(tmp_path: Path) -> None:
    """Qwen3-0.6B in steps of 8,192 tokens. Measured in GiB: weights 1.1, step 0.5, graphs 0.6; 121 were left."""
    found = estimated(written(tmp_path, QWEN3_06B), "--gpu-memory", "139.8GiB")
    measured = {"weight_bytes": 1.1, "step_bytes": 0.5, "graph_bytes": 0.6}
    assert {name: round(found[name] / 2**30, 1) for name in measured} == measured
    angles = 2 * 40_960 * 64 * 2  # sines and cosines
    weights = weight_bytes(read_config(tmp_path), "bfloat16", packs=False)
    assert found["weight_bytes"] == pytest.approx(weights + angles, abs=MIB)
    assert found["step_tokens"] == 8192
    assert found["memory_bytes"] / 2**30 == pytest.approx(121, rel=0.01)


def test_an_8b_model_fits_a_gpu_of_24_gb(tmp_path: Path) -> None:
    found = estimated(written(tmp_path, LLAMA_8B), "--gpu-memory", "24GB")
    parts = ("context", "weight", "step", "graph", "sampler", "image", "memory")
    assert found["usable_bytes"] == pytest.approx(sum(found[f"{part}_bytes"] for part in parts), abs=1)
    assert found["weight_bytes"] / 2**30 == pytest.approx(15.0, abs=0.05)
    assert found["memory_bytes"] > 2 * 2**30
    assert found["tokens"] == found["pages"] * 16 > 20_000
    smaller = estimated(tmp_path, "--gpu-memory", "24GB", "--max-sequences", "64", "--max-batched-tokens", "512")
    assert smaller["memory_bytes"] > found["memory_bytes"] + 700 * MIB


def test_a_file_may_have_flags_of_other_commands(tmp_path: Path) -> None:
    settings = tmp_path / "quire.toml"
    settings.write_text("max-sequences = 64\ntensor-parallel = 2\nkv-cache-memory = 1000000000\n")
    here = estimated(written(tmp_path, LLAMA_8B), "--config", str(settings))
    assert here["memory_bytes"] == 1_000_000_000
    assert here["bytes_a_token"] == 131_072
    there = estimated(tmp_path, "--config", str(settings), "--gpu-memory", "24GB")
    assert there["memory_bytes"] > 2 * 2**30
    assert there["bytes_a_token"] == 65_536


def test_flashinfer_has_room_of_its_own(tmp_path: Path) -> None:
    without = estimated(written(tmp_path, LLAMA_8B), "--gpu-memory", "24GB")
    found = estimated(tmp_path, "--gpu-memory", "24GB", "--backend", "flashinfer")
    room = (128 + 8) * MIB + 128 * 1024
    assert found["weight_bytes"] == without["weight_bytes"] + room
    assert found["memory_bytes"] == without["memory_bytes"] - room


def test_each_rank_has_a_part(tmp_path: Path) -> None:
    one = estimated(written(tmp_path, LLAMA_8B), "--gpu-memory", "80GB")
    half = estimated(tmp_path, "--gpu-memory", "80GB", "--tensor-parallel", "2")
    table = 128_256 * 4096 * 2  # each rank has all embeddings
    assert half["weight_bytes"] - table == pytest.approx((one["weight_bytes"] - table) / 2, rel=0.01)
    assert half["bytes_a_token"] == one["bytes_a_token"] / 2
    assert 0 < half["graph_bytes"] <= one["graph_bytes"]


QUICK = ("llama", "gemma2", "gemma4", "mixtral", "qwen3.5", "mamba2", "deepseek-v3", "gpt-oss")


def sizes(config: ModelConfig) -> StepSizes:
    return StepSizes(40, config.context, 256)  # more tokens than products in few bits take at once


@few("case", CASES, QUICK)
def test_models_of_all_families_are_estimated(case: Case, tmp_path: Path) -> None:
    config = read_config(checkpoints.write(case, tmp_path))
    for quantization in (None, "int8", "int4"):
        settings = ModelSettings(dtype="bfloat16", quantization=quantization)
        if why_no_kernels(config, config.kv_layout(16, "bfloat16")):
            with pytest.raises(NoKernels):
                estimate_device(config, settings, sizes(config))
            return
        found = estimate_device(config, settings, sizes(config))
        assert found.weights >= weight_bytes(config, "bfloat16", quantization, packs=False)
        assert found.working.sampler > 0


MIXTRAL = LLAMA_8B | {
    "architectures": ["MixtralForCausalLM"], "num_hidden_layers": 2, "num_local_experts": 8, "num_experts_per_tok": 2,
    "vocab_size": 32_000,
}  # fmt: skip


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_all_experts_of_a_mixture_count(quantization: str | None, tmp_path: Path) -> None:
    config = read_config(written(tmp_path, MIXTRAL))
    settings = ModelSettings(quantization=quantization)
    found = estimate_device(config, settings, StepSizes(40, config.context, 2048)).weights
    angles = 2 * 131_072 * 64 * 2
    room = 0 if quantization is None else 64 * MIB
    stored = weight_bytes(config, "bfloat16", quantization, packs=False)
    assert stored + angles <= found <= stored + angles + room + MIB


QUANTIZED = {
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True},
    "gptq in another order": {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True, "sym": True},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"},
    "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
}


@pytest.mark.parametrize("kind", QUANTIZED)
def test_quantized_checkpoints_are_estimated(kind: str, tmp_path: Path) -> None:
    values = LLAMA_8B | {"num_hidden_layers": 2, "torch_dtype": "float16", "quantization_config": QUANTIZED[kind]}
    config = read_config(written(tmp_path, values))
    found = estimate_device(config, ModelSettings(), StepSizes(40, config.context, 2048))
    stored = weight_bytes(config, "float16", packs=False)
    assert stored < found.weights < stored + 200 * MIB, "with angles and room to unpack in"
    plain = read_config(written(tmp_path, {**values, "quantization_config": None}))
    assert found.weights < estimate_device(plain, ModelSettings(), StepSizes(40, config.context, 2048)).weights


class Allocated:
    """Memory of tensors with numbers, which no kernel reads or writes."""

    def peak_of(self, work: Callable[[], object]) -> int:
        with unlaunched(), AllocationCounter() as counter:
            work()
        return counter.peak


@few("case", CASES, QUICK)
def test_steps_take_the_same_with_numbers(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = read_config(checkpoints.write(case, tmp_path))
    layout, most = config.kv_layout(16, "float32"), sizes(config)
    if why_no_kernels(config, layout):
        return
    monkeypatch.setattr("model.gpu.attention_backend.PARTS_BYTES", 2**16)  # else they hide all the rest
    monkeypatch.setattr("model.layers.onednn_multiplies", lambda _: False)  # weights as a GPU has them

    def attention() -> TritonAttention:
        return TritonAttention(layout, 1, config.heads, "float32", HOST, "float32", config.scale, config.soft_cap)

    for quantization in (None, "int8"):
        maker = TritonBackend("float32", "float32", HOST, Scratch(torch.float32, HOST)).maker
        checkpoint = open_checkpoint(tmp_path, config, False, None)
        decoder = with_kernels(load_model(config, checkpoint, torch.float32, HOST, quantization, maker, ONE_RANK))
        with torch.inference_mode():
            recorded = graph_tokens(decoder, layout, most)
            real = measure_steps(decoder, attention, layout, config.rotary_axes, Allocated(), most, recorded)
        settings = ModelSettings(dtype="float32", quantization=quantization)
        found = estimate_device(config, settings, most).working
        assert found.sampler == real.sampler
        # A device has its own copy of positions, which lie on the host already here.
        copied = 8 * most.tokens * (1 + config.rotary_axes)
        assert real.step <= found.step <= real.step + copied, quantization
        assert real.graphs <= found.graphs <= real.graphs + copied, quantization


def test_what_has_no_kernels_is_named(tmp_path: Path) -> None:
    directory = checkpoints.write(BY_NAME["bloom"], tmp_path)
    config = read_config(directory)
    with pytest.raises(NoKernels, match="a bias by distance"):
        estimate_device(config, ModelSettings(), sizes(config))
    done = run("--model", str(directory), "--gpu-memory", "24GB")
    assert (done.exit_code, done.stderr) == (
        1,
        "quire: --gpu-memory: Quire's kernels for a GPU cannot run the model: scores have a bias by distance (ALiBi)\n",
    )


def test_what_cannot_be_run_without_numbers_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(*_: object) -> WorkingMemory:
        raise RuntimeError("no numbers")

    monkeypatch.setattr("model.gpu.estimated.measure_steps", measure)
    done = run("--model", str(written(tmp_path, QWEN3_06B)), "--gpu-memory", "24GB")
    assert (done.exit_code, done.stderr) == (
        1,
        "quire: its steps cannot be run without numbers: RuntimeError('no numbers')\n",
    )


def test_a_machine_without_triton_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "model.gpu.estimated")
    monkeypatch.setitem(sys.modules, "triton", None)
    for name in [name for name in sys.modules if name.startswith("model.gpu.")]:
        monkeypatch.delitem(sys.modules, name)
    done = run("--model", "demo", "--gpu-memory", "24GB")
    assert (done.exit_code, done.stderr) == (
        1,
        "quire: --gpu-memory needs Quire's kernels for a GPU: triton is not installed\n",
    )


def test_the_command_line_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_GPU_MEMORY", "24GB")
    monkeypatch.setenv("QUIRE_GPU_MEMORY_UTILIZATION", "0.5")
    there = estimated(written(tmp_path, QWEN3_06B))
    assert there["usable_bytes"] == 12 * 2**30
    assert "usable_bytes" not in estimated(tmp_path, "--kv-cache-memory", "1GB")
    monkeypatch.delenv("QUIRE_GPU_MEMORY")
    monkeypatch.setenv("QUIRE_GPU_MEMORY_UTILIZATION", "2")
    assert "usable_bytes" not in estimated(tmp_path)


@pytest.mark.parametrize(("dtype", "copied"), [("float32", True), ("bfloat16", True), ("float16", False)])
def test_a_tied_output_layer_is_copied_where_a_cpu_has_kernels(dtype: str, copied: bool) -> None:
    found = estimated(Path("demo"), "--dtype", dtype)["weight_bytes"]
    config = read_config(model_directory("demo"))
    assert found == weight_bytes(config, dtype, packs=copied)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--gpu-memory", "8GB"), "mostly weights, and its steps take .* nothing is left for KV"),
        (("--gpu-memory", "24GB", "--tensor-parallel", "3"), "--tensor-parallel is 3: the model has 32 heads"),
        (("--gpu-memory", "24GB", "--kv-cache-memory", "1GB"), "it takes no --kv-cache-memory"),
        (("--gpu-memory", "0"), "--gpu-memory is 0 bytes, must be at least 1"),
        (("--gpu-memory", "24GB", "--max-sequences", "0"), "--max-sequences is 0, must be in"),
        (
            ("--gpu-memory", "24GB", "--backend", "cpu"),
            "--backend is 'cpu': with --gpu-memory it must be one of auto, ",
        ),
        (
            ("--gpu-memory", "24GB", "--backend", "flashinfer", "--dtype", "float32"),
            "alike in float16 or bfloat16, not f",
        ),
        (("--backend", "triton"), "--backend is of a GPU: it needs --gpu-memory"),
        (("--max-batched-tokens", "64"), "--max-batched-tokens is of a GPU: it needs --gpu-memory"),
        (("--tensor-parallel", "2"), "--tensor-parallel is of a GPU: it needs --gpu-memory"),
    ],
)
def test_wrong_arguments_are_named(arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    done = run("--model", str(written(tmp_path, LLAMA_8B)), *arguments)
    assert done.exit_code == 1
    assert done.stderr.startswith("quire: ")
    (said,) = done.stderr.splitlines()
    assert re.search(message, said), said
