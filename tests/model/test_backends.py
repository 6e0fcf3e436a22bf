"""The choice of the code that computes a model, and the reason against the other."""

import logging
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import GPT2Config, MixtralConfig, Olmo2Config, OPTConfig, PhiConfig, Qwen3MoeConfig

from cache_manager.layout import KVLayout
from model.backend import Backend
from model.backends import choose_backend
from model.config import ModelConfig, read_config
from model.cpu.attention_backend import CpuAttention
from model.cpu.decoder import CompiledDecoder
from model.decoder import Decoder
from model.forward import ForwardBatch
from model.gpu.backend import TritonBackend
from model.gpu.states import why_not as why_no_states
from model.loading import LoadedModel, load
from model.parallel.collective import Ranks
from model.parallel.shard import Shard
from model.reference.attention_backend import ReferenceAttention
from model.reference.backend import TorchBackend
from model.settings import ModelSettings
from scheduler.settings import RequestLimits
from tests.model.families import checkpoints
from tests.model.families.cases import BY_NAME
from tests.support.checkpoints import write, write_llama


def loaded(directory: Path, **settings: object) -> LoadedModel:
    settings = {"kv_cache_memory": 2**20} | settings
    return load(directory, ModelSettings(str(directory), **settings), 4, 512, RequestLimits())  # type: ignore[arg-type]


def test_kernels_where_they_can(tiny: Path) -> None:
    for backend, model, attention in (
        ("auto", CompiledDecoder, CpuAttention),
        ("cpu", CompiledDecoder, CpuAttention),
        ("reference", Decoder, ReferenceAttention),
    ):
        runner = loaded(tiny, backend=backend).runner
        assert type(runner.model) is model
        assert type(runner.attention) is attention
    assert loaded(tiny).numerics != loaded(tiny, backend="reference").numerics


REASONS = [
    ({"kv_cache_dtype": "bfloat16"}, "there are none for a KV cache in bfloat16 beside weights in float32"),
    ({"dtype": "float16"}, "there are none for float16"),
]


@pytest.mark.parametrize(("settings", "reason"), REASONS)
def test_why_not(tiny: Path, caplog: pytest.LogCaptureFixture, settings: dict[str, str], reason: str) -> None:
    with caplog.at_level(logging.INFO):
        assert type(loaded(tiny, **settings).runner.attention) is ReferenceAttention
    assert f"The CPU's kernels are not used: {reason}" in caplog.text
    with pytest.raises(ValueError, match=f"--backend is 'cpu': {reason}"):
        loaded(tiny, backend="cpu", **settings)


@pytest.mark.parametrize("kv", ["int8", "fp8"])
def test_kv_in_8_bits_runs_on_kernels(tiny: Path, kv: str) -> None:
    assert type(loaded(tiny, backend="cpu", kv_cache_dtype=kv).runner.attention) is CpuAttention


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_in_8_bits_run_on_kernels(tiny: Path, dtype: str) -> None:
    runner = loaded(tiny, backend="cpu", quantization="int8", dtype=dtype).runner
    assert type(runner.model) is CompiledDecoder


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        (Olmo2Config, {}),
        (OPTConfig, {"ffn_dim": 96, "word_embed_proj_dim": 32}),
        (OPTConfig, {"ffn_dim": 96, "word_embed_proj_dim": 32, "do_layer_norm_before": False}),
        (OPTConfig, {"ffn_dim": 96, "do_layer_norm_before": False}),
        (PhiConfig, {"qk_layernorm": True}),
        (GPT2Config, {"n_inner": 101}),
        (MixtralConfig, {"num_local_experts": 4}),
        (Qwen3MoeConfig, {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "head_dim": 16}),
    ],
)
def test_models_that_run_on_kernels(tmp_path: Path, kind: type, changes: dict[str, object]) -> None:
    assert type(loaded(write(kind, tmp_path, **changes), backend="cpu").runner.model) is CompiledDecoder


def test_models_that_kernels_do_not_know_are_found_out_before_their_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    narrow = write_llama(tmp_path / "narrow", num_attention_heads=8)
    uneven = write_llama(tmp_path / "uneven", hidden_size=72, head_dim=16)
    odd = write_llama(tmp_path / "odd", intermediate_size=99, dtype="bfloat16")
    monkeypatch.setattr("model.loading._load_weights", lambda *_: pytest.fail("weights were read"))
    for directory, reason in (
        (narrow, "a head has 8 elements, no multiple of 16"),
        (uneven, "the hidden size is 72, no multiple of 16"),
        (odd, "99 inputs of a product are no multiple of 2"),
    ):
        with pytest.raises(ValueError, match=reason):
            loaded(directory, backend="cpu")


def test_kernels_for_gpus_need_one(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="--backend is 'triton': there is no CUDA device"):
        loaded(tiny, backend="triton")
    with pytest.raises(ValueError, match="--backend is 'triton': they need --device cuda"):
        loaded(tiny, backend="triton", device="cpu")


@pytest.mark.parametrize(
    ("capability", "changes", "reason"),
    [
        ((8, 0), {}, None),
        ((9, 0), {"kv_cache_dtype": "fp8"}, None),
        ((7, 5), {}, "the device has compute capability 7.5, below 8.0"),
        ((9, 0), {"narrow": True}, "a head has 8 elements, no multiple of 16 up to 512"),
    ],
)
def test_on_a_gpu_its_kernels_where_they_can(
    tiny: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capability: tuple[int, int],
    changes: dict[str, str | bool],
    reason: str | None,
) -> None:
    """A GPU that says what it is, and nothing else."""
    monkeypatch.setattr(TritonBackend, "attention", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "a GPU")
    config = read_config(write_llama(tmp_path, num_attention_heads=8) if changes.pop("narrow", False) else tiny)

    def chosen(backend: str) -> Backend:
        settings = ModelSettings(backend=backend, **changes)  # type: ignore[arg-type]
        return choose_backend(config, settings, "float32", str(changes.get("kv_cache_dtype", "float32")), "cuda")

    assert type(chosen("reference")) is TorchBackend
    with caplog.at_level(logging.INFO):
        found = chosen("auto")
    if reason is None:
        assert type(found) is TritonBackend
        assert found.numerics != chosen("reference").numerics
        assert f"Triton's kernels on a GPU, compute capability {capability[0]}.{capability[1]}" in caplog.text
        return
    assert type(found) is TorchBackend
    assert f"The GPU's kernels are not used: {reason}" in caplog.text
    with pytest.raises(ValueError, match=f"--backend is 'triton': {reason}"):
        chosen("triton")


@pytest.mark.parametrize(
    ("dtype", "module", "reason"),
    [
        ("float32", None, "FlashInfer is given weights and KV alike in float16 or bfloat16, not float32 and float32"),
        ("bfloat16", None, "FlashInfer is given causal heads of 64, 128, 256 elements, and no layer has such"),
        ("float16", None, "FlashInfer is not installed"),
        ("float16", ModuleType("flashinfer"), "FlashInfer cannot start: AttributeError: module 'flashinfer' has no"),
    ],
)
def test_flashinfer_where_it_can(
    tiny: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    dtype: str,
    module: ModuleType | None,
    reason: str,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    if module is not None:
        module.__spec__ = ModuleSpec("flashinfer", None)
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    config = read_config(tiny if dtype == "bfloat16" else write_llama(tmp_path, head_dim=64))
    with pytest.raises(ValueError, match=f"--backend is 'flashinfer': {reason}"):
        choose_backend(config, ModelSettings(backend="flashinfer"), dtype, dtype, "cuda")
    with pytest.raises(ValueError, match="--backend is 'flashinfer': they need --device cuda"):
        loaded(tiny, backend="flashinfer", device="cpu")


def test_ranks_on_gpus_have_its_kernels_for_their_own_heads(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = list[tuple[int, int]]()

    def attention(_: TritonBackend, config: ModelConfig, layout: KVLayout, pages: int) -> None:
        prepared.append((config.heads, layout.groups[0].shape.heads))

    monkeypatch.setattr(TritonBackend, "attention", attention)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "a GPU")
    config, settings = read_config(tiny), ModelSettings(backend="triton")
    for size in (1, 2, 4):
        ranks = Ranks(Shard(size - 1, size))
        assert type(choose_backend(config, settings, "float32", "float32", "cuda", ranks)) is TritonBackend
    assert prepared == [(4, 2), (2, 1), (1, 1)]


@pytest.mark.parametrize("kind", ["qwen3.5", "kimi-linear", "granite-hybrid", "falcon-h1", "lfm2", "mamba2"])
def test_recurrent_layers_have_kernels_on_a_gpu(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TritonBackend, "attention", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "a GPU")
    config, settings = read_config(checkpoints.write(BY_NAME[kind], tmp_path)), ModelSettings(backend="triton")
    assert config.recurrent
    assert type(choose_backend(config, settings, "float32", "float32", "cuda")) is TritonBackend
    assert why_no_states([*config.recurrent, "a new one"]) == "there are none for recurrent layers of a new one"  # type: ignore[list-item]


def test_a_gpu_for_which_triton_cannot_compile_runs_torch(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def attention(*_: object) -> None:
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(TritonBackend, "attention", attention)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    with caplog.at_level(logging.INFO):
        found = choose_backend(read_config(tiny), ModelSettings(), "float32", "float32", "cuda")
    assert type(found) is TorchBackend
    reason = "Triton cannot compile them: RuntimeError: Failed to find C compiler"
    assert f"The GPU's kernels are not used: {reason}" in caplog.text
    with pytest.raises(ValueError, match=f"--backend is 'triton': {reason}"):
        choose_backend(read_config(tiny), ModelSettings(backend="triton"), "float32", "float32", "cuda")


def test_kernels_of_the_cpu_are_for_the_cpu(tiny: Path) -> None:
    with pytest.raises(ValueError, match="--backend is 'cpu': the device is cuda"):
        choose_backend(read_config(tiny), ModelSettings(backend="cpu"), "float32", "float32", "cuda")


def test_without_a_gpu_its_kernels_are_not_imported(tiny: Path) -> None:
    """Nor is Triton when an engine's code is; torch imports it on its own account, when it loads its own compiler."""
    program = f"""
import sys
from rpc.offline import LLM
print("triton" in sys.modules)
with LLM({str(tiny)!r}, kv_cache_memory=2**20, device="cpu"):
    print([name for name in sys.modules if name.startswith("model.gpu") or name == "model.gpu.attention_backend"])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout == "False\n[]\n", done.stderr


def test_without_a_compiler_torch_computes(tiny: Path) -> None:
    """In a process that cannot import llvmlite."""
    program = f"""
import logging, sys
sys.modules["llvmlite"] = None
logging.basicConfig(level=logging.INFO)
from rpc.offline import LLM
from scheduler.parameters import Sampling, Stopping
with LLM({str(tiny)!r}, kv_cache_memory=2**20) as llm:
    (answer,) = llm.generate([[5, 6, 7]], Sampling(temperature=0.0), Stopping(max_tokens=4, ignore_eos=True))
    print(len(answer.token_ids))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert "The CPU's kernels are not used: llvmlite is not installed" in done.stderr, done.stderr
    assert done.stdout == "4\n"


def test_a_compiled_decoder_has_the_attention_that_it_needs(tiny: Path) -> None:
    one, other = loaded(tiny), loaded(tiny, backend="reference")
    zero = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(TypeError, match="runs over the CPU's attention, not over reference"):
        one.runner.model.forward(ForwardBatch(zero, zero[None], zero, other.runner.attention, None))
