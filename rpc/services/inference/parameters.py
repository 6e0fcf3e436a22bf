"""Sampling parameters as vLLM names them.

What is not given is vLLM's default and not the model's own: so Triton's vLLM back end has it.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from rpc.frontend.errors import RequestFailed
from rpc.services.inference.tensors import SHOWN
from rpc.services.inference.values import Values
from scheduler.request import InvalidRequest, Sampling, Stopping

MAX_TOKENS = 16
NEUTRAL: dict[str, object] = {
    "best_of": 1,
    "early_stopping": False,
    "flat_logprobs": False,
    "length_penalty": 1.0,
    "spaces_between_special_tokens": True,
    "use_beam_search": False,
}
"""Parameters that are not here, and what they may be: it changes nothing."""


@dataclass(frozen=True, slots=True)
class Parameters:
    """logprobs, prompt_logprobs: how many alternatives, None: not asked for. text: it is made at all."""

    sampling: Sampling
    stopping: Stopping
    logprobs: int | None
    prompt_logprobs: int | None
    text: bool
    skip_special_tokens: bool

    @property
    def top_logprobs(self) -> int:
        """Enough for both; below 0 where one is."""
        asked = [count for count in (self.logprobs, self.prompt_logprobs) if count is not None]
        return min((count for count in asked if count < 0), default=max(asked, default=0))


def read_parameters(given: Mapping[str, object]) -> Parameters:
    """Raises InvalidRequest, under the names of Spec's fields for what these check, and RequestFailed for a parameter
    that there is not.
    """
    values = Values(given)
    made = Parameters(
        _sampling(values),
        _stopping(values),
        values.integer("logprobs", None),
        values.integer("prompt_logprobs", None),
        values.truth("detokenize", True),
        values.truth("skip_special_tokens", True),
    )
    for name, value in values.left.items():
        if name not in NEUTRAL or value != NEUTRAL[name]:
            shown = name[:SHOWN]
            message = f"{shown} is no sampling parameter here: docs/guides/open-inference.md names those that are"
            raise RequestFailed("INVALID_ARGUMENT", "NOT_SUPPORTED", message, field=shown)
    return made


def _sampling(values: Values) -> Sampling:
    top_k, seed = values.integer("top_k", 0), values.integer("seed", None)
    allowed = values.integers("allowed_token_ids")
    if allowed == ():
        raise InvalidRequest("allowed_token_ids", [], "leaves no token to draw")
    return Sampling(
        temperature=values.number("temperature", 1.0),
        top_p=values.number("top_p", 1.0),
        top_k=0 if top_k == -1 else top_k,
        min_p=values.number("min_p", 0.0),
        seed=None if seed == -1 else seed,
        repetition_penalty=values.number("repetition_penalty", 1.0),
        frequency_penalty=values.number("frequency_penalty", None),
        presence_penalty=values.number("presence_penalty", None),
        logit_bias=values.pairs("logit_bias"),
        allowed_token_ids=allowed or (),
        bad_words=values.texts("bad_words"),
        sequence_count=values.integer("n", 1),
    )


def _stopping(values: Values) -> Stopping:
    return Stopping(
        max_tokens=values.integer("max_tokens", MAX_TOKENS),
        min_tokens=values.integer("min_tokens", 0),
        stop=values.texts("stop"),
        stop_token_ids=values.integers("stop_token_ids") or (),
        include_stop=values.truth("include_stop_str_in_output", False),
        ignore_eos=values.truth("ignore_eos", False),
    )
