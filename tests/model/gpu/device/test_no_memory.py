"""Law: a lack of device memory costs computing again, changes no token that is due, and is told once."""

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from model import logit_parts, page_store
from model.forward import Model
from scheduler.settings import SchedulerSettings
from tests.model.gpu.device import memory
from tests.model.gpu.device.engine import (
    NEAR,
    NEW,
    NUMBERS,
    PROMPTS,
    Oracle,
    logprobs_of,
    on_device,
    random_prompts,
    result_of,
    run,
    write_dense,
)
from tests.model.gpu.device.memory import Lacking
from tests.model.gpu.device.place import REHEARSED, needs_cuda
from tests.support.engines import make_request
from tests.support.planted import plant
from tests.support.swaps import always_swap

WIDE = SchedulerSettings(max_sequences=6, max_batched_tokens=512, steps_in_flight=2)
NARROW = SchedulerSettings(max_sequences=4, max_batched_tokens=64, prefill_chunk=32, steps_in_flight=2)


@pytest.fixture(scope="module")
def oracle(dense: Path) -> Oracle:
    return Oracle.of(dense)


@pytest.fixture(autouse=True)
def _all_memory_again() -> Iterator[None]:
    yield
    if not REHEARSED:
        torch.cuda.empty_cache()


def lines(caplog: pytest.LogCaptureFixture, logger: str) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.name == logger and one.levelno >= logging.WARNING]


@needs_cuda
def test_the_next_tensor_finds_no_memory() -> None:
    """The error is torch's, and all memory is there again: these tests stand on that."""
    with memory.none(), pytest.raises(torch.OutOfMemoryError):
        torch.empty(1, device="cuda")
    assert len(torch.empty(2**28, dtype=torch.uint8, device="cuda")) == 2**28


def test_a_step_without_memory_is_run_in_halves(dense: Path, oracle: Oracle, caplog: pytest.LogCaptureFixture) -> None:
    """No step of more than 60 tokens finds memory: most prompts are computed in a half, or in a half of one."""
    rig = on_device(dense, WIDE, prefix_cache=False)
    lacking = Lacking(lambda _, args: len(args[0].tokens) > 60)
    whole = rig.loaded.runner.model
    rig.wrap_model(lambda model: cast(Model, SimpleNamespace(forward=lacking(model.forward))))
    short = [prompt for prompt in PROMPTS if len(prompt) <= 60]
    with caplog.at_level(logging.WARNING, "quire.runner"):
        found = run(rig, short)
    oracle.check(short, found, NEAR)
    assert lacking.failed, "no step failed"
    said = lines(caplog, "quire.runner")
    again = [line for line in said if "is run again" in line]
    halves = [line for line in said if "in halves" in line]
    assert all("OutOfMemoryError" in line for line in said), said
    assert len(again) <= 1, f"one step failed as it was launched ahead: {again}"
    assert len(halves) == 1, f"one step was halved: {halves}"
    rig.loaded.runner.model = whole
    oracle.check(PROMPTS, run(rig, PROMPTS), NEAR)


def test_draws_without_memory_are_made_again(dense: Path, oracle: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each fifth launch of draws finds none, while the step is on the device already."""
    rig = on_device(dense, NARROW)
    starter = rig.loaded.runner.starter
    assert starter is not None
    lacking = Lacking(lambda call, _: call % 5 == 0)
    monkeypatch.setattr(rig.loaded.runner, "starter", lacking(starter))
    found = run(rig, PROMPTS)
    assert lacking.failed
    oracle.check(PROMPTS, found, NEAR)


@needs_cuda
def test_logprobs_of_prompts_that_do_not_fit_together_are_computed_in_halves(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory is left for some of the prompts, not for all: this error is no planted one.

    The logits of a prompt take more than the 10 MiB up to which torch's allocator takes 20 at once.
    """
    monkeypatch.setattr(logit_parts, "PART_BYTES", 2**40)  # one part, which has no bound
    rig = on_device(write_dense(tmp_path, vocab_size=32_000), WIDE, prefix_cache=False)
    prompts = random_prompts([120] * 4, seed=74)

    def peak(some: list[list[int]]) -> int:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        logprobs_of(rig, some, 3)
        return torch.cuda.max_memory_allocated() - held

    expected = logprobs_of(rig, prompts, 3)
    for prompt in prompts:
        logprobs_of(rig, [prompt], 3)
    whole, one = peak(prompts), peak(prompts[:1])
    left = (whole + one) // 2
    with memory.at_most(left), caplog.at_level(logging.WARNING, "quire.runner"):
        found = logprobs_of(rig, prompts, 3)
    halves = [line for line in lines(caplog, "quire.runner") if "in halves" in line]
    assert halves, f"four prompts take {whole} bytes, one {one}: with {left} none was halved"
    assert len(halves) == 1, halves
    for number, positions in enumerate(expected):
        for place, (chosen, _) in positions.items():
            assert found[number][place][0] == pytest.approx(chosen, abs=NEAR), f"prompt {number}, token {place}"


@pytest.mark.parametrize("move", ["export", "import_pages"])
def test_swaps_without_memory_lose_pages_alone(
    dense: Path, oracle: Oracle, move: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    always_swap(monkeypatch)
    monkeypatch.setattr(page_store, "PART_BYTES", 1)  # a page at once
    rig = on_device(dense, NARROW, page_size=4, pool_tokens=260, host_pages=400)
    lacking = Lacking(lambda call, _: call % 3 == 0)
    plant(monkeypatch, type(rig.loaded.runner.attention), move, lacking)
    with caplog.at_level(logging.WARNING, "quire.pages"):
        for _ in range(3):
            oracle.check(PROMPTS, run(rig, PROMPTS), NEAR)
    assert lacking.failed, "every page found memory"
    assert 1 <= len(lines(caplog, "quire.pages")) <= lacking.failed
    assert all("out of memory" in line for line in lines(caplog, "quire.pages"))
    assert rig.scheduler.stats().swap_lost


def test_copies_without_memory_are_computed_anew(
    dense: Path, oracle: Oracle, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three sequences of a request share the page that its prompt ends in until they write into it."""
    rig = on_device(dense, WIDE)
    lacking = Lacking(lambda call, _: call % 2 == 0)
    plant(monkeypatch, type(rig.loaded.runner.attention), "copy", lacking)
    asked: dict[int, Any] = {}
    for number, prompt in zip(NUMBERS, PROMPTS[3:6], strict=False):
        asked[number] = make_request(rig, prompt, NEW, sequence_count=3, temperature=1.0, seed=3)
        greedy = replace(asked[number].controls, temperature=0.0)
        asked[number] = replace(asked[number], controls=greedy)
    with caplog.at_level(logging.WARNING, "quire.pages"):
        rig.run(asked)
    assert lacking.failed, "nothing was copied"
    assert len(lines(caplog, "quire.pages")) == lacking.failed, "a line for each incident"
    for number, prompt in zip(asked, PROMPTS[3:6], strict=True):
        results = [result_of(rig.results, number), *(rig.results[number, index] for index in (1, 2))]
        oracle.check([prompt] * 3, results, NEAR)
