"""How much of everything a run does, on a GPU and on what is none, where only the script is checked."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Mixed:
    """A load: so many requests, of which so many are there at a time; lengths from .. to."""

    requests: int
    together: int
    prompts: tuple[int, int]
    outputs: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Sizes:
    """copied: bytes. products: rows, inner, columns of each. models: names of `bench.on_gpu.models`, the largest first.
    batches: of decodes with contexts of `context` tokens, of which `steps` steps are timed. prefills: tokens of each.
    step_tokens: of a step. mixed: one load, peers: another, which a second engine gets too. rounds: of each.
    """

    copied: int
    products: tuple[tuple[int, int, int], ...]
    models: tuple[str, ...]
    batches: tuple[int, ...]
    context: int
    steps: int
    prefills: tuple[int, ...]
    step_tokens: int
    mixed: Mixed
    peers: Mixed
    rounds: int


GPU = Sizes(
    copied=2**30,
    products=((8192, 8192, 8192), (4096, 4096, 14336), (8192, 4096, 14336), (16384, 4096, 4096)),
    models=("llama-8b", "qwen3-0.6b", "llama-135m"),
    batches=(1, 32, 128, 256),
    context=1024,
    steps=48,
    prefills=(2048, 8192),
    step_tokens=8192,
    mixed=Mixed(256, 64, (128, 512), (32, 128)),
    peers=Mixed(128, 128, (128, 512), (32, 128)),
    rounds=5,
)
HOST = Sizes(
    copied=2**26,
    products=((512, 512, 512),),
    models=("llama-135m",),
    batches=(1, 4),
    context=48,
    steps=6,
    prefills=(64,),
    step_tokens=256,
    mixed=Mixed(6, 3, (8, 24), (4, 8)),
    peers=Mixed(4, 4, (8, 24), (4, 8)),
    rounds=2,
)


def sizes_for(device: torch.device) -> Sizes:
    return GPU if device.type == "cuda" else HOST
