"""A model that runs on the kernels, through the scheduler, beside one on the reference."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cache_manager.layout import KVLayout
from model import loading, logit_parts
from model.architectures.registry import load_model
from model.backend import StepSizes
from model.config import ModelConfig
from model.decoder import Decoder
from model.forward import Model
from model.gpu.attention_backend import TritonAttention
from model.gpu.backend import TritonBackend
from model.gpu.draws import GpuOps, start_draws
from model.gpu.graphs import CudaRecorder, GraphDecoder, Recorder, Work, why_not
from model.gpu.parts import with_kernels
from model.gpu.tuning import TileSizes, Tuning
from model.logit_parts import LOGIT_BYTES
from model.reference.backend import TorchBackend
from model.weight_formats.scratch import Scratch
from scheduler.settings import SchedulerSettings
from tests.model.families import checkpoints
from tests.model.families.cases import BY_NAME
from tests.model.gpu.kernels.device import DEVICE, INTERPRETED, compute_in
from tests.model.test_parity import ENDLESS, random_prompts
from tests.model.test_prompt_logprobs import Told, asking
from tests.model.test_prompt_logprobs import run as logprobs
from tests.support.checkpoints import write_ministral
from tests.support.engines import Rig, make_request, make_rig

NEW = 5
SMALL = Tuning(few=TileSizes(16, 16, 16, 4, 2), many=TileSizes(16, 16, 32, 4, 2), shared=TileSizes(32, 16, 16, 4, 2))
REPLAYED: list[int] = []


def run(directory: Path, page_size: int, quantization: str | None, pages: int = 80) -> Rig:
    """Few pages, so that one sequence is preempted; freed ones are filled with NaN."""
    scheduling = SchedulerSettings(max_sequences=3, max_batched_tokens=32, prefill_chunk=13, steps_in_flight=2)
    rig = make_rig(
        directory, page_size, pages, scheduling, record_logits=True, poison=True, queue=ENDLESS,
        backend="reference", device=DEVICE.type, quantization=quantization,
    )  # fmt: skip
    prompts = random_prompts([20, 3, 33, 16], seed=6)
    rig.run({i: make_request(rig, prompt, NEW) for i, prompt in enumerate(prompts)})
    return rig


def on_kernels(backend: TorchBackend, config: ModelConfig, layout: KVLayout, pages: int) -> TritonAttention:
    return TritonAttention(
        layout, pages, config.heads, backend.kv_dtype, backend.device, compute_in(config.dtype), config.scale,
        config.soft_cap, SMALL,
    )  # fmt: skip


def as_graphs(_: TorchBackend, decoder: Decoder, attention: TritonAttention, sizes: StepSizes) -> Model:
    """With replays that run everything anew where there is no GPU."""
    record: Recorder = (lambda work: work) if INTERPRETED else CudaRecorder()

    def counted(work: Work) -> Work:
        replay = record(work)
        return lambda: (REPLAYED.append(1), replay())

    made = with_kernels(decoder)
    return made if why_not(made) else GraphDecoder(made, attention, sizes, counted)


def with_products(*args: Any) -> Decoder:
    """`load_model` with the products of the back end."""
    config, checkpoint, dtype, device, quantization, _, ranks = args
    maker = TritonBackend(config.dtype, config.dtype, device, Scratch(dtype, device)).maker
    return load_model(config, checkpoint, dtype, device, quantization, maker, ranks)


def use_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts the kernels in the place of the reference."""
    monkeypatch.setattr("model.layers.onednn_multiplies", lambda _: False)  # weights as a GPU has them
    monkeypatch.setattr(TorchBackend, "attention", on_kernels)
    monkeypatch.setattr(TorchBackend, "logit_ops", GpuOps())
    monkeypatch.setattr(TorchBackend, "model", as_graphs)
    monkeypatch.setattr(TorchBackend, "starter", staticmethod(start_draws))
    monkeypatch.setattr(loading, "load_model", with_products)
    REPLAYED.clear()


@pytest.mark.parametrize(
    ("kind", "page_size", "quantization"),
    [
        ("windows", 16, None),
        ("windows", 5, None),
        ("windows", 16, "int4"),
        ("deepseek-v2", 5, None),
        ("gemma4", 5, None),
        ("qwen3-moe", 16, None),
        ("qwen3-moe", 16, "int4"),
        ("qwen3-moe", 16, "int8"),
        ("phimoe", 5, None),
        ("gpt-oss", 16, None),
        ("qwen3.5", 16, None),
        ("granite-hybrid", 5, None),
        ("falcon-h1", 16, None),
        ("lfm2", 5, None),
        ("mamba2", 16, None),
        ("kimi-linear", 16, None),
    ],
)
def test_tokens_and_logits_are_those_of_the_reference(
    kind: str, page_size: int, quantization: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some layers have a window. DeepSeek's attention is latent, layers of Gemma 4 differ in shape. Others have states,
    of which those of Mamba-2 take many pages.
    """
    if kind == "windows":
        directory = write_ministral(tmp_path, 9, "fs")
    else:
        directory = checkpoints.write(BY_NAME[kind], tmp_path)
    pages = 300 if kind == "mamba2" else 80
    expected = run(directory, page_size, quantization, pages)
    use_kernels(monkeypatch)
    found = run(directory, page_size, quantization, pages)
    assert len(REPLAYED) >= NEW
    assert type(found.loaded.runner.attention) is TritonAttention
    assert {i: r.tokens for i, r in found.results.items()} == {i: r.tokens for i, r in expected.results.items()}
    assert found.logits.keys() == expected.logits.keys()
    for place, logits in expected.logits.items():
        allowed = 3e-5 * max(10.0, float(np.abs(logits).max()))
        np.testing.assert_allclose(found.logits[place], logits, atol=allowed, rtol=0)


def test_logprobs_of_prompts_do_not_depend_on_the_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps as graphs, whose output layer runs for each part."""
    directory = write_ministral(tmp_path, 9, "fs")
    use_kernels(monkeypatch)

    def told() -> Told:
        scheduling = SchedulerSettings(max_sequences=3, max_batched_tokens=32, prefill_chunk=13, steps_in_flight=2)
        rig = make_rig(directory, 16, 200, scheduling, queue=ENDLESS, backend="reference", device=DEVICE.type)
        return logprobs(rig, {i: asking(rig, prompt) for i, prompt in enumerate(random_prompts([20, 3, 1], seed=6))})

    expected = told()
    monkeypatch.setattr(logit_parts, "PART_BYTES", 4 * 320 * LOGIT_BYTES)
    found = told()
    assert REPLAYED
    assert {i: one.keys() for i, one in found.items()} == {i: one.keys() for i, one in expected.items()}
    for i, positions in expected.items():
        for position, (chosen, rank, ids, top) in positions.items():
            # Products of other numbers of rows may round otherwise.
            assert found[i][position] == (pytest.approx(chosen, abs=1e-4), rank, ids, pytest.approx(top, abs=1e-4))
