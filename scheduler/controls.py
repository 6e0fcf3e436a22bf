"""Controls of an executor's draws for one sequence."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LogitsParams:
    """Changes of a sequence's logits before its draw. The default changes nothing.

    They are applied in this order: `allowed`, `banned`, `not_yet`, `bias`, the penalties, the bound on reasoning, a
    user's processors, and last the constraint, so that none of the others can break it.

    Attributes:
        allowed: Token ids that may be drawn; () for all.
        banned: Sequences of token ids that the output never completes.
        not_yet: Token ids that are not drawn as one of the first `min_tokens`.
        min_tokens: Tokens of output, 0 or more.
        bias: (token id, what is added to its logit).
        repetition: Divides or multiplies logits of tokens that are in the prompt or the output; 1 changes nothing.
        frequency: Is subtracted for each time that a token is in the output.
        presence: Is subtracted once where a token is in the output.
        processors_args: (name, JSON object) of a user's own processors.
        grammar: A constraint on the whole output (`model.inputs.grammars`); "" for none.
        grammar_salt: Names those who share the grammar's compiled form.
        grammar_tokens: Tokens within which the output is closed; 0 where it may be cut off.
        grammar_short: Tokens of a short output that the grammar allows.
        reasoning_tokens: Most tokens of reasoning; -1 for any number.
        reasoning_begin: Token ids that reasoning stands behind.
        reasoning_end: Token ids that reasoning ends with.
        reasons: The output begins within reasoning.
        reasons_again: Reasoning may begin later too.
        grammar_stops: Token ids that end an output with a grammar as end tokens do.
    """

    allowed: tuple[int, ...] = ()
    banned: tuple[tuple[int, ...], ...] = ()
    not_yet: tuple[int, ...] = ()
    min_tokens: int = 0
    bias: tuple[tuple[int, float], ...] = ()
    repetition: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0
    processors_args: tuple[tuple[str, str], ...] = ()
    grammar: str = ""
    grammar_salt: str = ""
    grammar_tokens: int = 0
    grammar_short: int = 0
    reasoning_tokens: int = -1
    reasoning_begin: tuple[int, ...] = ()
    reasoning_end: tuple[int, ...] = ()
    reasons: bool = False
    reasons_again: bool = False
    grammar_stops: tuple[int, ...] = ()


NO_LOGITS_PARAMS = LogitsParams()


@dataclass(frozen=True, slots=True)
class Controls:
    """Controls of the draws for one sequence.

    Attributes:
        temperature: Divides logits; 0 draws the likeliest token.
        top_p: Least part of the probability that is left, in (0, 1]; 1 leaves all.
        top_k: Count of the likeliest tokens that are left; 0 leaves all.
        min_p: Least part of the likeliest token's probability, in [0, 1]; 0 leaves all.
        seed: Of the draws, with a position.
        top_logprobs: Alternatives with their logprobs; 0 for the drawn token's logprob alone, -1 for none.
        logits_params: Changes of the logits before the draw.
        prompt_logprobs: Whether logprobs of the prompt's tokens are wanted.
    """

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    top_logprobs: int = -1
    logits_params: LogitsParams = NO_LOGITS_PARAMS
    prompt_logprobs: bool = False
