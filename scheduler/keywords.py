"""Explains unknown keyword arguments: says where Quire has what another engine calls so.

Scripts come from vLLM, whose `SamplingParams` hold what is `Sampling`, `Stopping` and `Output` here.
"""

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C")

NOT_HERE = "Quire does not have it"
REQUEST_KEYWORDS = {
    "allowed_token_ids": "Sampling(allowed_token_ids=...)",
    "bad_words": "Sampling(bad_words=...)",
    "beam": "Sampling(beam=Beam(...))",
    "beam_width": "Sampling(beam=Beam(width=...))",
    "best_of": NOT_HERE,
    "detokenize": "Output(text=...)",
    "extra_args": NOT_HERE,
    "frequency_penalty": "Sampling(frequency_penalty=...)",
    "guided_decoding": NOT_HERE,
    "ignore_eos": "Stopping(ignore_eos=...)",
    "include_stop": "Stopping(include_stop=...)",
    "include_stop_str_in_output": "Stopping(include_stop=...)",
    "length_penalty": "Sampling(beam=Beam(length_penalty=...))",
    "logit_bias": "Sampling(logit_bias=...)",
    "logits_processors": "LLM(logits_processors=...), which holds for all requests",
    "logprobs": "Output(logprobs=True), with alternatives Output(top_logprobs=...)",
    "max_tokens": "Stopping(max_tokens=...)",
    "min_p": "Sampling(min_p=...)",
    "min_tokens": "Stopping(min_tokens=...)",
    "n": "Sampling(sequence_count=...)",
    "output_kind": NOT_HERE,
    "presence_penalty": "Sampling(presence_penalty=...)",
    "prompt_logprobs": "Output(prompt_logprobs=True), with alternatives Output(top_logprobs=...)",
    "prompt_token_ids": "Output(prompt_token_ids=...)",
    "repetition_penalty": "Sampling(repetition_penalty=...)",
    "seed": "Sampling(seed=...)",
    "sequence_count": "Sampling(sequence_count=...)",
    "skip_special_tokens": "Output(skip_special_tokens=...)",
    "spaces_between_special_tokens": NOT_HERE,
    "stop": "Stopping(stop=...)",
    "stop_token_ids": "Stopping(stop_token_ids=...)",
    "structured_outputs": NOT_HERE,
    "temperature": "Sampling(temperature=...)",
    "text": "Output(text=...)",
    "token_ids": "Output(token_ids=...)",
    "top_k": "Sampling(top_k=...)",
    "top_logprobs": "Output(top_logprobs=...)",
    "top_p": "Sampling(top_p=...)",
    "truncate_prompt_tokens": NOT_HERE,
    "use_beam_search": "Sampling(beam=Beam(...))",
}
"""By the name in vLLM or here, what to write."""


def explain_keywords(name: str, hints: Mapping[str, str]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Makes a function raise a TypeError with the hint for each unknown keyword that has one.

    Args:
        name: The function as its caller writes it.
        hints: By keyword, what to write in its place.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        known = frozenset(inspect.signature(function).parameters)

        @wraps(function)
        def call(*args: P.args, **keywords: P.kwargs) -> R:
            if not known.issuperset(keywords) and (found := [k for k in keywords if k not in known and k in hints]):
                raise TypeError(f"{name} has no " + "; no ".join(f"{keyword}: {hints[keyword]}" for keyword in found))
            return function(*args, **keywords)

        return call

    return decorate


def explain_fields(cls: type[C]) -> type[C]:
    """The same for a dataclass of a request."""
    cls.__init__ = explain_keywords(f"{cls.__name__}()", REQUEST_KEYWORDS)(cls.__init__)  # type: ignore[method-assign, misc]
    return cls
