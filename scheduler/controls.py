"""Controls of an executor's draws for one sequence."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LogitsParams:
    """Changes of a sequence's logits before its draw, in this order. The default changes nothing.

    allowed: token ids that are left, () for all. banned: token sequences that the output never completes. not_yet: ids
    that are not drawn as one of the first `min_tokens`. bias: (id, what is added). repetition, frequency, presence: the
    penalties, of tokens of prompt and output, of how often and of whether a token is in the output. processors_args:
    of a user's own processors, which come after these, (name, JSON object). grammar: a constraint on the whole output,
    which comes last (`model.inputs.grammars`), "" for none. grammar_salt: with whom its compiled form is shared.
    grammar_tokens: within how many tokens its output is closed, 0 for none; grammar_short: tokens of a short output.
    reasoning_tokens: most tokens of reasoning, -1 for any number; it comes before the processors of a user. Reasoning
    is what stands between the tokens `reasoning_begin` and `reasoning_end`; reasons: the output begins within it;
    reasons_again: it may also begin later. grammar_stops: tokens that end an output with a grammar as end tokens do.
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
    """Controls of the draws for one sequence. top_logprobs: -1 none, 0 the drawn token's only."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    top_logprobs: int = -1
    logits_params: LogitsParams = NO_LOGITS_PARAMS
    prompt_logprobs: bool = False
