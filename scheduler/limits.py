"""Limits of an engine (`Limits`), and its model's defaults of request parameters (`ModelDefaults`)."""

from dataclasses import dataclass, field

from scheduler.settings import RequestLimits


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of the requests that an engine can serve, as its frontends need them.

    Attributes:
        vocabulary: Width of the logits.
        context: Longest prompt + output of the model, in tokens.
        pool_tokens: Tokens that the KV pool holds.
        sequences: That run at once.
        logits_processors: Names of the engine's logits processors, beside which there is no beam search.
        structured_output: Whether the engine enforces constraints on outputs.
    """

    vocabulary: int
    context: int
    pool_tokens: int
    sequences: int
    request: RequestLimits = field(default_factory=RequestLimits)
    logits_processors: tuple[str, ...] = ()
    structured_output: bool = False

    @property
    def longest(self) -> int:
        """Longest prompt + output: the last token of an output is never fed, so it needs no slot."""
        return min(self.context, self.pool_tokens + 1)


@dataclass(frozen=True, slots=True)
class ModelDefaults:
    """Defaults of request parameters, from generation_config.json."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    eos_token_ids: tuple[int, ...] = ()
