"""`LLM`: the engine in the caller's process."""

import threading
from collections.abc import Iterator

import pytest
from quire import LLM, Output, RequestFailed, Sampling, Stopping


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(kv_cache_memory=64 * 2**20, page_size=8) as made:
        yield made


def test_results_stand_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = ["ROMEO:", [5, 6, 7], "A " * 50]
    stopping = Stopping(max_tokens=12, ignore_eos=True)
    together = llm.generate(prompts, Sampling(seed=4), stopping)
    assert [c.prompt_tokens for c in together] == [2, 3, 51]
    for prompt, completion in zip(prompts, together, strict=True):
        (alone,) = llm.generate([prompt], Sampling(seed=4), stopping)
        assert (alone.text, alone.token_ids) == (completion.text, completion.token_ids)
        assert len(alone.token_ids) == 12


def test_logprobs_and_stop_strings(llm: LLM) -> None:
    greedy = Sampling(temperature=0)
    (whole,) = llm.generate("First Citizen:", greedy, Stopping(max_tokens=40, ignore_eos=True), Output(top_logprobs=3))
    assert [position[0].token_id for position in whole.logprobs] == whole.token_ids
    assert all(position[0].rank == 1 and len(position) == 3 for position in whole.logprobs)
    middle = whole.text[20:24]
    (cut,) = llm.generate("First Citizen:", greedy, Stopping(max_tokens=40, ignore_eos=True, stop=(middle,)))
    assert cut.text == whole.text[: whole.text.index(middle)]
    assert cut.finish.stop_string == middle


def test_bad_request_is_refused_before_anything_runs(llm: LLM) -> None:
    with pytest.raises(RequestFailed, match="token ids must be in"):
        llm.generate(["fine", [1, 99999]])
    assert llm.generate("ROMEO:", stopping=Stopping(max_tokens=1, ignore_eos=True))[0].token_ids


def test_close_ends_the_engine() -> None:
    with LLM(kv_cache_memory=16 * 2**20):
        assert any(t.name == "quire-engine" for t in threading.enumerate())
    before = [t for t in threading.enumerate() if t.name == "quire-engine"]
    assert len(before) <= 1  # only the module's own


def test_what_came_before_is_not_computed_again(llm: LLM) -> None:
    stopping, greedy = Stopping(max_tokens=20, ignore_eos=True), Sampling(temperature=0)
    prompt = list(range(100, 140))
    (first,) = llm.generate([prompt], greedy, stopping)
    (again,) = llm.generate([prompt], greedy, stopping)
    assert (first.cached_tokens, again.cached_tokens) == (0, 32), "whole pages of 8, and not the last token"
    assert again.token_ids == first.token_ids
    (second,) = llm.generate([prompt + first.token_ids + [5]], greedy, stopping)
    assert second.cached_tokens == 56
    with LLM(kv_cache_memory=16 * 2**20, page_size=8, prefix_cache=False) as without:
        results = [without.generate([p], greedy, stopping)[0] for p in (prompt, prompt + first.token_ids + [5], prompt)]
    assert [r.cached_tokens for r in results] == [0, 0, 0]
    assert [r.token_ids for r in results] == [first.token_ids, second.token_ids, first.token_ids]
