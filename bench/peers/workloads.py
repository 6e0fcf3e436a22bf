"""What is asked of every engine: token ids, drawn from a seed, greedy, outputs of a fixed length.

Each round has a seed of its own, so that no engine answers a later one from a prefix cache.
"""

import random
from dataclasses import dataclass

LOWEST, HIGHEST = 300, 16_000  # ids below every vocabulary, and above special ones


@dataclass(frozen=True, slots=True)
class Asked:
    """One request: so many tokens for this prompt."""

    prompt: list[int]
    tokens: int


@dataclass(frozen=True, slots=True)
class Workload:
    """All requests are there at once. together: so many run at one time. shared: of each prompt, alike in all."""

    name: str
    about: str
    requests: list[Asked]
    together: int
    shared: int = 0


def build(name: str, seed: int) -> Workload:
    """Raises KeyError for a name that is none."""
    return BUILDERS[name](random.Random(f"{name} {seed}"))


def _ids(source: random.Random, count: int) -> list[int]:
    return [source.randrange(LOWEST, HIGHEST) for _ in range(count)]


def _mixed(source: random.Random) -> Workload:
    requests = [Asked(_ids(source, source.randint(128, 512)), source.randint(32, 128)) for _ in range(64)]
    return Workload("W1", "64 requests, 128-512 in, 32-128 out, 32 together", requests, 32)


def _single(source: random.Random) -> Workload:
    return Workload("W2", "one request, 128 in, 128 out", [Asked(_ids(source, 128), 128)], 1)


def _shared(source: random.Random) -> Workload:
    prefix = _ids(source, 1024)
    requests = [Asked(prefix + _ids(source, 32), 32) for _ in range(32)]
    return Workload("W3", "32 requests, 1,024 shared + 32 own in, 32 out", requests, 32, len(prefix))


def _decode(source: random.Random) -> Workload:
    return Workload("W4", "16 requests, 32 in, 256 out", [Asked(_ids(source, 32), 256) for _ in range(16)], 16)


def _warm(source: random.Random) -> Workload:
    requests = [Asked(_ids(source, 64 + 32 * i), 8) for i in range(6)]
    return Workload("warm", "6 requests, 64-224 in, 8 out", requests, 8)


BUILDERS = {"W1": _mixed, "W2": _single, "W3": _shared, "W4": _decode, "warm": _warm}
