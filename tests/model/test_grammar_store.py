"""Compiled grammars of an engine: each request gets its own, however many wait, and none outlives its bound."""

import json
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import llguidance
import numpy as np
import pytest
import torch
from llguidance import LLMatcher, LLTokenizer

from model.errors import CheckpointError, RequestFault
from model.sampling.readiness import FactoryReadiness
from model.sampling.sources import ProcessorSources
from model.simulated.grammars import GrammarReadiness
from model.structured import grammar_mask
from model.structured.compiled_grammar import CompiledGrammar
from model.structured.forbidding import apply_masks
from model.structured.grammar_mask import GrammarMask
from model.structured.grammar_store import MOST_CACHED, MOST_TEXT, GrammarStore
from model.structured.held_grammars import HeldGrammars
from model.structured.vocabulary import load_vocabulary
from scheduler.controls import Controls, LogitsParams
from scheduler.events import Ready
from scheduler.request import Request
from tests.model.test_grammars import TOKENS
from tests.support.checkpoints import byte_tokenizer
from tests.support.processes import wait_until
from tests.support.sentence_pieces import SETTINGS, load


@pytest.fixture
def store() -> Iterator[GrammarStore]:
    made = GrammarStore(lambda: TOKENS)
    yield made
    made.close()


def grammar(number: int) -> str:
    return f'start: "{number}"'


def wait_ready(store: GrammarStore, text: str, salt: str = "") -> None:
    wait_until(lambda: store.ready(text, salt), "its compilation")


def test_all_that_requests_wait_for_become_ready(store: GrammarStore) -> None:
    """More than are cached otherwise."""
    keys = [(grammar(number), "") for number in range(2 * MOST_CACHED)]
    store.await_only(keys)
    wait_until(lambda: all([store.ready(*key) for key in keys]), "all of them")  # noqa: C419 - asks all of them
    store.await_only(())
    wait_ready(store, grammar(-1))
    assert store.count <= MOST_CACHED


def test_one_that_no_request_waits_for_any_more_is_not_compiled() -> None:
    begun, may_end = threading.Event(), threading.Event()

    def slow() -> LLTokenizer:
        begun.set()
        may_end.wait(60)
        return TOKENS

    store = GrammarStore(slow)
    begun.wait(60)
    assert not store.ready(grammar(1), "")
    assert not store.ready(grammar(2), "")
    store.await_only([(grammar(2), "")])
    assert store.count == 1
    may_end.set()
    wait_ready(store, grammar(2))
    store.close()


def test_tenants_share_nothing(store: GrammarStore) -> None:
    wait_ready(store, grammar(1), "a")
    store.ready(grammar(1), "b")
    assert store.count == 2


class Owner:
    """As a request."""


def request_of(text: str) -> Request:
    controls = Controls(1.0, 1.0, 0, 0.0, 0, logits_params=LogitsParams(grammar=text))
    return Request(np.array([1], np.int32), 8, (0,), controls)


def evict_all(store: GrammarStore) -> None:
    for number in range(2):
        wait_ready(store, f'start: "{number}" // {"x" * (MOST_TEXT // 2)}', "others")


@pytest.mark.parametrize("kind", [FactoryReadiness, GrammarReadiness])
def test_a_grammar_that_is_evicted_before_its_admission_is_not_compiled_in_a_step(
    store: GrammarStore, kind: type[FactoryReadiness] | type[GrammarReadiness]
) -> None:
    ask = GrammarReadiness(store) if kind is GrammarReadiness else FactoryReadiness(ProcessorSources((), store))
    asked = {1: request_of(grammar(7)), 2: request_of(grammar(7))}
    wait_until(lambda: [*ask(asked)] == [Ready(1), Ready(2)], "its compilation")
    first = store.compiled(grammar(7), "")
    ask({})

    def compiled_again() -> bool:
        evict_all(store)
        assert store.count == 1
        return store.compiled(grammar(7), "") is not first

    assert not compiled_again()
    del asked[1]
    assert not compiled_again(), "the other request has it still"
    del asked[2]
    assert compiled_again(), "no request has it any more"


def test_grammars_that_requests_hold_have_a_bound() -> None:
    held, done = HeldGrammars(2, 10), Future[CompiledGrammar]()
    owners = [Owner() for _ in range(5)]
    for owner, name, size in zip(owners, "abcab", (4, 7, 6, 4, 6), strict=True):
        held.hold(owner, (name, ""), done, size)
    assert [held.get((name, "")) is done for name in "abc"] == [True, False, True]
    owners.pop(0)
    held.forget_ended()
    assert len(held) == 2, "the other one of its name holds it"
    owners.clear()
    del owner
    held.forget_ended()
    assert len(held) == 0
    held.hold(kept := Owner(), ("b", ""), done, 10)
    assert held.get(("b", "")) is done
    del kept


def test_a_matcher_waits_for_no_queue(store: GrammarStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a grammar that is not held was evicted between its `ready` and its admission."""
    store.opened()
    may_go_on, this = threading.Event(), threading.current_thread()

    def compiled(*arguments: object, **options: object) -> LLMatcher:
        assert threading.current_thread() is this or may_go_on.wait(60)
        return LLMatcher(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(llguidance, "LLMatcher", compiled)
    store.await_only([(grammar(1), ""), (grammar(7), "")])
    assert not store.ready(grammar(1), "")
    assert not store.ready(grammar(7), "")
    assert store.compiled(grammar(7), "").matcher()[0].validate_tokens(TOKENS.tokenize_str("7")) == 1
    may_go_on.set()


def test_long_grammars_are_evicted_sooner(store: GrammarStore) -> None:
    for number in range(9):
        wait_ready(store, f'start: "{number}" // {"x" * (MOST_TEXT // 4)}')
    assert store.count == 3


def test_what_cannot_be_compiled_is_a_fault_of_its_request(
    store: GrammarStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RequestFault, match="unknown name"):
        wait_ready(store, "start: thing")

    class PanicException(BaseException):
        """As a panic of Rust code arrives."""

    def panic(*_: object, **__: object) -> None:
        raise PanicException

    monkeypatch.setattr(llguidance, "LLMatcher", panic)
    with pytest.raises(RequestFault, match="PanicException"):
        wait_ready(store, grammar(1))


@pytest.mark.parametrize("error", [CheckpointError("missing"), ModuleNotFoundError("missing"), OSError("missing")])
def test_a_vocabulary_that_cannot_be_read_is_said_once(caplog: pytest.LogCaptureFixture, error: Exception) -> None:
    def broken() -> LLTokenizer:
        raise error

    store = GrammarStore(broken)
    assert not store.opened()
    assert "structured output is not available: missing" in caplog.text
    store.close()


def test_an_id_that_no_vocabulary_has_is_refused(tmp_path: Path) -> None:
    """The library would take memory for all ids below it, and abort."""
    content = json.loads(byte_tokenizer().to_str())
    content["model"]["vocab"]["a"] = 2**31 - 1
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="a token has id 2147483647, must be below 4194304"):
        load_vocabulary(tmp_path, 320, (0,))


def bits(mask: GrammarMask, width: int) -> list[int]:
    logits = torch.zeros(1, width)
    apply_masks(logits, np.zeros(1, np.int64), [mask])
    return torch.isfinite(logits[0]).nonzero()[:, 0].tolist()


def test_a_grammar_whose_tokens_take_long_ends_its_request(store: GrammarStore) -> None:
    """Others wait for one such token, not for all of an output. The third took 0.8 s, and the library has no bound."""
    grammar = "start: " + " | ".join(["start start"] * 300) + ' | "a"'
    mask = GrammarMask.of(LogitsParams(grammar=grammar), store)
    assert mask is not None

    def draw_all() -> None:
        for token in 8 * TOKENS.tokenize_str("a"):
            bits(mask, 320)
            mask.drew(token)

    with pytest.raises(RequestFault, match="its grammar takes more than 50 ms a token"):
        draw_all()


def seconds_of_masks(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Has masks take no processor time but the seconds that are put into the list, the last ones first."""
    clock, took, real = [0.0], list[float](), LLMatcher.unsafe_compute_mask_ptr

    def compute(matcher: LLMatcher, address: int, size: int) -> None:
        clock[0] += took.pop() if took else 0.0
        real(matcher, address, size)

    monkeypatch.setattr(grammar_mask.time, "thread_time", lambda: clock[0])
    monkeypatch.setattr(LLMatcher, "unsafe_compute_mask_ptr", compute)
    return took


def test_a_slow_moment_of_the_machine_ends_no_request(store: GrammarStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tokens may exceed the bound by 50 ms together."""
    took = seconds_of_masks(monkeypatch)
    mask = GrammarMask.of(LogitsParams(grammar='start: "a" start | "b"'), store)
    assert mask is not None
    for seconds in (0.04, 0.07, 0.049, 0.07):
        took[:] = [seconds]
        assert bits(mask, 320)
        mask.drew(TOKENS.tokenize_str("a")[0])
    took[:] = [0.07]
    with pytest.raises(RequestFault, match="more than 50 ms a token"):
        bits(mask, 320)


def test_one_long_pause_of_the_machine_ends_no_request(store: GrammarStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither in a mask, nor where a forced text is looked for."""
    took = seconds_of_masks(monkeypatch)
    for pause in ([2.0], [2.0, 0.0], [2.0, 0.0, 0.0]):
        mask = GrammarMask.of(LogitsParams(grammar='start: "a forced text" start | "b"'), store)
        assert mask is not None
        mask.drew(TOKENS.tokenize_str("a")[0])
        took[:] = pause
        assert bits(mask, 320)
        assert mask.jump()


@pytest.mark.parametrize("width", [257, 300, 320, 400])
def test_logits_may_be_narrower_or_wider_than_the_tokenizer(tmp_path: Path, width: int) -> None:
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    store = GrammarStore(lambda: load_vocabulary(tmp_path, width, (0,)))
    mask = GrammarMask.of(LogitsParams(grammar='start: "a"'), store)
    assert mask is not None
    assert bits(mask, width) == TOKENS.tokenize_str("a")
    store.close()


@pytest.mark.sample(4)
@pytest.mark.parametrize("width", [600, 704, 1000])
@pytest.mark.parametrize("name", SETTINGS)
def test_an_end_token_of_sentence_pieces_ends_and_is_no_text(tmp_path: Path, name: str, width: int) -> None:
    """Also a piece that its model calls a word."""
    tokenizer = load(tmp_path, name)
    end = tokenizer.encode("the", False)[-1]
    store = GrammarStore(lambda: load_vocabulary(tmp_path, width, (end,)))
    mask = GrammarMask.of(LogitsParams(grammar="start: /(?s:.){3}/"), store)
    assert mask is not None
    allowed = bits(mask, width)
    assert allowed
    assert end not in allowed
    assert all(len(tokenizer.bytes_of(token)) <= 12 for token in allowed if token < tokenizer.size)
    store.close()


def test_the_end_token_that_the_model_prefers_is_drawn(tmp_path: Path) -> None:
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    store = GrammarStore(lambda: load_vocabulary(tmp_path, 320, (0, 5, 9)))
    mask = GrammarMask.of(LogitsParams(grammar="start: /b/"), store)
    assert mask is not None
    mask.drew(TOKENS.tokenize_str("b")[0])
    logits = torch.zeros(1, 320)
    logits[0, 5], logits[0, 9] = 2.0, -torch.inf
    apply_masks(logits, np.zeros(1, np.int64), [mask])
    assert torch.isfinite(logits[0]).nonzero()[:, 0].tolist() == [0, 5, 9]
    assert logits[0].argmax() == 5
    store.close()
