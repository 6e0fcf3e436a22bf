"""`LLM`: the engine in the caller's process."""

import gc
import inspect
import math
import os
import re
import signal
import threading
import weakref
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import pytest
import torch
from quire import LLM, Beam, InvalidRequest, Output, PromptsFailed, RequestFailed, Sampling, Stopping, Structured

from rpc.offline.keywords import CHAT_KEYWORDS, CONSTRUCTOR_KEYWORDS, GENERATE_KEYWORDS
from scheduler.parameters import REQUEST_KEYWORDS

TWO = Stopping(max_tokens=2, ignore_eos=True)


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


@pytest.mark.parametrize(
    "settings",
    [{}, {"backend": "reference"}, {"host_cache_memory": 2**24, "quantization": "int8"}, {"tensor_parallel": 2}],
    ids=["cpu", "reference", "int8 and a host tier", "ranks"],
)
def test_close_frees_weights_and_kv_of_a_program_that_keeps_its_llm(settings: dict[str, Any]) -> None:
    """At once: the next LLM takes its KV pool from what is free, and the collector may come later."""
    gc.collect()
    others = list(map(id, tensors()))
    made = LLM(kv_cache_memory=32 * 2**20, **settings)
    made.generate("ROMEO:", stopping=Stopping(max_tokens=3, ignore_eos=True))
    held = [weakref.ref(tensor) for tensor in tensors() if id(tensor) not in others]
    assert sum(tensor.nbytes for ref in held if (tensor := ref()) is not None) > 2**25
    gc.disable()
    try:
        made.close()
        left = [tensor for ref in held if (tensor := ref()) is not None]
        assert sum(tensor.nbytes for tensor in left) < 2**18, "more than what ranks exchange"
    finally:
        gc.enable()


def tensors() -> list[torch.Tensor]:
    return [one for one in gc.get_objects() if issubclass(type(one), torch.Tensor)]


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


@pytest.mark.parametrize(
    "prompts",
    [[5, 6, 7], [[5, 6, 7]], {"prompt_token_ids": [5, 6, 7]}, [{"prompt_token_ids": (5, 6, 7), "prompt": None}]],
)
def test_a_prompt_may_be_flat_ids_or_a_dict(llm: LLM, prompts: Any) -> None:
    (found,) = llm.generate(prompts, Sampling(temperature=0), TWO)
    (expected,) = llm.generate([(5, 6, 7)], Sampling(temperature=0), TWO)
    assert (found.prompt, found.prompt_token_ids, found.prompt_tokens) == (None, [5, 6, 7], 3)
    assert found.token_ids == expected.token_ids


def test_results_carry_their_prompts(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    found = llm.generate(["ROMEO:", {"prompt": "JULIET: O", "cache_salt": "a"}], stopping=TWO)
    assert [one.prompt for one in found] == ["ROMEO:", "JULIET: O"]
    assert [one.prompt_token_ids for one in found] == [tokenizer.encode("ROMEO:"), tokenizer.encode("JULIET: O")]
    assert tokenizer.decode(found[1].prompt_token_ids) == "JULIET: O"
    assert found[0].text == tokenizer.decode(found[0].token_ids)


def test_a_salt_in_a_dict_separates_prefixes(llm: LLM) -> None:
    ids = list(range(200, 240))
    for salt, cached in (("a", 0), ("b", 0), ("a", 32)):
        (found,) = llm.generate({"prompt_token_ids": ids, "cache_salt": salt}, stopping=TWO)
        assert found.cached_tokens == cached


def test_a_list_of_settings_has_one_for_each_prompt(llm: LLM) -> None:
    sampling = [Sampling(seed=1), Sampling(temperature=0)]
    stopping = (Stopping(max_tokens=3, ignore_eos=True), Stopping(max_tokens=5, ignore_eos=True))
    together = llm.generate(["ROMEO:"] * 2, sampling, stopping, [Output(top_logprobs=2), Output()])
    assert [len(one.token_ids) for one in together] == [3, 5]
    assert [len(one.logprobs) for one in together] == [3, 0]
    for how, until, found in zip(sampling, stopping, together, strict=True):
        assert llm.generate("ROMEO:", how, until)[0].token_ids == found.token_ids
    with pytest.raises(ValueError, match="sampling has 2 Sampling for 3 prompts"):
        llm.generate(["a", "b", "c"], sampling)
    for wrong in (TWO, [Sampling(), TWO]):
        with pytest.raises(TypeError, match="sampling is a Stopping, must be a Sampling"):
            llm.generate(["a", "b"], wrong)  # type: ignore[arg-type]


def test_the_end_reads_as_its_reason(llm: LLM) -> None:
    (found,) = llm.generate("ROMEO:", stopping=TWO)
    assert f"{found.finish}" == str(found.finish) == str(found.finish.reason) == "length"
    assert found.finish.reason == "length"


BAD: list[tuple[Any, str]] = [
    ([1, 99999], "token_ids is 99999: token ids must be in"),
    (math.nan, "prompt is nan: must be text, token ids"),
    (None, "prompt is None: must be text, token ids"),
    (b"ROMEO:", "prompt is b'ROMEO:': must be text"),
    (["ROMEO:"], r"token_ids\[0\] is 'ROMEO:': must be a token id"),
    ({"prompt": "a", "prompt_token_ids": [1]}, "prompt is .* must have either 'prompt' or"),
    ({"text": "a"}, r"prompt\['text'\] is 'a': a prompt has prompt, prompt_token_ids"),
    ({"prompt": "a", "multi_modal_data": {"audio": b""}}, "multi_modal_data is .*: must be {'image'"),
    ({"prompt": "a", "multi_modal_data": {"image": 5}}, r"images\[0\] is 'int': must be the bytes of a PNG"),
    ({"prompt": "a", "multi_modal_data": {"image": b"x"}}, r"images\[0\] is 'an image': .* reads text alone"),
    ({"prompt": "a", "multi_modal_data": {"image": ["/none.png"]}}, ".* No such file.*/none.png"),
    ({"prompt": "a", "cache_salt": "#"}, "cache_salt is '#'"),
]


@pytest.mark.parametrize(("prompt", "message"), BAD)
def test_a_bad_prompt_of_a_list_is_named_by_its_place(llm: LLM, prompt: Any, message: str) -> None:
    with pytest.raises(
        PromptsFailed, match=rf"^1 of 3 prompts failed, none was run: prompts\[1\]: {message}"
    ) as failed:
        llm.generate(["fine", prompt, "fine too"], stopping=TWO)
    assert set(failed.value.failures) == {1}
    assert failed.value.code == "INVALID_ARGUMENT"


def test_all_bad_prompts_are_named_at_once(llm: LLM) -> None:
    with pytest.raises(PromptsFailed) as failed:
        llm.generate([*["fine"] * 5, *[""] * 20], stopping=TWO)
    assert set(failed.value.failures) == set(range(5, 25))
    assert str(failed.value).startswith("20 of 25 prompts failed, none was run: prompts[5]: ")
    assert "prompts[14]: " in str(failed.value)
    assert "and 10 more" in str(failed.value)
    with pytest.raises(RequestFailed, match="token ids must be in") as alone:
        llm.generate({"prompt_token_ids": [99999]})
    assert not isinstance(alone.value, PromptsFailed)


def test_a_prompt_that_fails_while_it_runs_does_not_lose_the_others(llm: LLM) -> None:
    stuck = Sampling(allowed_token_ids=(0,), bad_words=("<|endoftext|>",), temperature=0)
    nothing = llm.get_tokenizer().encode("<|endoftext|>", add_special_tokens=False)
    assert nothing == [0]
    fine = Sampling(seed=2)
    with pytest.raises(PromptsFailed, match=r"`completions` has the others: prompts\[1\]: .* leave no token") as failed:
        llm.generate(["ROMEO:", "JULIET:", "First"], [fine, stuck, fine], TWO)
    assert set(failed.value.completions) == {0, 2}
    for place, prompt in ((0, "ROMEO:"), (2, "First")):
        assert failed.value.completions[place].token_ids == llm.generate(prompt, fine, TWO)[0].token_ids


def test_conversations_are_checked_as_prompts_are(llm: LLM) -> None:
    turns: list[tuple[Any, str]] = [
        ({"role": "user"}, r"chat.messages\[0\].content is None"),
        ({"content": "a"}, r"chat.messages\[0\].role is ''"),
        ("Hello", r"chat.messages\[0\] is 'Hello'"),
        ({"role": "tool", "content": "a", "tool_call_id": 5}, r"chat.messages\[0\].tool_call_id is 5: must be a text"),
        ({"role": "assistant", "tool_calls": [{"name": 3}]}, r"tool_calls\[0\].name is 3: must be a text"),
        ({"role": "tool", "content": "a", "tool_calls": [1]}, r"chat.messages\[0\].tool_calls\[0\] is 1"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": "a"}]},
            r"content\[0\] is 'image_url': must be",
        ),
    ]
    for turn, message in turns:
        with pytest.raises(PromptsFailed, match=rf"conversations\[0\]: .*{message}"):
            llm.chat([[turn]])
    with pytest.raises(RequestFailed, match=r"^the model has no chat template"):
        llm.chat([{"role": "user", "content": "a", "name": "Ann"}])


def test_a_progress_bar_is_shown_where_it_is_asked_for(llm: LLM, capfd: pytest.CaptureFixture[str]) -> None:
    for wanted, shown in ((True, True), (None, False), (False, False)):
        llm.generate(["ROMEO:", "JULIET:"], stopping=TWO, use_tqdm=wanted)
        found = capfd.readouterr()
        assert ("2/2" in found.err and "4 tokens" in found.err) is shown
        assert found.out == ""


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda llm: LLM(tensor_parallel_size=2), r"LLM\(\) has no tensor_parallel_size: LLM\(tensor_parallel=...\)"),
        (lambda llm: LLM(max_model_len=9), r"max_model_len: .*Stopping\(max_tokens=...\)"),
        (
            lambda llm: LLM(seed=9, swap_space=4),
            r"no seed: Sampling\(seed=...\), of each call; no swap_space: LLM\(host",
        ),
        (
            lambda llm: llm.generate("a", sampling_params=None),
            r"LLM.generate\(\) has no sampling_params: sampling=Samp",
        ),
        (lambda llm: llm.generate("a", lora_request=1), "no lora_request: Quire does not have it"),
        (lambda llm: llm.chat([], chat_template="x"), r"LLM.chat\(\) has no chat_template: chat_template.jinja in"),
        (
            lambda llm: Sampling(n=2, max_tokens=5),
            r"no n: Sampling\(sequence_count=...\); no max_tokens: Stopping\(max",
        ),
        (lambda llm: Stopping(temperature=0.5), r"Stopping\(\) has no temperature: Sampling\(temperature=...\)"),
        (lambda llm: Output(detokenize=False), r"Output\(\) has no detokenize: Output\(text=...\)"),
        (lambda llm: Sampling(nonsense=1), "unexpected keyword argument 'nonsense'"),
    ],
)
def test_the_names_of_vllm_are_answered_with_those_of_quire(llm: LLM, call: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        call(llm)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Stopping(stop="end"), r"stopping.stop is 'end': must be several: \('text', ...\)"),
        (lambda: Stopping(stop=None), "stopping.stop is None"),
        (lambda: Stopping(stop_token_ids=5), "stopping.stop_token_ids is 5"),
        (lambda: Sampling(bad_words="end"), "sampling.bad_words is 'end'"),
        (lambda: Sampling(allowed_token_ids=None), "sampling.allowed_token_ids is None"),
        (lambda: Sampling(logit_bias={5: 1.0}), "sampling.logit_bias is {5: 1.0}: .* pairs of token id and bias"),
    ],
)
def test_a_text_or_a_dict_is_not_read_as_a_list(make: Any, message: str) -> None:
    """A text's characters would each be a stop string, a dict's keys pairs."""
    with pytest.raises(InvalidRequest, match=message):
        make()


PLACES: dict[str, set[str]] = {
    **{made.__name__: {field.name for field in fields(made)} for made in (Sampling, Stopping, Output, Beam)},
    "LLM": set(inspect.signature(LLM).parameters),
    "generate": set(inspect.signature(LLM.generate).parameters),
    "chat": set(inspect.signature(LLM.chat).parameters),
}


@pytest.mark.parametrize(
    ("place", "hints"), [("LLM", CONSTRUCTOR_KEYWORDS), ("generate", GENERATE_KEYWORDS), ("chat", CHAT_KEYWORDS)]
)
def test_every_hint_names_what_there_is(place: str, hints: dict[str, str]) -> None:
    assert not PLACES[place] & hints.keys(), "an argument that there is needs no hint"
    for hint in hints.values():
        for where, field in re.findall(r"(\w+)\((\w+)=", hint):
            assert field in PLACES[where], hint


def test_every_field_of_a_request_is_found_from_the_wrong_class() -> None:
    for name in ("Sampling", "Stopping", "Output"):
        for field in PLACES[name]:
            assert REQUEST_KEYWORDS[field].startswith(f"{name}({field}=")


def test_an_engine_does_not_survive_a_fork(llm: LLM) -> None:
    """Its child would wait for ever for the engine's thread, and for those of the kernels with an engine of its own."""
    for call in (lambda: llm.generate("ROMEO:", stopping=TWO), lambda: LLM(kv_cache_memory=2**24)):
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            signal.alarm(30)
            try:
                call()
            except RuntimeError as error:
                os.write(write, str(error).encode())
            llm.close()  # as the end of a `with` would
            os._exit(0)
        os.close(write)
        with os.fdopen(read) as said:
            message = said.read()
        assert os.waitpid(child, 0)[1] == 0, "it hung until its alarm"
        assert f"process {os.getpid()} made an LLM and then forked this one" in message
        assert "get_context('spawn')" in message
    assert llm.generate("ROMEO:", stopping=TWO)[0].token_ids, "the parent's goes on"


def test_drafts_change_no_output(llm: LLM) -> None:
    """A text that repeats itself, greedily and drawn."""
    prompt = "First Citizen:\nWe are accounted poor citizens.\nFirst Citizen:\nWe are accounted"
    samplings = [Sampling(temperature=0.0), Sampling(temperature=1.0, seed=3)]
    stopping = Stopping(max_tokens=40)
    plain = [llm.generate(prompt, one, stopping)[0].token_ids for one in samplings]
    with LLM("demo", kv_cache_memory=2**26, speculative_tokens=4) as drafting:
        assert [drafting.generate(prompt, one, stopping)[0].token_ids for one in samplings] == plain


@pytest.mark.parametrize(
    ("beside", "message"),
    [
        ({"recompute": True}, "--speculative-tokens does not go with --recompute"),
        ({"logits_processors": [lambda prompt: None]}, "--speculative-tokens does not go with --logits-processors"),
    ],
    ids=["recompute", "logits processors"],
)
def test_drafts_are_refused_beside_what_they_do_not_go_with(beside: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LLM("demo", speculative_tokens=2, **beside)


def test_ends_that_depend_on_a_constraint(llm: LLM) -> None:
    """As from a server: `tests/rpc/test_constrained_ends.py` has the rules."""
    words, most = Structured.regex("[a-z]{3}(,[a-z]{3})*"), Stopping(max_tokens=40)
    whole = llm.generate("ROMEO:", Sampling(seed=3), most, structured=words)[0]
    assert str(whole.finish) in ("stop", "closed")
    assert re.fullmatch("[a-z]{3}(,[a-z]{3})*", whole.text)
    stops = (whole.text[1], ",")  # the first stands within the first word
    cut = llm.generate("ROMEO:", Sampling(seed=3), Stopping(max_tokens=40, stop=stops), structured=words)[0]
    assert whole.text.startswith(cut.text)
    assert (str(cut.finish), cut.finish.stop_string, len(cut.text) % 4) == ("stop", ",", 3)
    several = llm.generate(
        "ROMEO:", Sampling(seed=4, sequence_count=3), Stopping(max_tokens=4), structured=Structured.regex("[a-z ]+")
    )[0]
    assert {str(one.finish) for one in several.sequences} == {"closed"}
