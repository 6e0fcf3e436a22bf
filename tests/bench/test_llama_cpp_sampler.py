"""Draws of llama.cpp's tokens, with a stub of its library: a free draw first, the grammar's mask only where it must."""

import ctypes
import math
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bench.peers.llama_cpp_sampler import LlamaSampler, most_likely

VOCABULARY, CONTEXT, END = "vocabulary", "context", 0
LOGITS = np.array([0.0, 5.0, 1.0, 2.0, -1.0], np.float32)


class TokenData(ctypes.Structure):
    _fields_ = [("id", ctypes.c_int32), ("logit", ctypes.c_float), ("p", ctypes.c_float)]


class TokenDataArray(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.POINTER(TokenData)), ("size", ctypes.c_size_t), ("selected", ctypes.c_int64),
        ("sorted", ctypes.c_bool),
    ]  # fmt: skip


class StubLibrary:
    """Draws the token of the largest logit; its grammar allows one set of tokens after another."""

    llama_token_data, llama_token_data_array = TokenData, TokenDataArray

    def __init__(self, *allowed: set[int]) -> None:
        self._allowed = list(allowed)
        self.accepted, self.freed, self.sizes = list[int](), list[Any](), list[int]()
        self.grammars = list[tuple[Any, bytes, bytes]]()

    def llama_sampler_init_dist(self, seed: int) -> tuple[str, int]:
        return "draw", seed

    def llama_sampler_init_grammar(self, vocabulary: Any, grammar: bytes, root: bytes) -> str | None:
        self.grammars.append((vocabulary, grammar, root))
        return "grammar" if self._allowed else None

    def llama_sampler_sample(self, sampler: Any, context: Any, at: int) -> int:
        assert (sampler, context, at) == (("draw", 7), CONTEXT, 3)
        return int(LOGITS.argmax())

    def llama_sampler_apply(self, sampler: Any, pointer: Any) -> None:
        candidates = ctypes.cast(pointer, ctypes.POINTER(TokenDataArray)).contents
        data = [candidates.data[i] for i in range(candidates.size)]
        self.sizes.append(len(data))
        if sampler == "grammar":
            for one in data:
                if one.id not in self._allowed[0]:
                    one.logit = -math.inf
            return
        candidates.selected = max(range(len(data)), key=lambda i: data[i].logit)

    def llama_sampler_accept(self, sampler: Any, token: int) -> None:
        assert sampler == "grammar"
        self.accepted.append(token)
        self._allowed.pop(0)

    def llama_sampler_free(self, sampler: Any) -> None:
        self.freed.append(sampler)

    def llama_get_logits_ith(self, context: Any, at: int) -> Any:
        assert (context, at) == (CONTEXT, 3)
        return LOGITS.ctypes.data_as(ctypes.POINTER(ctypes.c_float))

    def llama_vocab_n_tokens(self, vocabulary: Any) -> int:
        assert vocabulary == VOCABULARY
        return len(LOGITS)

    def llama_vocab_is_eog(self, vocabulary: Any, token: int) -> bool:
        assert vocabulary == VOCABULARY
        return token == END


@pytest.fixture(autouse=True)
def converter(monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(json_schema_to_gbnf=lambda schema: f"root ::= {schema}")
    monkeypatch.setitem(sys.modules, "llama_cpp", SimpleNamespace(llama_grammar=module))
    monkeypatch.setitem(sys.modules, "llama_cpp.llama_grammar", module)


def test_without_a_schema_a_draw_is_free() -> None:
    lib = StubLibrary()
    sampler = LlamaSampler(lib, VOCABULARY, 7, "")
    assert sampler.next(CONTEXT, 3) == (1, False)
    sampler.close()
    assert (lib.grammars, lib.sizes, lib.freed) == ([], [], [("draw", 7)])


def test_the_vocabulary_is_masked_only_after_a_forbidden_draw() -> None:
    lib = StubLibrary({1, 2}, {2, 4}, {END})
    sampler = LlamaSampler(lib, VOCABULARY, 7, "{}")
    assert lib.grammars == [(VOCABULARY, b"root ::= {}", b"root")]
    assert sampler.next(CONTEXT, 3) == (1, False)
    assert lib.sizes == [1], "one token is checked"
    assert sampler.next(CONTEXT, 3) == (2, False)
    assert lib.sizes[1:] == [1, len(LOGITS), len(LOGITS)]
    assert sampler.next(CONTEXT, 3) == (END, True)
    assert lib.accepted == [1, 2, END]
    sampler.close()
    assert lib.freed == [("draw", 7), "grammar"]
    assert LOGITS.tolist() == [0.0, 5.0, 1.0, 2.0, -1.0], "the model's own logits stay"


def test_a_schema_that_llama_cpp_refuses_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="no grammar"):
        LlamaSampler(StubLibrary(), VOCABULARY, 7, "{}")


def test_a_request_that_is_not_drawn_gets_the_most_likely_token() -> None:
    assert most_likely(StubLibrary(), CONTEXT, 3, len(LOGITS)) == 1
