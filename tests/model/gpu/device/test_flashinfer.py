"""Law: tokens behind prompts whose attention FlashInfer computes are the likeliest in float32 too."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.model.gpu.device.engine import AHEAD, NEAR, Oracle, on_device, random_prompts, run
from tests.model.gpu.device.place import needs_cuda

pytestmark = [
    needs_cuda,
    pytest.mark.skipif(find_spec("flashinfer") is None, reason="FlashInfer is not installed"),
]


@pytest.mark.parametrize("long", [16, 40])
def test_tokens_are_the_likeliest(dense: Path, long: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts in chunks of 48 tokens and less, beside decodes, with a step launched ahead."""
    monkeypatch.setattr("model.gpu.flashinfer.LONG", long)
    prompts = random_prompts((1, 16, 40, 100, 130, 7, 64, 200), seed=72)
    rig = on_device(dense, AHEAD, backend="flashinfer", dtype="bfloat16")
    Oracle.of(dense).check(prompts, run(rig, prompts), NEAR)
