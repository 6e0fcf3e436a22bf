"""Compiled grammars: what outputs share is found once, and masks of several threads do not wait for each other."""

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from llguidance import LLMatcher

from model.errors import RequestFault
from model.inputs.matcher import Matcher
from model.structured import compiled_grammar, grammar_store
from model.structured.closing import Closing
from model.structured.compiled_grammar import TRIES, CompiledGrammar
from model.structured.forcing import Bits, Forcing
from model.structured.grammar_mask import GrammarMask
from model.structured.grammar_store import GrammarStore
from model.structured.held_grammars import HeldGrammars
from model.structured.next_tokens import DEEPEST, MOST_KEPT, Openings, next_tokens
from scheduler.controls import LogitsParams
from tests.model.test_grammars import TOKENS
from tests.support.processes import wait_until

GRAMMAR = 'start: /[a-c]+/ "!"'
MATCHER = LLMatcher(TOKENS, GRAMMAR)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[GrammarStore]:
    """Compiles a grammar again for each of its masks."""
    monkeypatch.setattr(compiled_grammar, "WORTH", 0.0)
    made = GrammarStore(lambda: TOKENS, threads=3)
    yield made
    made.close()


def mask_of(store: GrammarStore, grammar_tokens: int = 0) -> GrammarMask:
    made = GrammarMask.of(LogitsParams(grammar=GRAMMAR, grammar_tokens=grammar_tokens, grammar_short=2), store)
    assert made is not None
    return made


def times(store: GrammarStore) -> int:
    return store.compiled(GRAMMAR, "").times


def test_rows_have_as_many_matchers_as_threads_compute_masks(store: GrammarStore) -> None:
    first = mask_of(store)
    wait_until(lambda: times(store) == 3, "two more")
    masks = [mask_of(store) for _ in range(6)]
    assert len({mask.lock for mask in masks}) == 3
    assert all((mask.mask() == first.mask()).all() for mask in masks)
    assert times(store) == 3


def test_one_whose_masks_take_no_time_is_compiled_once(store: GrammarStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_grammar, "WORTH", 1.0)
    compiled = store.compiled(GRAMMAR, "")
    asked = list[int]()
    compiled.took(0.99)
    compiled.compile_again(3, lambda: asked.append(1))
    assert not asked
    compiled.took(0.02)
    compiled.compile_again(1, lambda: asked.append(1))
    assert not asked, "one thread never waits"
    for _ in range(2):
        compiled.compile_again(3, lambda: asked.append(1))
    assert asked == [1], "until that one is there"


def test_each_compilation_counts_against_the_bound(store: GrammarStore, monkeypatch: pytest.MonkeyPatch) -> None:
    mask_of(store)
    wait_until(lambda: times(store) == 3, "two more")
    monkeypatch.setattr(grammar_store, "MOST_TEXT", 3 * len(GRAMMAR))
    wait_until(lambda: store.ready(GRAMMAR + " ", ""), "another grammar")
    assert store.count == 1, "the other took the place of all three"
    wait_until(lambda: store.ready('start: "a"', ""), "a third one")
    assert store.count == 2


def test_a_completion_from_the_start_is_searched_once_for_each_end_of_reasoning() -> None:
    searched = list[tuple[int, ...]]()

    def find(matcher: Matcher, room: int, reasoning_end: Sequence[int]) -> list[int] | None:
        searched.append((*reasoning_end,))
        return [7, *reasoning_end]

    compiled = CompiledGrammar(MATCHER, find)
    assert [compiled.path(end) for end in [(), (3,), (), (3,)]] == [[7], [7, 3], [7], [7, 3]]
    assert searched == [(), (3,)]


def test_threads_that_ask_at_once_get_what_one_of_them_finds() -> None:
    searched, begun = list[int](), threading.Barrier(3, timeout=60)

    def find(matcher: Matcher, room: int, reasoning_end: Sequence[int]) -> list[int] | None:
        searched.append(room)
        return [7]

    compiled = CompiledGrammar(MATCHER, find)

    def ask(_: int) -> list[int] | None:
        begun.wait()
        return compiled.path()

    with ThreadPoolExecutor(3) as threads:
        assert [*threads.map(ask, range(3))] == [[7]] * 3
    assert len(searched) == 1


def test_a_search_that_finds_nothing_is_tried_again_and_then_no_more() -> None:
    searched = list[int]()

    def find(matcher: Matcher, room: int, reasoning_end: Sequence[int]) -> list[int] | None:
        searched.append(room)
        return None

    compiled = CompiledGrammar(MATCHER, find)
    assert [compiled.path() for _ in range(5)] == [None] * 5
    assert len(searched) == TRIES


def test_the_compiler_searches_for_outputs_that_are_closed_and_the_step_does_not(
    store: GrammarStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_until(lambda: store.ready(GRAMMAR, "", ()), "its compilation")
    searched = list[object]()
    find = type(store.completions).find

    def counted(self: object, *arguments: object) -> list[int] | None:
        searched.append(arguments)
        return find(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(type(store.completions), "find", counted)
    path = store.compiled(GRAMMAR, "").path()
    assert path is not None
    for most in (len(path), 500):  # an output that is closed from its first token on, and one that is not yet
        mask = mask_of(store, most)
        mask.mask()
        assert mask.settled(path[0]) == path[0]
        mask.drew(path[0])
    assert not searched


def test_a_search_that_fails_ends_its_request_alone(store: GrammarStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an error of the library's Rust code does, which is no Exception."""

    class Panic(BaseException):
        pass

    def find(*_: object) -> None:
        raise Panic

    monkeypatch.setattr(type(store.completions), "find", find)
    with pytest.raises(RequestFault, match="structured_output cannot be completed: Panic"):
        wait_until(lambda: store.ready(GRAMMAR, "", ()), "its compilation")
    wait_until(lambda: store.ready(GRAMMAR, "another tenant"), "one that is not closed")


def test_an_output_that_is_not_closed_has_no_search(store: GrammarStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def find(*_: object) -> None:
        raise AssertionError("a search")

    monkeypatch.setattr(type(store.completions), "find", find)
    wait_until(lambda: store.ready(GRAMMAR, ""), "its compilation")


def looked_at(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Returns a list of the matchers whose masks are computed from now on."""
    found, mask = list[object](), Forcing.mask

    def noted(self: Forcing, matcher: Matcher) -> Bits:
        found.append(matcher)
        return mask(self, matcher)

    monkeypatch.setattr(Forcing, "mask", noted)
    return found


def test_the_start_is_looked_at_while_a_grammar_is_compiled(
    store: GrammarStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = store.forcing.mask(MATCHER.deep_copy())
    wait_until(lambda: store.ready(GRAMMAR, ""), "the grammar")
    computed = looked_at(monkeypatch)
    assert (mask_of(store).mask() == expected).all()
    assert not computed


def test_states_behind_a_first_token_are_kept_for_other_outputs(
    store: GrammarStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_until(lambda: store.ready(GRAMMAR, ""), "the grammar")
    first, other = mask_of(store), mask_of(store)
    computed = looked_at(monkeypatch)
    for mask in (first, other):
        for token in TOKENS.tokenize_str("a"):
            mask.drew(token)
    assert (first.mask() == other.mask()).all()
    assert len(computed) == 1


def test_masks_that_are_kept_are_few(store: GrammarStore) -> None:
    opened = Openings()
    for token in range(MOST_KEPT + 2):
        found = next_tokens(MATCHER.deep_copy(), store.forcing, (), 10.0)
        assert found is not None
        opened.keep((token,) * DEEPEST, found)
        opened.keep((token,) * (DEEPEST + 1), found)
    kept = [token for token in range(MOST_KEPT + 2) if opened.get((token,) * DEEPEST) is not None]
    assert kept == [*range(MOST_KEPT)]
    assert all(opened.get((token,) * (DEEPEST + 1)) is None for token in range(MOST_KEPT + 2))


def test_stop_tokens_of_a_request_stay_out_of_the_masks_of_others(store: GrammarStore) -> None:
    grammar = "start: /[a-c]*/"
    wait_until(lambda: store.ready(grammar, ""), "the grammar")
    stop = next(
        token for token in range(TOKENS.vocab_size) if TOKENS.is_special_token(token) and token != TOKENS.eos_token
    )
    stopping = GrammarMask.of(LogitsParams(grammar=grammar, grammar_stops=(stop,)), store)
    other = GrammarMask.of(LogitsParams(grammar=grammar), store)
    assert stopping is not None
    assert other is not None
    assert stopping.mask()[stop >> 5] >> (stop & 31) & 1
    assert not other.mask()[stop >> 5] >> (stop & 31) & 1


FORCED = 'start: "abcabcabc" /[a-c]+/'


def forced_mask(store: GrammarStore, **closed: int) -> GrammarMask:
    wait_until(lambda: store.ready(FORCED, ""), "the grammar")
    made = GrammarMask.of(LogitsParams(grammar=FORCED, **closed), store)
    assert made is not None
    return made


def test_forced_tokens_are_those_of_a_mask_that_shares_nothing(store: GrammarStore) -> None:
    alone = GrammarMask(LLMatcher(TOKENS, FORCED), store.forcing, ends=store.completions.ends)
    assert forced_mask(store).jump() == forced_mask(store).jump() == alone.jump() != []


def test_outputs_with_less_room_get_the_first_of_the_forced_tokens(
    store: GrammarStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = forced_mask(store).jump()
    monkeypatch.setattr(Closing, "undisturbed", 2)
    for least in (forced_mask(store, grammar_tokens=400, grammar_short=4) for _ in range(2)):
        assert least.jump() == whole[:2]
    assert len(whole) > 2


def test_nothing_is_looked_for_where_there_is_no_room(store: GrammarStore, monkeypatch: pytest.MonkeyPatch) -> None:
    made = forced_mask(store, grammar_tokens=400, grammar_short=4)
    monkeypatch.setattr(Closing, "undisturbed", 0)
    computed = looked_at(monkeypatch)
    assert made.jump() == []
    assert not computed


def test_a_search_that_time_ended_is_made_again(store: GrammarStore, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, tokens = forced_mask(store).jump(), Forcing.tokens

    def late(self: Forcing, *args: Any) -> list[int]:
        raise TimeoutError

    other = store.compiled(FORCED + " ", "")
    other.look_at_start(store.forcing, store.completions.ends)
    with monkeypatch.context() as patched:
        patched.setattr(Forcing, "tokens", late)
        first = GrammarMask.of(LogitsParams(grammar=FORCED + " "), store)
        assert first is not None
        assert first.jump() == whole[:1]
    assert Forcing.tokens is tokens
    again = GrammarMask.of(LogitsParams(grammar=FORCED + " "), store)
    assert again is not None
    assert again.jump() == whole


class Owner:
    """Stands for a request."""


def test_a_grammar_that_is_held_counts_as_often_as_it_was_compiled(store: GrammarStore) -> None:
    owners, future = [Owner() for _ in range(3)], Future[CompiledGrammar]()
    future.set_result(store.compiled(GRAMMAR, ""))
    held = HeldGrammars(most=9, most_text=10)
    held.hold(owners[0], ("a", ""), future, 4)
    held.grew(("a", ""), 4)
    held.hold(owners[1], ("b", ""), future, 4)
    assert held.get(("b", "")) is None, "8 and 4 characters are more than 10"
    del owners[0]
    held.forget_ended()
    held.hold(owners[1], ("b", ""), future, 10)
    assert held.get(("b", "")) is future, "all of the first one are given back"
