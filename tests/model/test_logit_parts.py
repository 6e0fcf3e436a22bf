"""Laws of logits that are read in parts: no logprob depends on the parts, and the memory not on a step's tokens."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from model import logit_parts
from model.logit_parts import LOGIT_BYTES, LogitParts, rows_of_part
from model.sampling.prompt_logprobs import PromptReader
from scheduler.events import EndReason
from scheduler.settings import SchedulerSettings
from tests.model.families import checkpoints
from tests.model.families.cases import BY_NAME
from tests.model.test_parity import ENDLESS, random_prompts
from tests.model.test_prompt_logprobs import Told, asking, run
from tests.support.checkpoints import write_llama
from tests.support.engines import make_request, make_rig
from tests.support.planted import plant
from tests.support.rows_of_logits import LogitWatch

pytestmark = pytest.mark.sample(3)

WIDE = 4096  # ids, more than a layer is wide
PROMPTS = random_prompts([1, 2, 7, 33, 16, 60], seed=3)
SCHEDULES = {
    "whole": SchedulerSettings(max_sequences=64),
    "chunks, two steps in flight": SchedulerSettings(24, 5, 8, 2, backfill_time=0.0),
    "without a cache": SchedulerSettings(max_sequences=64, prefill_chunk=8, recompute=True),
}


def of_rows(monkeypatch: pytest.MonkeyPatch, rows: int, vocabulary: int = 320) -> None:
    monkeypatch.setattr(logit_parts, "PART_BYTES", rows * vocabulary * LOGIT_BYTES)
    assert rows_of_part(vocabulary) == rows


def told(directory: Path, scheduling: SchedulerSettings, **kind: Any) -> tuple[Told, dict[Any, list[int]]]:
    """The logprobs of prompts, with different numbers of alternatives, beside a request that asks for none."""
    rig = make_rig(directory, settings=scheduling, queue=ENDLESS, **kind)
    requests = {i: asking(rig, prompt, i % 3) for i, prompt in enumerate(PROMPTS)}
    found = run(rig, requests | {9: make_request(rig, PROMPTS[3], 4)})
    return found, {key: result.tokens for key, result in rig.results.items()}


@pytest.mark.parametrize("rows", [1, 3, 16])
@pytest.mark.parametrize("scheduling", SCHEDULES)
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_no_bit_depends_on_the_parts(
    tiny: Path, backend: str, scheduling: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = told(tiny, SCHEDULES[scheduling], backend=backend)
    of_rows(monkeypatch, rows)
    assert told(tiny, SCHEDULES[scheduling], backend=backend) == expected


@pytest.mark.parametrize("kind", ["gemma2", "cohere", "granite", "opt-post-norm", "qwen3.5"])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.sample(3)
def test_of_models_that_change_their_logits(
    kind: str, backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a factor or a bound, or whose output layer reads a projection, or whose states are written in place."""
    directory, scheduling = checkpoints.write(BY_NAME[kind], tmp_path), SCHEDULES["whole"]
    expected = told(directory, scheduling, backend=backend)
    of_rows(monkeypatch, 5)
    assert told(directory, scheduling, backend=backend) == expected


@pytest.mark.parametrize("apart", [False, True], ids=["shared memory", "sockets"])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_of_ranks(tiny: Path, backend: str, apart: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = {"backend": backend, "ranks": 2, "apart": apart, "dtype": "float32"}
    expected = told(tiny, SCHEDULES["whole"], **kind)
    of_rows(monkeypatch, 3)
    assert told(tiny, SCHEDULES["whole"], **kind) == expected


@pytest.fixture
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """The runner logs a traceback for every fault, as it should."""
    monkeypatch.setattr(logging.getLogger("quire.runner"), "disabled", True)


@pytest.mark.usefixtures("_quiet")
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_a_part_without_memory_is_read_in_the_halves(
    tiny: Path, backend: str, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks go on together: each has computed all parts when rank 0 runs the halves."""
    expected = told(tiny, SCHEDULES["whole"], backend=backend, ranks=ranks, dtype="float32")
    of_rows(monkeypatch, 3)
    reads = iter(range(1_000_000))

    def lacking(read: Any) -> Any:
        def stand_in(self: PromptReader, logits: torch.Tensor) -> None:
            if next(reads) == 4:
                raise torch.OutOfMemoryError("planted")
            read(self, logits)

        return stand_in

    plant(monkeypatch, PromptReader, "read", lacking)
    assert told(tiny, SCHEDULES["whole"], backend=backend, ranks=ranks, dtype="float32") == expected
    assert next(reads) > -(-sum(len(prompt) - 1 for prompt in PROMPTS) // 3) + 1, "some were read again"


@pytest.mark.usefixtures("_quiet")
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_prompt_that_cannot_be_read_ends_alone(tiny: Path, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    of_rows(monkeypatch, 3)

    def refusing(read: Any) -> Any:
        def stand_in(self: PromptReader, logits: torch.Tensor) -> None:
            read(self, logits)
            if any(row_start[1] > 40 for row_start in self.found):
                raise ArithmeticError

        return stand_in

    plant(monkeypatch, PromptReader, "read", refusing)
    rig = make_rig(tiny, settings=SCHEDULES["whole"], queue=ENDLESS, ranks=ranks)
    rig.run({i: asking(rig, prompt) for i, prompt in enumerate(PROMPTS)})
    ends = [rig.results[i].end for i in range(len(PROMPTS))]
    assert [end.reason for end in ends if end is not None] == [EndReason.LENGTH] * 5 + [EndReason.FAULT]


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("wide")
    return write_llama(directory, vocab_size=WIDE, num_hidden_layers=1, max_position_embeddings=1024)


def seen(directory: Path, tokens: int, **kind: Any) -> LogitWatch:
    """Returns the tensors that logprobs of a prompt of this length take, with alternatives."""
    scheduling = SchedulerSettings(max_sequences=4, max_batched_tokens=1024)
    rig = make_rig(directory, settings=scheduling, queue=ENDLESS, **kind)
    with LogitWatch(WIDE) as watch:
        parts = run(rig, {0: asking(rig, random_prompts([tokens], WIDE)[0], 5)})
    assert len(parts[0]) == tokens - 1
    return watch


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_memory_does_not_grow_with_the_tokens_of_a_step(
    wide: Path, backend: str, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_rows(monkeypatch, 8, WIDE)
    for tokens in (9, 70, 600):
        watch = seen(wide, tokens, backend=backend, ranks=ranks)
        assert watch.rows <= 8
        assert watch.peak <= logit_parts.PART_BYTES


def test_the_watch_sees_what_all_logits_take(wide: Path) -> None:
    """With a part that has room for all, as it was before there were parts."""
    watch = seen(wide, 600, backend="reference")
    assert watch.rows >= 599
    assert 30 * 599 * WIDE < watch.peak <= LOGIT_BYTES * 599 * WIDE


@given(st.integers(1, 1000), st.integers(1, 300), st.integers(1, 200_000))
def test_parts_are_all_tokens_in_order_and_of_bounded_size(tokens: int, rows: int, vocabulary: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        of_rows(patch, rows, vocabulary)
        parts = LogitParts(torch.arange(tokens), lambda _: None).split(vocabulary)
    assert torch.cat(list(parts)).tolist() == list(range(tokens))
    sizes = {len(part) for part in parts}
    assert min(sizes) > 0
    assert max(sizes) <= rows
    assert max(sizes) - min(sizes) <= 1
    assert len(parts) == -(-tokens // rows)


def test_a_row_that_exceeds_a_part_is_a_part() -> None:
    assert rows_of_part(2**30) == 1
