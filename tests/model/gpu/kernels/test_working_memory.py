"""The steps whose memory is measured are the largest that there can be."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from cache_manager.layout import KVLayout
from model import logit_parts
from model.architectures.registry import load_model
from model.backend import StepSizes
from model.config import read_config
from model.gguf_weights import open_checkpoint
from model.gpu.attention_backend import TritonAttention
from model.gpu.cutoff import scratch_bytes
from model.gpu.parts import with_kernels
from model.gpu.working_memory import CudaMemory, largest_step, measure_steps
from model.logit_parts import LOGIT_BYTES
from model.parallel.collective import ONE_RANK
from tests.model.families import checkpoints
from tests.model.families.cases import BY_NAME
from tests.model.gpu.kernels.device import DEVICE
from tests.model.gpu.kernels.test_model import SMALL
from tests.support.checkpoints import write_ministral


class Counted:
    """Memory of a device that takes a kilobyte more in each run."""

    def __init__(self) -> None:
        self.runs = 0

    def peak_of(self, work: Callable[[], object]) -> int:
        work()
        self.runs += 1
        return 1024 * self.runs


@pytest.mark.parametrize("kind", ["windows", "qwen3.5", "gemma4"])
def test_the_largest_steps_are_run(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = write_ministral(tmp_path, 9, "fs") if kind == "windows" else checkpoints.write(BY_NAME[kind], tmp_path)
    config = read_config(directory)
    layout = config.kv_layout(16, "float32")
    checkpoint = open_checkpoint(directory, config, False, None)
    decoder = with_kernels(load_model(config, checkpoint, torch.float32, DEVICE, None, None, ONE_RANK))

    def attention() -> TritonAttention:
        return TritonAttention(
            layout, 1, config.heads, "float32", DEVICE, "float32", config.scale, config.soft_cap, SMALL
        )  # fmt: skip

    memory = Counted()
    with torch.inference_mode():
        found = measure_steps(
            decoder, attention, layout, config.rotary_axes, memory, StepSizes(40, config.context, 20), 8
        )  # fmt: skip
        without = measure_steps(
            decoder, attention, layout, config.rotary_axes, memory, StepSizes(40, config.context, 20), 0
        )  # fmt: skip
    logits = 40 * config.vocabulary
    assert (found.graphs, found.step, found.sampler) == (
        1024 + 4 * logits,
        2048,
        scratch_bytes(40, config.vocabulary) + LOGIT_BYTES * logits,
    )
    assert (without.graphs, without.step) == (0, 3072)
    assert found.total == found.graphs + found.step + found.sampler
    # A part of the logits of prompts may have more rows than there are draws, up to all tokens of a step.
    for rows, most in ((1, 1), (7, 7), (999, 20)):
        monkeypatch.setattr(logit_parts, "PART_BYTES", rows * config.vocabulary * LOGIT_BYTES)
        with torch.inference_mode():
            small = measure_steps(
                decoder, attention, layout, config.rotary_axes, memory, StepSizes(2, config.context, 20), 0
            )  # fmt: skip
        draws = scratch_bytes(2, config.vocabulary) + 2 * config.vocabulary * LOGIT_BYTES
        assert small.sampler == max(draws, most * config.vocabulary * LOGIT_BYTES)


def test_what_libraries_keep_is_told_from_what_torch_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second number of a state is what torch has reserved."""
    total, now = 1000, [(700, 100)]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (now[0][0], total))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: now[0][1])
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    # Less free by 130, of which torch has 80. Then another process ends meanwhile: nothing was taken.
    assert CudaMemory().lasting(lambda: now.insert(0, (570, 180))) == 50
    assert CudaMemory().lasting(lambda: now.insert(0, (900, 180))) == 0


@pytest.mark.parametrize(
    ("rows", "context", "tokens", "counts"), [(3, 40, 20, [7, 7, 6]), (3, 4, 20, [4, 4, 4]), (9, 40, 2, [1, 1])]
)
def test_a_step_has_as_many_sequences_as_can_be(rows: int, context: int, tokens: int, counts: list[int]) -> None:
    layout = a_layout()
    shape = largest_step(layout, StepSizes(rows, context, tokens), tokens)
    assert shape.slices[:, 2].tolist() == counts
    assert shape.positions.tolist() == [place for count in counts for place in range(count)]
    assert shape.slots.shape == (1, sum(counts))
    assert shape.slots.max() < layout.page_size


def a_layout() -> KVLayout:
    return KVLayout.uniform(((0, 1),), 2, 16, 4, 16)
