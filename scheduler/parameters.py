"""The parameters of a request, as one table: how tokens are drawn, when a sequence ends, what comes back.

Each field of `Sampling`, `Stopping` and `Output` but `beam` is an entry; `scheduler.parameter.Parameter` explains its
arguments. The entries drive range checks, the conversion from the API, the gateway, Open Inference, the command line,
the terminal and the reference page. Beside an entry a new parameter needs a field in the API's proto. If executors
draw by it, it also needs one in `scheduler.controls` and one in the engine link's proto.
"""

import json
import math
from dataclasses import dataclass

from scheduler.invalid import require, require_several
from scheduler.keywords import OTHER_KEYWORDS, explain_keywords
from scheduler.parameter import Interval, Parameter, check_ranges, parameter, parameters_of


def is_object(text: str) -> bool:
    """Whether a text is a JSON object, without NaN and infinities."""
    try:
        text.encode()  # lone surrogates cannot be sent to an engine
        return isinstance(json.loads(text, parse_constant=_no_json), dict)
    except (ValueError, AttributeError, RecursionError):
        return False


def _no_json(constant: str) -> object:
    raise ValueError(f"{constant} is none")


@dataclass(frozen=True, slots=True)
class Beam:
    """Beam search in place of sampling.

    Attributes:
        width: Hypotheses that go on at once.
        length_penalty: Exponent of the length in the score, which is the sum of the logprobs / length ^ penalty.
    """

    width: int
    length_penalty: float = 1.0

    def __post_init__(self) -> None:
        w, p = self.width, self.length_penalty
        require(w >= 1, "sampling.beam_search.width", w, "must be at least 1")
        require(-10 <= p <= 10, "sampling.beam_search.length_penalty", p, "must be in [-10, 10]")


@dataclass(frozen=True, slots=True)
class Sampling:
    """Parameters of draws; None is the model's default. temperature 0 is greedy; top_k 0 is off.

    The order is vLLM's: allowed_token_ids, bad_words, min_tokens, logit_bias, penalties, temperature, min_p, top_k,
    top_p. The repetition penalty, which counts the prompt too, comes before frequency and presence. top_k keeps ties,
    top_p keeps the token that crosses it. logit_bias: pairs of token id and what is added. allowed_token_ids: () allows
    all.

    logits_processors_args: pairs of a logits processor's name and a JSON object, its keyword arguments.

    sequence_count: outputs for the one prompt, each drawn for itself, or the best that `beam` finds.
    """

    temperature: float | None = parameter(
        None,
        within=Interval(0, 2),
        neutral=0.0,  # to a beam search, which draws nothing
        control="temperature",
        flag="--temperature",
        meaning="0 is greedy. Unset: the model's default.",
    )
    top_p: float | None = parameter(
        None,
        within=Interval(0, 1, above=True),
        neutral=1.0,
        control="top_p",
        flag="--top-p",
        meaning="Nucleus mass in (0, 1].",
    )
    top_k: int | None = parameter(
        None,
        within=Interval(0, 2**32, below=True),
        note="0 is off",
        neutral=0,
        off=-1,
        control="top_k",
        flag="--top-k",
        meaning="Number of likeliest tokens to draw from; 0 is off.",
    )
    min_p: float | None = parameter(
        None,
        within=Interval(0, 1),
        neutral=0.0,
        control="min_p",
        flag="--min-p",
        meaning="Least probability, as a share of the largest one; in [0, 1].",
    )
    seed: int | None = parameter(
        None,
        within=Interval(0, 2**64, below=True),
        control="seed",
        flag="--seed",
        meaning="Makes sampling repeatable.",
    )
    repetition_penalty: float | None = parameter(
        None,
        within=Interval(0, math.inf, above=True, below=True),
        note="1 is off",
        neutral=1.0,
        control="repetition",
        flag="--repetition-penalty",
        meaning="Penalty for tokens of prompt and output; above 0, 1 is off.",
    )
    frequency_penalty: float | None = parameter(
        None,
        within=Interval(-2, 2),
        note="0 is off",
        neutral=0.0,
        control="frequency",
        flag="--frequency-penalty",
        meaning="Penalty for each time that a token is in the output; in [-2, 2].",
    )
    presence_penalty: float | None = parameter(
        None,
        within=Interval(-2, 2),
        note="0 is off",
        neutral=0.0,
        control="presence",
        flag="--presence-penalty",
        meaning="Penalty for a token that is in the output; in [-2, 2].",
    )
    logit_bias: tuple[tuple[int, float], ...] = parameter((), meaning="Added to the logits of tokens; in [-100, 100].")
    allowed_token_ids: tuple[int, ...] = parameter((), meaning="The only tokens that may be generated.")
    bad_words: tuple[str, ...] = parameter(
        (), flag="--bad-word", meaning="Text that is never generated; may be given several times."
    )
    logits_processors_args: tuple[tuple[str, str], ...] = parameter(
        (), vllm="", meaning="Parameters of the server's logits processors: by name, a JSON object."
    )
    sequence_count: int = parameter(1, vllm="n", meaning="Sequences of the one prompt.")
    beam: Beam | None = None

    def __post_init__(self) -> None:
        check_ranges(self)
        require_several("sampling.logit_bias", self.logit_bias, "((5, -1.0), ...), pairs of token id and bias")
        for token, bias in self.logit_bias:
            require(-100.0 <= bias <= 100.0, f"sampling.logit_bias[{token}]", bias, "must be in [-100, 100]")
        require_several("sampling.allowed_token_ids", self.allowed_token_ids, "(5, ...)")
        require_several("sampling.bad_words", self.bad_words, "('word', ...)")
        for i, word in enumerate(self.bad_words):
            require(word.strip() != "", f"sampling.bad_words[{i}]", word, "must not be empty")
        name, pairs = "sampling.logits_processors_args", self.logits_processors_args
        require_several(name, pairs, """(('name', '{"key": 1}'), ...), pairs of processor and JSON object""")
        require(len(dict(pairs)) == len(pairs), name, f"{len(pairs)} pairs", "has a processor twice")
        for processor, text in pairs:
            require(is_object(text), f"{name}[{processor}]", text, "must be a JSON object")


@dataclass(frozen=True, slots=True)
class Stopping:
    """Conditions that end a sequence.

    Attributes:
        max_tokens: None for as many as context and pool allow.
        min_tokens: Before this number of tokens no other condition ends the sequence.
    """

    max_tokens: int | None = parameter(
        None, within=Interval(1, math.inf), flag="--max-tokens", meaning="Most tokens to generate. Unset: what fits."
    )
    min_tokens: int = parameter(
        0, within=Interval(0, math.inf), flag="--min-tokens", meaning="Least tokens before any condition ends it."
    )
    stop: tuple[str, ...] = parameter((), flag="--stop", meaning="Stop string; may be given several times.")
    stop_token_ids: tuple[int, ...] = parameter((), meaning="Tokens that end a sequence, beside the model's own.")
    include_stop: bool = parameter(
        False, vllm="include_stop_str_in_output", meaning="The text keeps the stop string that ended it."
    )
    ignore_eos: bool = parameter(False, meaning="Go on past the model's end tokens.")

    def __post_init__(self) -> None:
        check_ranges(self)
        n, least = self.max_tokens, self.min_tokens
        require(n is None or least <= n, "stopping.min_tokens", least, f"must be at most max_tokens, which is {n}")
        require_several("stopping.stop_token_ids", self.stop_token_ids, "(5, ...)")
        require_several("stopping.stop", self.stop, "('text', ...)")
        for i, text in enumerate(self.stop):
            require(text != "", f"stopping.stop[{i}]", text, "must not be empty")


@dataclass(frozen=True, slots=True)
class Output:
    """Parts of a response.

    Attributes:
        top_logprobs: Alternatives at each position; more than 0 implies logprobs.
        prompt_logprobs: Logprobs of the prompt too, with as many alternatives. The whole prompt is computed then, also
            where it is cached.
    """

    text: bool = parameter(True, vllm="detokenize", meaning="The text.")
    token_ids: bool = parameter(False, vllm="", meaning="The generated token ids.")
    logprobs: bool = parameter(False, meaning="The logprob of each generated token.")
    top_logprobs: int = parameter(0, vllm="", meaning="Alternatives at each position; more than 0 implies logprobs.")
    prompt_logprobs: bool = parameter(False, meaning="Logprobs of the prompt too, with as many alternatives.")
    skip_special_tokens: bool = parameter(True, meaning="The text leaves special tokens out.")
    prompt_token_ids: bool = parameter(False, vllm="", meaning="The prompt's token ids.")
    raw_text: bool = parameter(
        False,
        vllm="",
        meaning="Of a conversation: reasoning and tool calls stay in the text, as the model writes them.",
    )


GROUPS = (Sampling, Stopping, Output)
PARAMETERS: tuple[Parameter, ...] = tuple(entry for group in GROUPS for entry in parameters_of(group))

REQUEST_KEYWORDS = {
    keyword: f"{group.__name__}({entry.name}=...)"
    for group in GROUPS
    for entry in parameters_of(group)
    for keyword in (entry.name, entry.vllm)
    if keyword
} | OTHER_KEYWORDS
"""Hints by the name in vLLM or here: what to write."""

for group in GROUPS:
    group.__init__ = explain_keywords(f"{group.__name__}()", REQUEST_KEYWORDS)(group.__init__)  # type: ignore[method-assign, misc]
