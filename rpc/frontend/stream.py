"""One request's output as its client sees it: text, stop strings, finish reason, and what was not sent yet.

Knows nothing of threads, time or gRPC. Tokens past a stop string are neither sent nor counted.
"""

from dataclasses import dataclass, field
from enum import Enum

from model.inputs.detokenizer import Detokenizer
from model.inputs.stop_strings import StopStrings
from model.inputs.tokenizer import Tokenizer
from rpc.frontend.errors import RequestFailed, failed_end
from scheduler.events import End, EndReason, Logprobs, PromptPart, StepOutputs
from scheduler.request import Request, Spec


class FinishReason(Enum):
    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"
    DEADLINE = "deadline"


@dataclass(frozen=True, slots=True)
class Finish:
    """Why a sequence ended, and what matched if it was a stop."""

    reason: FinishReason
    stop_token_id: int | None = None
    stop_string: str | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """logprob: natural log, of the raw logits. rank: 1 is the likeliest."""

    token_id: int
    logprob: float
    rank: int


@dataclass(slots=True)
class Delta:
    """New output of a sequence. logprobs: for each token, the chosen first, then alternatives by rank."""

    first_position: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[list[TokenLogprob]] = field(default_factory=list)
    finish: Finish | None = None


class RequestStream:
    """Output of one attempt. `accept` tokens and the engine's `end`; `take` what is new.

    An output prefix is read like tokens that were accepted and taken, so text goes on where it stopped: also in the
    middle of a character or of what may be a stop string. token_count counts it; score does not, its logprobs are gone.
    cached_tokens: of the prompt, those whose KV was there. prompt_logprobs: by token of the prompt, if asked for: the
    token first, then alternatives by rank; nothing for the first token.
    """

    def __init__(self, attempt: int, spec: Spec, request: Request, tokenizer: Tokenizer) -> None:
        self.attempt, self.spec, self.request = attempt, spec, request
        self.token_count = self.cached_tokens = 0
        self.score = 0.0
        self.prompt_logprobs: list[list[TokenLogprob]] = [[]] if request.controls.prompt_logprobs else []
        self.finish: Finish | None = None
        self.failure: RequestFailed | None = None
        self._stop_ids = frozenset(request.stop_ids)
        self._detokenizer = Detokenizer(tokenizer, spec.output.skip_special_tokens) if self._needs_text() else None
        self._stops = StopStrings(spec.stopping.stop, spec.stopping.include_stop)
        self._pending = Delta(0)
        for token in spec.output_prefix:
            self.token_count += 1
            if self._read_token(token):
                break
        self._pending = Delta(self.token_count, finish=self.finish)

    def _needs_text(self) -> bool:
        return self.spec.output.text or bool(self.spec.stopping.stop)

    @property
    def ended(self) -> bool:
        return self.finish is not None or self.failure is not None

    @property
    def pending_tokens(self) -> int:
        """Tokens that wait to be taken."""
        return len(self._pending.token_ids)

    def accept(self, outputs: StepOutputs, i: int) -> bool:
        """Takes the i-th new token of a step. True if a stop string ended the stream with it.

        A token that was there before, or comes after the end, is ignored. Raises ValueError where tokens are missing.
        """
        position = int(outputs.positions[i])
        if self.ended or position < self.token_count:
            return False
        if position > self.token_count:
            raise ValueError(f"attempt {self.attempt}: token {position} came where {self.token_count} was due")
        token = int(outputs.tokens[i])
        self.token_count += 1
        self.score += float(outputs.logprobs.chosen[i])
        self._pending.token_ids.append(token)
        if self.request.controls.top_logprobs >= 0:
            self._pending.logprobs.append(self._logprobs(outputs.logprobs, i, token))
        return self._read_token(token)

    def accept_prompt(self, part: PromptPart) -> None:
        """Takes logprobs of the prompt; what was there before is ignored. Raises ValueError where some are missing."""
        known = len(self.prompt_logprobs)
        if part.start > known:
            raise ValueError(f"attempt {self.attempt}: prompt token {part.start} came where {known} was due")
        for i in range(known - part.start, len(part.logprobs.chosen)):
            token = int(self.request.prompt[part.start + i])
            self.prompt_logprobs.append(self._logprobs(part.logprobs, i, token))

    def _logprobs(self, step: Logprobs, i: int, token: int) -> list[TokenLogprob]:
        chosen = TokenLogprob(token, float(step.chosen[i]), int(step.rank[i]))
        wanted = max(0, self.request.controls.top_logprobs)
        top = zip(step.top_ids[i, :wanted].tolist(), step.top[i, :wanted].tolist(), strict=True)
        return [chosen, *(TokenLogprob(t, p, rank) for rank, (t, p) in enumerate(top, 1) if t != token)]

    def _read_token(self, token: int) -> bool:
        """True if the token's text completes a stop string."""
        if self._detokenizer is None or (token in self._stop_ids and not self.spec.stopping.include_stop):
            return False
        return self._read(self._detokenizer.push(token))

    def _read(self, text: str) -> bool:
        found = self._stops.push(text, searched=self.token_count > self.spec.stopping.min_tokens)
        if self.spec.output.text:
            self._pending.text += found.text
        if found.stop is None:
            return False
        self.finish = self._pending.finish = Finish(FinishReason.STOP, stop_string=found.stop)
        return True

    def end(self, end: End) -> None:
        """The engine's last word on the attempt."""
        if self.ended:
            return
        self.failure = failed_end(end)
        if self.failure is not None:
            return
        if end.reason is EndReason.STOP:
            self.close(Finish(FinishReason.STOP, stop_token_id=end.stop_token_id))
        elif end.reason is EndReason.LENGTH:
            self.close(Finish(FinishReason.LENGTH))
        else:
            self.close(Finish(FinishReason.ABORTED))

    def close(self, finish: Finish) -> None:
        """Ends the stream with what there is; text that was held back is given out."""
        if self.ended:
            return
        if self._detokenizer is not None and self._read(self._detokenizer.flush()):
            return  # the last characters completed a stop string
        if self.spec.output.text:
            self._pending.text += self._stops.flush()
        self.finish = self._pending.finish = finish

    def fail(self, failure: RequestFailed) -> None:
        """Ends the stream with an error."""
        if not self.ended:
            self.failure = failure

    def take(self) -> Delta:
        """Everything new since the last call."""
        delta, self._pending = self._pending, Delta(self.token_count)
        return delta
