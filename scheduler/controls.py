"""How an executor draws for one sequence."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Adjustments:
    """What is done to a sequence's logits before it draws, in this order. The default does nothing.

    allowed: token ids that are left, () for all. banned: token sequences that the output never completes. not_yet: ids
    that are not drawn as one of the first `min_tokens`. bias: (id, what is added). repetition, frequency, presence: the
    penalties, of tokens of prompt and output, of how often and of whether a token is in the output.
    """

    allowed: tuple[int, ...] = ()
    banned: tuple[tuple[int, ...], ...] = ()
    not_yet: tuple[int, ...] = ()
    min_tokens: int = 0
    bias: tuple[tuple[int, float], ...] = ()
    repetition: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0


NO_ADJUSTMENTS = Adjustments()


@dataclass(frozen=True, slots=True)
class Controls:
    """How an executor draws for one sequence. top_logprobs: -1 none, 0 the drawn token's only."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    top_logprobs: int = -1
    adjustments: Adjustments = NO_ADJUSTMENTS
    prompt_logprobs: bool = False
