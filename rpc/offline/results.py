"""Results of prompts that ran in the caller's process."""

from collections.abc import Mapping
from dataclasses import dataclass

from rpc.frontend.errors import RequestFailed
from rpc.frontend.output import Finish, SequenceOutput
from rpc.frontend.stream import RequestStream
from rpc.frontend.token_logprobs import TokenLogprob
from scheduler.tools import ToolCall

MOST_PLACES = 10  # failures that an error's message lists


@dataclass(frozen=True, slots=True)
class Generated:
    """One output sequence of a prompt.

    Attributes:
        text: Generated text; of a conversation, that of the answer.
        token_ids: Generated tokens.
        finish: Reason of its end. `str` of it is "stop", "length", "closed" or "aborted".
        logprobs: Logprobs by token, if asked for: the chosen token first, then alternatives by rank.
        score: Sum of the tokens' logprobs. A beam search divides it by length ^ penalty, and orders results by it.
        reasoning: Reasoning of a conversation's model, which is not in `text`.
        tool_calls: Its tool calls, which are not in `text`.
    """

    text: str
    token_ids: list[int]
    finish: Finish
    logprobs: list[list[TokenLogprob]]
    score: float
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """Result of one prompt. Text, token ids, finish, logprobs and score are those of the first sequence.

    Attributes:
        sequences: Outputs; their number is `Sampling.sequence_count`.
        prompt: Text of the prompt; None if the caller gave token ids or a conversation.
        prompt_token_ids: Token ids of the prompt, placeholders of images among them.
        cached_tokens: Prompt tokens whose KV an earlier prompt left.
        prompt_logprobs: Logprobs by token of the prompt, in the same form; [] for its first token.
    """

    sequences: tuple[Generated, ...]
    prompt: str | None
    prompt_token_ids: list[int]
    cached_tokens: int
    prompt_logprobs: list[list[TokenLogprob]]

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def text(self) -> str:
        return self.sequences[0].text

    @property
    def reasoning(self) -> str:
        return self.sequences[0].reasoning

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        return self.sequences[0].tool_calls

    @property
    def token_ids(self) -> list[int]:
        return self.sequences[0].token_ids

    @property
    def finish(self) -> Finish:
        return self.sequences[0].finish

    @property
    def logprobs(self) -> list[list[TokenLogprob]]:
        return self.sequences[0].logprobs

    @property
    def score(self) -> float:
        return self.sequences[0].score


class PromptsFailed(RequestFailed):
    """Some prompts of a list failed. Code, reason and field are those of the first one.

    Attributes:
        failures: A failed prompt's index in the list, to its error.
        completions: Index to result for the others; empty if the check before the run found the failures.
    """

    def __init__(
        self, kind: str, count: int, failures: Mapping[int, Exception], completions: Mapping[int, Completion]
    ) -> None:
        first = next((f for f in failures.values() if isinstance(f, RequestFailed)), None)
        shown = [f"{kind}[{place}]: {failure}" for place, failure in list(failures.items())[:MOST_PLACES]]
        if len(failures) > MOST_PLACES:
            shown.append(f"and {len(failures) - MOST_PLACES} more, see `failures`")
        rest = "`completions` has the others" if completions else "none was run"
        super().__init__(
            first.code if first else "INVALID_ARGUMENT",
            first.reason if first else "INVALID_FIELD",
            f"{len(failures)} of {count} {kind} failed, {rest}: " + "; ".join(shown),
            first.field if first else "",
        )
        self.failures, self.completions = dict(failures), dict(completions)


def completion_of(stream: RequestStream) -> Completion:
    """Returns the result of a request that has ended.

    Raises:
        RequestFailed: The request failed.
    """
    if stream.failure is not None:
        raise stream.failure
    prompt = stream.spec.prompt
    return Completion(
        tuple(_generated(sequence) for sequence in stream.sequences),
        prompt if isinstance(prompt, str) else None,
        stream.request.prompt.tolist(),
        stream.cached_tokens,
        stream.prompt_logprobs,
    )


def _generated(sequence: SequenceOutput) -> Generated:
    if sequence.finish is None:
        raise RequestFailed("INTERNAL", "NOT_ENDED", "the engine sent no end")
    delta = sequence.take()
    calls = tuple(ToolCall(call.call_id, call.name, call.arguments) for call in delta.calls)
    return Generated(
        delta.text, delta.token_ids, sequence.finish, delta.logprobs, sequence.score, delta.reasoning, calls
    )
