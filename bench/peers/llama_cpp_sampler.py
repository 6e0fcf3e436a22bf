"""Draws llama.cpp's tokens, with or without a grammar, as its server does (`common_sampler_sample`)."""

import ctypes
import math
from typing import Any

import numpy as np

DATA = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])
"""llama.cpp's `llama_token_data`."""


class LlamaSampler:
    """Draws the tokens of one request at temperature 1. Close it.

    Args:
        lib: Module llama_cpp.
        vocabulary: The model's vocabulary, as `llama_model_get_vocab` returns it.
        seed: Seed of the draws.
        schema: JSON schema of the output, as JSON; "" for none.
    """

    def __init__(self, lib: Any, vocabulary: Any, seed: int, schema: str) -> None:
        self._lib, self._vocabulary = lib, vocabulary
        self._draw = lib.llama_sampler_init_dist(seed)
        self._grammar = self._compile(schema) if schema else None

    def next(self, context: Any, at: int) -> tuple[int, bool]:
        """Draws a token from the logits at a place of a context. Returns it, and whether it ends the output."""
        lib = self._lib
        token = lib.llama_sampler_sample(self._draw, context, at)
        if self._grammar is None:
            return token, False
        if not self._allows(token):
            token = self._masked(lib.llama_get_logits_ith(context, at))
        lib.llama_sampler_accept(self._grammar, token)
        return token, lib.llama_vocab_is_eog(self._vocabulary, token)

    def close(self) -> None:
        for sampler in (self._draw, self._grammar):
            if sampler is not None:
                self._lib.llama_sampler_free(sampler)

    def _compile(self, schema: str) -> Any:
        from llama_cpp.llama_grammar import json_schema_to_gbnf

        grammar = self._lib.llama_sampler_init_grammar(self._vocabulary, json_schema_to_gbnf(schema).encode(), b"root")
        if not grammar:
            raise RuntimeError(f"llama.cpp has no grammar for {schema}")
        return grammar

    def _allows(self, token: int) -> bool:
        one = np.array([(token, 1.0, 0.0)], DATA)
        self._apply(one, self._grammar)
        return bool(one["logit"][0] != -math.inf)

    def _masked(self, logits: Any) -> int:
        """Draws again, with the tokens alone that the grammar allows."""
        count = self._lib.llama_vocab_n_tokens(self._vocabulary)
        data = np.empty(count, DATA)
        data["id"], data["logit"], data["p"] = np.arange(count), np.ctypeslib.as_array(logits, (count,)), 0.0
        return int(data["id"][self._apply(data, self._grammar, self._draw)])

    def _apply(self, data: np.ndarray, *samplers: Any) -> int:
        """Applies samplers to candidates in place; returns the index of the chosen one, -1 without any."""
        lib = self._lib
        pointer = data.ctypes.data_as(ctypes.POINTER(lib.llama_token_data))
        candidates = lib.llama_token_data_array(pointer, len(data), -1, False)
        for sampler in samplers:
            lib.llama_sampler_apply(sampler, ctypes.byref(candidates))
        return candidates.selected


def most_likely(lib: Any, context: Any, at: int, count: int) -> int:
    """Returns the most likely of so many tokens by the logits at a place of a context."""
    return int(np.ctypeslib.as_array(lib.llama_get_logits_ith(context, at), (count,)).argmax())
