"""The distribution that a simulated model has at each position, and draws from it.

It has `CANDIDATES` tokens, whose logits fall by `FALL` from one to the next; all other tokens stand `FLOOR` below the
likeliest. Which tokens are candidates depends on the prompt and the position, and the draw on the seed, the sequence's
index and the position too. So greedy output is a function of the prompt alone, as a model's is, and all output is the
same in any batch, after a preemption, and on another engine.
"""

from hashlib import blake2b
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from scheduler.controls import Controls

Ints = NDArray[np.int64]
Keys = NDArray[np.uint64]
Floats = NDArray[np.float64]

VOCABULARY = 2050
FIRST_WORD, WORDS = 257, 1791
"""Tokens of the tokenizer that are text by themselves; before them are an end token and single bytes."""
END = 2049

CANDIDATES, FALL, FLOOR = 64, 0.5, -50.0
STRIDE = 577  # has no factor in common with WORDS, so the candidates are different tokens
SPREAD = 0.7  # of the logarithm of an output's length

LOGITS = -FALL * np.arange(CANDIDATES, dtype=np.float64)
LOGPROBS = (LOGITS - np.log(np.exp(LOGITS).sum())).astype(np.float32)

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
MIXERS = ((30, np.uint64(0xBF58476D1CE4E5B9)), (27, np.uint64(0x94D049BB133111EB)))
DRAWS, LENGTHS = np.uint64(1), np.uint64(2)  # parts of a key, so that two uses of one are independent


def mix(keys: Keys) -> Keys:
    """Computes SplitMix64 of each key, as `model.sampling.random` does."""
    z = keys + GOLDEN
    for shift, factor in MIXERS:
        z = (z ^ (z >> np.uint64(shift))) * factor
    return z ^ (z >> np.uint64(31))


def uniform(keys: Keys) -> Floats:
    """Returns a number in [0, 1) for each key."""
    return np.asarray((mix(keys) >> np.uint64(11)) * 2.0**-53, np.float64)


def prompt_key(prompt: NDArray[np.int32]) -> np.uint64:
    """Returns the key of a prompt."""
    return np.uint64(int.from_bytes(blake2b(np.ascontiguousarray(prompt).tobytes(), digest_size=8).digest(), "little"))


def draw_key(prompt: np.uint64, controls: Controls, index: int) -> np.uint64:
    """Returns the key of a sequence's draws. Greedy draws depend on the prompt alone."""
    if controls.temperature == 0:
        return prompt
    seed = mix(np.array([controls.seed % 2**64], np.uint64)) ^ np.uint64(index)
    return np.uint64(mix(seed)[0] ^ prompt)


def output_length(key: np.uint64, mean: float) -> int:
    """Returns after how many tokens a sequence draws the end token, lognormal with this mean. key: of its draws."""
    part = float(uniform(np.array([key], np.uint64) ^ LENGTHS)[0])
    normal = NormalDist(np.log(mean) - SPREAD**2 / 2, SPREAD).inv_cdf(min(max(part, 1e-12), 1 - 1e-12))
    return max(1, round(float(np.exp(normal))))


def likeliest(prompts: Keys, positions: Ints) -> Ints:
    """Returns the place among the words of the likeliest candidate, [n].

    Args:
        prompts: [n] uint64. Key of each prompt.
        positions: [n] int64. Output position of each.
    """
    return (mix(prompts ^ mix(positions.astype(np.uint64))) % np.uint64(WORDS)).astype(np.int64)


def candidates(first: Ints, ranks: Ints) -> Ints:
    """Returns the ids of candidates.

    Args:
        first: Place of the likeliest one, as `likeliest` returns it.
        ranks: Place of each among the candidates, from 0. Both are broadcast.
    """
    return FIRST_WORD + (first + STRIDE * ranks) % WORDS


def draw_noise(draws: Keys, positions: Ints) -> Floats:
    """Returns the random number of each draw, [n] in [0, 1). Arguments as of `likeliest`, but keys of draws."""
    return uniform(draws ^ mix(positions.astype(np.uint64)) ^ DRAWS)


def cumulative(logits: Floats, controls: Controls) -> Floats:
    """Returns the cumulative probabilities of tokens with these logits, after temperature, min_p, top_k and top_p.

    Args:
        logits: [n] Descending, the first one finite.
        controls: Controls of the draw.
    """
    if controls.temperature == 0:
        return np.ones(len(logits))
    scaled = (logits - logits[0]) / controls.temperature
    weights = np.exp(scaled)
    weights[weights < controls.min_p] = 0.0
    if controls.top_k:
        weights[logits < logits[min(controls.top_k, len(logits)) - 1]] = 0.0
    before = np.cumsum(weights) - weights
    weights[before >= controls.top_p * weights.sum()] = 0.0
    sums = np.cumsum(weights)
    return sums / sums[-1]


def drawn_ranks(sums: Floats, noise: Floats) -> Ints:
    """Returns the place of the drawn token in each row of cumulative probabilities. sums: [n, m]; noise: [n]."""
    return np.minimum((sums <= noise[:, None]).sum(1), sums.shape[1] - 1)
