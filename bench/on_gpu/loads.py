"""Requests to an engine: random token ids, greedy, outputs of a fixed length. A seed determines all of them."""

import random
from dataclasses import dataclass

from bench.on_gpu.sizes import Mixed

LOWEST = 300  # ids below may be special


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One request: `tokens` output tokens for a prompt of token ids."""

    prompt: list[int]
    tokens: int


def alike(seed: str, vocabulary: int, requests: int, prompt: int, tokens: int) -> list[EngineRequest]:
    """Returns requests of equal lengths."""
    source = random.Random(seed)
    return [EngineRequest(_ids(source, vocabulary, prompt), tokens) for _ in range(requests)]


def mixed(seed: str, vocabulary: int, load: Mixed) -> list[EngineRequest]:
    source = random.Random(seed)
    return [
        EngineRequest(_ids(source, vocabulary, source.randint(*load.prompts)), source.randint(*load.outputs))
        for _ in range(load.requests)
    ]


def _ids(source: random.Random, vocabulary: int, count: int) -> list[int]:
    return [source.randrange(LOWEST, vocabulary) for _ in range(count)]
