"""Tokens that are computed several at once and then partly taken back: no bit of what stays is another."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scheduler.drafts import Ints, PromptLookup
from scheduler.settings import QueueLimits, SchedulerSettings
from tests.model.test_parity import random_prompts
from tests.support.checkpoints import write_llama4, write_ministral, write_mistral
from tests.support.engines import Rig, make_request, make_rig
from tests.support.swaps import always_swap

NEW = 24
DRAFTS = 3
PLAIN = SchedulerSettings(max_sequences=8, max_batched_tokens=64, draft_tokens=DRAFTS)
PIPELINED = SchedulerSettings(
    max_sequences=6, max_batched_tokens=40, prefill_chunk=16, steps_in_flight=2, draft_tokens=DRAFTS
)
ENDLESS = QueueLimits(pools_of_tokens=float("inf"))


class HalfRight:
    """Knows how each sequence goes on, and proposes `DRAFTS` tokens, of which none to all are right."""

    def __init__(self, sequences: Sequence[list[int]]) -> None:
        self._sequences = [np.array(sequence, np.int32) for sequence in sequences]

    def propose(self, tokens: Ints, most: int) -> Ints:
        known = next(one for one in self._sequences if np.array_equal(one[: len(tokens)], tokens))
        drafts = known[len(tokens) : len(tokens) + most].copy()
        drafts[len(tokens) % (DRAFTS + 2) :] ^= 1  # one of five times all are right, one of five times none
        return drafts


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Some start alike, at lengths on both sides of windows and pages."""
    head, other = random_prompts([48, 40], seed=41)
    tails = random_prompts([3, 9, 30, 70], seed=42)
    return [head + tail for tail in tails] + [other, other + tails[1], head[:7]]


def undisturbed(directory: Path, prompts: list[list[int]], sampling: dict[str, Any], **kind: Any) -> Rig:
    rig = make_rig(directory, record_logits=True, prefix_cache=False, **kind)
    for i, prompt in enumerate(prompts):
        rig.run({i: make_request(rig, prompt, NEW, **sampling)})
    return rig


def check(alone: Rig, rig: Rig) -> None:
    """Tokens, logprobs and logits of each sequence are those that it has alone, one token a step."""
    for attempt, result in rig.results.items():
        before = alone.results[attempt % 100]
        assert result.tokens == before.tokens
        assert result.logprobs == before.logprobs
        logits = rig.logits_of(attempt)
        assert {position: logits[position] for position in range(NEW)} == alone.logits_of(attempt % 100)


def drafted(
    directory: Path,
    prompts: list[list[int]],
    settings: SchedulerSettings,
    page_size: int = 4,
    pool: int = 168,
    sampling: dict[str, Any] | None = None,
    host: int = 0,
    prefix_cache: bool = True,
    **kind: Any,
) -> tuple[Rig, Rig]:
    """A rig that ran each prompt alone, and one that ran all of them twice, with drafts, in a small pool."""
    sampling = sampling or {}
    alone = undisturbed(directory, prompts, sampling, **kind)
    drafter = HalfRight([prompt + alone.results[i].tokens for i, prompt in enumerate(prompts)])
    rig = make_rig(
        directory, page_size, pool, settings, record_logits=True, queue=ENDLESS, drafter=drafter, host_pages=host,
        prefix_cache=prefix_cache, **kind,
    )  # fmt: skip
    for again in range(2):
        requests = {100 * again + i: make_request(rig, prompt, NEW, **sampling) for i, prompt in enumerate(prompts)}
        rig.run(requests)
    return alone, rig


MODELS = {
    "full attention": None,
    "windows": lambda path: write_mistral(path, 24),
    "windows beside full attention": lambda path: write_ministral(path, 9, "sssf"),
    "chunks beside full attention": lambda path: write_llama4(path, 9),
}


@pytest.mark.parametrize("settings", [PLAIN, PIPELINED], ids=["one in flight", "two in flight"])
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.sample(2)
def test_drafts_change_no_bit(
    tiny: Path, tmp_path: Path, prompts: list[list[int]], kind: str, settings: SchedulerSettings
) -> None:
    write = MODELS[kind]
    alone, rig = drafted(
        tiny if write is None else write(tmp_path), prompts, settings, pool=168 if write is None else 130
    )
    check(alone, rig)
    assert write or rig.preemptions, "the pool is too large to show what a preemption does"


@pytest.mark.parametrize(
    "kind",
    [
        {"kv_dtype": "fp8"}, {"kv_dtype": "int8"}, {"prefix_cache": False, "page_size": 1}, {"page_size": 16},
        {"backend": "reference"}, {"sampling": {"temperature": 1.0, "seed": 7, "top_p": 0.9}}, {"ahead": True},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.sample(2)
def test_nor_do_they_in(tiny: Path, prompts: list[list[int]], kind: dict[str, Any]) -> None:
    check(*drafted(tiny, prompts, PIPELINED if "ahead" in kind else PLAIN, **kind))


def test_nor_beside_a_host_tier(tiny: Path, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    always_swap(monkeypatch)
    alone, rig = drafted(tiny, prompts, PLAIN, host=200)
    check(alone, rig)
    assert rig.scheduler.stats().swapped_in


def test_fewer_steps_than_tokens(tiny: Path, prompts: list[list[int]]) -> None:
    """A half right guess of three is worth one to two tokens more a step."""
    alone, rig = drafted(tiny, prompts[:1], PLAIN, pool=512)
    one_by_one = alone.scheduler.stats().steps
    stats = rig.scheduler.stats()
    assert stats.steps / 2 < 0.6 * one_by_one
    assert stats.draft_tokens > stats.accepted_tokens > 0
    assert stats.steps + stats.accepted_tokens >= 2 * NEW


def test_prompt_lookup_in_repeating_text(tiny: Path) -> None:
    """A prompt that holds what the model is going to say once more."""
    prompt = random_prompts([12], seed=3)[0]
    settings = SchedulerSettings(max_sequences=2, max_batched_tokens=64, draft_tokens=8)
    plain, rig = make_rig(tiny), make_rig(tiny, settings=settings, drafter=PromptLookup())
    first = plain.run({0: make_request(plain, prompt, 60)})[0].tokens
    requests = {1: make_request(plain, prompt + first, 60), 2: make_request(plain, prompt + first + prompt, 60)}
    for one in (plain, rig):
        one.run(requests)
    assert [rig.results[i].tokens for i in (1, 2)] == [plain.results[i].tokens for i in (1, 2)]
