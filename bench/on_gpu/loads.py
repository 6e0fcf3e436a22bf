"""Requests to an engine: random token ids, outputs of a fixed length. A seed determines all of them."""

import random
from dataclasses import dataclass, replace

from bench.on_gpu.sizes import Mixed
from scheduler.controls import NO_LOGITS_PARAMS, Controls

LOWEST = 300  # ids below may be special
GREEDY = Controls(0.0, 1.0, 0, 0.0, 0)
VARIED = (
    GREEDY,
    Controls(1.0, 1.0, 0, 0.0, 1),
    Controls(0.8, 0.9, 20, 0.05, 2),
    Controls(1.0, 0.95, 0, 0.0, 3, top_logprobs=5),
    Controls(0.0, 1.0, 0, 0.0, 4, -1, replace(NO_LOGITS_PARAMS, repetition=1.1, presence=0.5, bias=((7, 1.0),))),
    Controls(0.0, 1.0, 0, 0.0, 5, top_logprobs=0, prompt_logprobs=True),
)
"""Controls of all kinds that change which kernels run."""


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One request: `tokens` output tokens for a prompt of token ids."""

    prompt: list[int]
    tokens: int
    controls: Controls = GREEDY


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


def varied(seed: str, vocabulary: int, requests: int, longest: int) -> list[EngineRequest]:
    """Returns requests of all lengths, with all kinds of controls."""
    source = random.Random(seed)
    return [
        EngineRequest(
            _ids(source, vocabulary, max(1, int(longest ** source.random()))), source.randint(1, 12),
            VARIED[number % len(VARIED)],
        )
        for number in range(requests)
    ]  # fmt: skip


def _ids(source: random.Random, vocabulary: int, count: int) -> list[int]:
    return [source.randrange(LOWEST, vocabulary) for _ in range(count)]
