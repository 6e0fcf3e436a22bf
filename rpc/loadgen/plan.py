"""Makes the requests of a load, each when it is needed.

Equal settings give equal requests, but for the text of prompts. That depends on the prompt seed, which is a new one for
each load: a server's prefix cache may still have the last load's prompts.
"""

import secrets
from collections.abc import Iterator
from itertools import count, islice, repeat, takewhile

import numpy as np

from rpc.loadgen.arrivals import arrival_times
from rpc.loadgen.corpus import Corpus
from rpc.loadgen.settings import LoadSettings
from rpc.loadgen.traces import Arrival, block_size, read_trace, scaled, shrink_of
from rpc.loadgen.wire import LoadRequest

WARM_UP = 2**32
"""First number of the requests of a warm-up, so that their seeds differ from the load's."""
ANYWHERE = 2**62


class RequestPlan:
    """Requests of one load.

    Args:
        settings: Settings of the load.
        corpus: Text of the prompts.
        context: The model's context in tokens; None if the server does not report it.

    Attributes:
        prompt_seed: Prompt seed of the settings, or a random one.
        shrink: Factor of a trace's lengths; 1 without a trace.

    Raises:
        ValueError: Requests cannot fit the context, or the trace is wrong.
        OSError: The trace cannot be read.
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
        """Number of requests; None if the duration alone ends the load."""
        return len(self._arrivals) or self._settings.count

    def requests(self) -> Iterator[LoadRequest]:
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

    def warm_up(self) -> Iterator[LoadRequest]:
        """Yields the warm-up's requests, with the load's lengths or those of the trace's first requests."""
        for i in range(self._settings.warm_up):
            if self._arrivals:
                like = self._arrivals[i % len(self._arrivals)]
                yield self._request(WARM_UP + i, 0.0, like.prompt, like.output, 0)
            else:
                yield self._drawn(WARM_UP + i, 0.0)

    def _drawn(self, number: int, at: float) -> LoadRequest:
        source = np.random.default_rng((self._settings.seed or 0, number))
        tokens, output = self._settings.inputs.draw(source), self._settings.outputs.draw(source)
        return self._request(number, at, tokens, output, self._settings.shared_prefix or 0)

    def _request(self, number: int, at: float, tokens: int, output: int, shared: int) -> LoadRequest:
        """Returns a request whose first `shared` prompt tokens are the same in all requests."""
        prompt = self._corpus.prompt([(self._shared, shared), (self._place(number, 1), tokens - shared)])
        return LoadRequest(number, prompt, tokens, output, at, shared)

    def _place(self, *name: int) -> int:
        """Returns the start in the corpus for the text of this name."""
        return int(np.random.default_rng((self.prompt_seed, *name)).integers(ANYWHERE))

    def _of_trace(self) -> Iterator[LoadRequest]:
        known = set[int]()
        for number, arrival in enumerate(self._arrivals):
            if arrival.blocks:
                parts = self._blocks(arrival)
                again = takewhile(lambda part: part[0] in known, zip(arrival.blocks, parts, strict=True))
                shared = sum(length for _, (_, length) in again)
                known.update(arrival.blocks)
                prompt = self._corpus.prompt(parts)
                yield LoadRequest(number, prompt, arrival.prompt, arrival.output, arrival.at, shared)
            else:
                yield self._request(number, arrival.at, arrival.prompt, arrival.output, 0)

    def _blocks(self, arrival: Arrival) -> list[tuple[int, int]]:
        """Returns the parts of a prompt, one for each block. Blocks shrink like all lengths; the last has the rest."""
        size, left, parts = block_size(self.shrink), arrival.prompt, list[tuple[int, int]]()
        for i, block in enumerate(arrival.blocks):
            length = left if i == len(arrival.blocks) - 1 else min(size, left)
            parts.append((self._place(block, 2), length))
            left -= length
        return parts
