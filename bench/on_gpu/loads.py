"""What an engine is asked: random token ids, greedy, outputs of a fixed length. A seed says all of it."""

import random
from dataclasses import dataclass

from bench.on_gpu.sizes import Mixed

LOWEST = 300  # ids below may be special


@dataclass(frozen=True, slots=True)
class Asked:
    """So many tokens for this prompt."""

    prompt: list[int]
    tokens: int


def alike(seed: str, vocabulary: int, requests: int, prompt: int, tokens: int) -> list[Asked]:
    """All of the same length."""
    source = random.Random(seed)
    return [Asked(_ids(source, vocabulary, prompt), tokens) for _ in range(requests)]


def mixed(seed: str, vocabulary: int, load: Mixed) -> list[Asked]:
    source = random.Random(seed)
    return [
        Asked(_ids(source, vocabulary, source.randint(*load.prompts)), source.randint(*load.outputs))
        for _ in range(load.requests)
    ]


def _ids(source: random.Random, vocabulary: int, count: int) -> list[int]:
    return [source.randrange(LOWEST, vocabulary) for _ in range(count)]
