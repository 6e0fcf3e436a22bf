"""Requests to every engine: token ids drawn from a seed, greedy, outputs of a fixed length.

The requests of W1 to W4 arrive at once. Those of W5@RATE arrive as a Poisson process of RATE a second. P512 is one
prompt. Requests of `structured` are drawn at temperature 1, and their outputs may have a JSON schema. Each round has a
seed of its own, so that no prefix cache has the prompts of a later one.
"""

import json
import random
from dataclasses import dataclass

from bench.schemas import VARIED, Schema, endless

LOWEST, HIGHEST = 300, 16_000  # ids below every vocabulary, and above special ones
FREE = "free"
"""Stands for no schema."""


@dataclass(frozen=True, slots=True)
class PeerRequest:
    """One request.

    Attributes:
        prompt: Token ids.
        tokens: Tokens to generate.
        arrives: Seconds from the workload's start.
        seed: Seed of its draws at temperature 1. None takes the most likely token.
        schema: JSON schema of its output, as JSON, which may end it before it has `tokens`; "" for none.
    """

    prompt: list[int]
    tokens: int
    arrives: float = 0.0
    seed: int | None = None
    schema: str = ""


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests of one run.

    Attributes:
        name: Name, as in `build`.
        about: Description.
        requests: Requests in order of arrival.
        together: Requests that run at once.
        shared: Tokens at the front of each prompt that all share.
    """

    name: str
    about: str
    requests: list[PeerRequest]
    together: int
    shared: int = 0

    @property
    def counted(self) -> int:
        """Tokens whose rate a report gives: those of the outputs, or of the prompts where each output is one token."""
        outputs = sum(asked.tokens for asked in self.requests)
        return outputs if outputs > len(self.requests) else sum(len(asked.prompt) for asked in self.requests)


def build(name: str, seed: int) -> Workload:
    """Makes a workload. Raises KeyError for an unknown name, ValueError for W5 without a rate."""
    kind, _, rest = name.partition("@")
    source = random.Random(f"{name} {seed}")
    if kind == "W5":
        return _paced(source, float(rest))
    return _structured(source, name) if kind == "json" else BUILDERS[name](source)


def structured(schema: str, requests: int, tokens: int, number: int | None = None) -> str:
    """Returns the name of a workload of requests that run at once, 32 in and at most `tokens` out.

    Args:
        schema: One of `schemas.VARIED`, or FREE for none.
        requests: Number of requests.
        tokens: Most tokens of an output.
        number: Number of the schema, see `schemas.VARIED`. None for an array of schema 0 that no output completes.
    """
    return f"json@{schema},{requests},{tokens},{'' if number is None else number}"


def schema_of(name: str) -> Schema | None:
    """Returns the schema of a workload that `structured` named; None for FREE."""
    schema, _, _, number = name.removeprefix("json@").split(",")
    if schema == FREE:
        return None
    return VARIED[schema](int(number)) if number else endless(VARIED[schema](0))


def _ids(source: random.Random, count: int) -> list[int]:
    return [source.randrange(LOWEST, HIGHEST) for _ in range(count)]


def _mixed(source: random.Random) -> Workload:
    requests = [PeerRequest(_ids(source, source.randint(128, 512)), source.randint(32, 128)) for _ in range(64)]
    return Workload("W1", "64 requests, 128-512 in, 32-128 out, 32 together", requests, 32)


def _single(source: random.Random) -> Workload:
    return Workload("W2", "one request, 128 in, 128 out", [PeerRequest(_ids(source, 128), 128)], 1)


def _prompt(source: random.Random) -> Workload:
    return Workload("P512", "one request, 512 in, 1 out", [PeerRequest(_ids(source, 512), 1)], 1)


def _shared(source: random.Random) -> Workload:
    prefix = _ids(source, 1024)
    requests = [PeerRequest(prefix + _ids(source, 32), 32) for _ in range(32)]
    return Workload("W3", "32 requests, 1,024 shared + 32 own in, 32 out", requests, 32, len(prefix))


def _decode(source: random.Random) -> Workload:
    return Workload("W4", "16 requests, 32 in, 256 out", [PeerRequest(_ids(source, 32), 256) for _ in range(16)], 16)


def _paced(source: random.Random, rate: float) -> Workload:
    arrives, requests = 0.0, list[PeerRequest]()
    for _ in range(48):
        requests.append(PeerRequest(_ids(source, source.randint(128, 512)), source.randint(32, 128), arrives))
        arrives += source.expovariate(rate)
    return Workload(f"W5@{rate:g}", f"48 requests as W1's, {rate:g} a second", requests, 32)


def _structured(source: random.Random, name: str) -> Workload:
    _, count, tokens, _ = name.split(",")
    schema = schema_of(name)
    text = "" if schema is None else json.dumps(schema)
    requests = [
        PeerRequest(_ids(source, 32), int(tokens), seed=source.randrange(2**31), schema=text) for _ in range(int(count))
    ]
    return Workload(name, f"{count} requests, 32 in, at most {tokens} out", requests, len(requests))


def _warm(source: random.Random) -> Workload:
    requests = [PeerRequest(_ids(source, 64 + 32 * i), 8) for i in range(6)]
    return Workload("warm", "6 requests, 64-224 in, 8 out", requests, 8)


BUILDERS = {"W1": _mixed, "W2": _single, "W3": _shared, "W4": _decode, "P512": _prompt, "warm": _warm}
