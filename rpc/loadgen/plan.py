"""The requests of a load, one after the other, each made as it is wanted.

The same settings give the same ones, but for the text of prompts: it is the same only for the same prompt seed, for a
server may still have in its prefix cache what it was asked before.
"""

import secrets
from collections.abc import Iterator
from itertools import count, islice, repeat, takewhile

import numpy as np

from rpc.loadgen.arrivals import arrival_times
from rpc.loadgen.corpus import Corpus
from rpc.loadgen.settings import LoadSettings
from rpc.loadgen.traces import BLOCK, Arrival, read_trace, scaled, shrink_of
from rpc.loadgen.wire import Request

WARM_UP = 2**32
"""Numbers of requests that warm up begin here; so their seeds are others."""
ANYWHERE = 2**62


class Plan:
    """context: of the model, None: unknown. prompt_seed: the one in force, also where the settings have none. Raises
    ValueError where requests cannot fit, and as `read_trace` does.
    """

    def __init__(self, settings: LoadSettings, corpus: Corpus, context: int | None) -> None:
        self._settings, self._corpus = settings, corpus
        self.prompt_seed = secrets.randbits(32) if settings.prompt_seed is None else settings.prompt_seed
        self._shared = self._place()
        self.shrink, self._arrivals = 1.0, list[Arrival]()
        if settings.trace is not None:
            read = read_trace(settings.trace, settings.requests)
            context = settings.context or context
            self.shrink = shrink_of(read, context)
            self._arrivals = scaled(read, context, settings.speed or 1.0)
        elif context is not None and (longest := settings.inputs.most + settings.outputs.most) > context:
            raise ValueError(f"prompts and outputs of up to {longest} tokens do not fit a context of {context}")

    @property
    def total(self) -> int | None:
        """How many requests there are; None: until the time is over."""
        return len(self._arrivals) or self._settings.count

    def requests(self) -> Iterator[Request]:
        if self._arrivals:
            return self._of_trace()
        settings = self._settings
        times = (
            repeat(0.0)
            if settings.rate is None
            else arrival_times(settings.rate, settings.burstiness or 1.0, settings.seed or 0)
        )
        numbered = zip(islice(count(), self.total), times, strict=False)
        return (self._drawn(number, at) for number, at in numbered)

    def warm_up(self) -> Iterator[Request]:
        """With the lengths of --input-tokens and --output-tokens, or those that a trace begins with."""
        for i in range(self._settings.warm_up):
            if self._arrivals:
                like = self._arrivals[i % len(self._arrivals)]
                yield self._request(WARM_UP + i, 0.0, like.prompt, like.output, 0)
            else:
                yield self._drawn(WARM_UP + i, 0.0)

    def _drawn(self, number: int, at: float) -> Request:
        source = np.random.default_rng((self._settings.seed or 0, number))
        tokens, output = self._settings.inputs.draw(source), self._settings.outputs.draw(source)
        return self._request(number, at, tokens, output, self._settings.shared_prefix or 0)

    def _request(self, number: int, at: float, tokens: int, output: int, shared: int) -> Request:
        """shared: so many tokens of the prompt are alike in all requests."""
        prompt = self._corpus.prompt([(self._shared, shared), (self._place(number, 1), tokens - shared)])
        return Request(number, prompt, tokens, output, at, shared)

    def _place(self, *name: int) -> int:
        """Where the text of this name begins."""
        return int(np.random.default_rng((self.prompt_seed, *name)).integers(ANYWHERE))

    def _of_trace(self) -> Iterator[Request]:
        known = set[int]()
        for number, arrival in enumerate(self._arrivals):
            if arrival.blocks:
                parts = self._blocks(arrival)
                again = takewhile(lambda part: part[0] in known, zip(arrival.blocks, parts, strict=True))
                shared = sum(length for _, (_, length) in again)
                known.update(arrival.blocks)
                prompt = self._corpus.prompt(parts)
                yield Request(number, prompt, arrival.prompt, arrival.output, arrival.at, shared)
            else:
                yield self._request(number, arrival.at, arrival.prompt, arrival.output, 0)

    def _blocks(self, arrival: Arrival) -> list[tuple[int, int]]:
        """Parts of a prompt: the text of each block, shrunk as all lengths are; the last one is what is left."""
        size, left, parts = max(1, int(BLOCK * self.shrink)), arrival.prompt, list[tuple[int, int]]()
        for i, block in enumerate(arrival.blocks):
            length = left if i == len(arrival.blocks) - 1 else min(size, left)
            parts.append((self._place(block, 2), length))
            left -= length
        return parts
