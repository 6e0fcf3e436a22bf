"""Explains unknown keyword arguments: names Quire's own for those of another engine.

Scripts come from vLLM, whose `SamplingParams` hold what is `Sampling`, `Stopping` and `Output` here.
"""

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

NOT_HERE = "Quire does not have it"
OTHER_KEYWORDS = {
    "beam": "Sampling(beam=Beam(...))",
    "beam_width": "Sampling(beam=Beam(width=...))",
    "best_of": NOT_HERE,
    "extra_args": "Sampling(logits_processors_args=...)",
    "guided_decoding": NOT_HERE,
    "length_penalty": "Sampling(beam=Beam(length_penalty=...))",
    "logits_processors": "LLM(logits_processors=...), which holds for all requests",
    "logprobs": "Output(logprobs=True), with alternatives Output(top_logprobs=...)",
    "output_kind": NOT_HERE,
    "prompt_logprobs": "Output(prompt_logprobs=True), with alternatives Output(top_logprobs=...)",
    "spaces_between_special_tokens": NOT_HERE,
    "structured_outputs": "generate(structured=Structured.json_schema(...))",
    "truncate_prompt_tokens": NOT_HERE,
    "vllm_xargs": "Sampling(logits_processors_args=...)",
    "use_beam_search": "Sampling(beam=Beam(...))",
}
"""Hints by vLLM's name, where the table of parameters alone has none."""


def explain_keywords(name: str, hints: Mapping[str, str]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Makes a function raise a TypeError with the hint for each unknown keyword that has one.

    Args:
        name: The function as its caller writes it.
        hints: Hints by keyword: what to write in its place.
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
