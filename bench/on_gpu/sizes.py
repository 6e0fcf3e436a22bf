"""Sizes of a run's work, on a GPU, and on other devices, where only the script is checked."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Mixed:
    """A load of random lengths.

    Attributes:
        requests: Number of requests.
        together: Requests at a time.
        prompts: Least and most prompt tokens.
        outputs: Least and most output tokens.
    """

    requests: int
    together: int
    prompts: tuple[int, int]
    outputs: tuple[int, int]


@dataclass(frozen=True, slots=True)
class RunSizes:
    """Sizes of all sections.

    Attributes:
        copied: Bytes of a copy.
        products: Rows, inner dimension and columns of each product.
        models: Names of `bench.on_gpu.models`, the largest first.
        batches: Sequences of each decode.
        context: Tokens of each of these sequences.
        steps: Timed steps of a decode.
        prefills: Tokens of each prefill.
        step_tokens: Most tokens of a step.
        mixed: The mixed load.
        peers: The load of the comparison with transformers.
        rounds: Rounds of each measurement.
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


GPU = RunSizes(
    copied=2**30,
    products=((8192, 8192, 8192), (4096, 4096, 14336), (8192, 4096, 14336), (16384, 4096, 4096)),
    models=("llama-8b", "qwen3-0.6b", "llama-135m", "qwen3-30b-a3b/8"),
    batches=(1, 32, 128, 256),
    context=1024,
    steps=48,
    prefills=(2048, 8192),
    step_tokens=8192,
    mixed=Mixed(256, 64, (128, 512), (32, 128)),
    peers=Mixed(128, 128, (128, 512), (32, 128)),
    rounds=5,
)
HOST = RunSizes(
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


def sizes_for(device: torch.device) -> RunSizes:
    return GPU if device.type == "cuda" else HOST
