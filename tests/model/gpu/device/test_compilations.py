"""Law: once an engine is ready, no request waits for a compiler, whatever it asks for."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton import knobs

from model.gpu.compilations import ChainedHook
from scheduler.events import Submit
from scheduler.request import Request
from scheduler.settings import SchedulerSettings
from tests.model.gpu.device.engine import NUMBERS, VOCABULARY, on_device, random_prompts, result_of
from tests.model.gpu.device.place import needs_cuda
from tests.support.engines import Rig, make_request

MANY = SchedulerSettings(max_sequences=10, max_batched_tokens=160, prefill_chunk=64, steps_in_flight=2)
WARM: dict[str, Any] = {"temperature": 0.8, "seed": 7}
DRAWS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": WARM,
    "no seed": {"temperature": 1.0},
    "top_k": WARM | {"top_k": 20},
    "one of top_k": WARM | {"top_k": 1},
    "large top_k": WARM | {"top_k": VOCABULARY + 5},
    "top_p": WARM | {"top_p": 0.9},
    "top_k and top_p": WARM | {"top_k": 40, "top_p": 0.8},
    "min_p": WARM | {"min_p": 0.05},
    "all cuts": WARM | {"top_k": 64, "top_p": 0.95, "min_p": 0.01},
    "repetition": {"repetition_penalty": 1.2},
    "penalties": WARM | {"frequency_penalty": 0.5, "presence_penalty": -0.5},
    "bias": {"logit_bias": ((7, 3.0), (9, -100.0))},
    "allowed": {"allowed_token_ids": (5, 6, 7, 8)},
    "several": WARM | {"sequence_count": 3},
}
LOGPROBS = (-1, 0, 1, 5, 20)


@contextmanager
def compiled() -> Iterator[list[str]]:
    """Yields the kernels that are compiled, or loaded from Triton's cache on disk, meanwhile."""
    names, runtime = list[str](), knobs.runtime
    before = runtime.jit_post_compile_hook

    def keep(**about: Any) -> None:
        names.append(str(about.get("repr", "?")))

    runtime.jit_post_compile_hook = ChainedHook(before, keep)
    try:
        yield names
    finally:
        runtime.jit_post_compile_hook = before


@triton.jit
def fill_with_a_number(into, number, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    tl.store(into + tl.arange(0, SIZE), number)


@needs_cuda
def test_a_kernel_that_is_compiled_late_is_noticed() -> None:
    numbers = torch.zeros(64, device="cuda")
    with compiled() as names:
        fill_with_a_number[(1,)](numbers, 1.5, SIZE=64)
        assert names, "the hook of Triton was not called"
        fill_with_a_number[(1,)](numbers, 2.5, SIZE=64)
        assert len(names) == 1
    assert numbers.tolist() == [2.5] * 64


def requests(rig: Rig) -> dict[int, Request]:
    """Returns requests of all kinds of draws and logprobs, of all lengths up to 200."""
    source, made = random.Random(9), dict[int, Request]()
    kinds = [(draw, logprobs) for draw in DRAWS.values() for logprobs in LOGPROBS]
    source.shuffle(kinds)
    lengths = [max(1, int(200 ** source.random())) for _ in kinds]
    for draw, logprobs, prompt in zip(*zip(*kinds, strict=True), random_prompts(lengths, seed=73), strict=True):
        request = make_request(rig, prompt, source.randint(1, 9), **draw)
        controls = replace(request.controls, top_logprobs=logprobs, prompt_logprobs=logprobs >= 0 and len(made) % 2 > 0)
        made[next(NUMBERS)] = replace(request, controls=controls)
    return made


@pytest.mark.parametrize("model", ["dense", "mixture"])
@pytest.mark.parametrize("quantization", [None, "int4"])
def test_no_request_waits_for_a_compiler(model: str, quantization: str | None, request: pytest.FixtureRequest) -> None:
    directory: Path = request.getfixturevalue(model)
    rig = on_device(directory, MANY, quantization=quantization)
    asked = requests(rig)
    source, script, turn = random.Random(10), dict[int, list[Submit]](), 0
    for attempt, one in asked.items():  # so that there are steps of all numbers of sequences
        script.setdefault(turn, []).append(Submit(attempt, one))
        turn += source.choice((0, 0, 0, 1, 3, 8))
    with compiled() as names:
        rig.play(script)
    for attempt, one in asked.items():
        result_of(rig.results, attempt, one.max_tokens)
    assert not names, f"{len(names)} kernels were compiled while requests waited: {sorted(set(names))}"
