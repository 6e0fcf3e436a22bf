"""What an engine can serve (`Limits`), and what its model does where a request is silent (`ModelDefaults`)."""

from dataclasses import dataclass, field

from scheduler.settings import RequestLimits


@dataclass(frozen=True, slots=True)
class Limits:
    """What an engine can serve, as its frontends need it.

    vocabulary: width of the logits. context: longest prompt + output of the model. pool_tokens: tokens the KV pool
    holds.
    """

    vocabulary: int
    context: int
    pool_tokens: int
    sequences: int
    request: RequestLimits = field(default_factory=RequestLimits)

    @property
    def longest(self) -> int:
        """Longest prompt + output: the last token of an output is never fed, so it needs no slot."""
        return min(self.context, self.pool_tokens + 1)


@dataclass(frozen=True, slots=True)
class ModelDefaults:
    """From generation_config.json: what holds where a request is silent."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    eos_token_ids: tuple[int, ...] = ()
