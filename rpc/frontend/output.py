"""One sequence's output as its client sees it: text, stop strings, finish reason, and the part that was not sent yet.

Knows nothing of threads, time or gRPC. Invariant: tokens past a stop string are neither sent nor counted.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from model.inputs.chat_output.parsed import CallDelta, Parsed, add_calls
from model.inputs.chat_output.parser import OutputParser, Parsing
from model.inputs.detokenizer import Detokenizer
from model.inputs.stop_strings import StopStrings
from model.inputs.tokenizer import Tokenizer
from scheduler.events import Logprobs, StepOutputs
from scheduler.request import Request
from scheduler.spec import Spec

NO_MARKS: Mapping[int, str] = {}


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"
    DEADLINE = "deadline"


@dataclass(frozen=True, slots=True)
class Finish:
    """Reason of a sequence's end, and the token or string that matched if it was a stop."""

    reason: FinishReason
    stop_token_id: int | None = None
    stop_string: str | None = None

    def __str__(self) -> str:
        return self.reason.value


class TokenLogprob(NamedTuple):
    """Log probability of one token at one position.

    Attributes:
        token_id: Id of the token.
        logprob: Natural logarithm, from the raw logits.
        rank: Place among all tokens by probability; 1 is the likeliest.
    """

    # A tuple takes a quarter of the time of a frozen dataclass to make, and a result may have 150,000.

    token_id: int
    logprob: float
    rank: int


@dataclass(slots=True)
class Delta:
    """New output of a sequence.

    Attributes:
        index: Index of the sequence in its request.
        first_position: Position of the first new token in the output, from 0.
        text: New text; of a conversation, that of the answer.
        token_ids: New tokens.
        logprobs: Logprobs at each new token: the token itself first, then alternatives by rank.
        finish: The sequence's end; None while it goes on.
        reasoning: New text of the reasoning.
        calls: New parts of tool calls.
    """

    index: int
    first_position: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[list[TokenLogprob]] = field(default_factory=list)
    finish: Finish | None = None
    reasoning: str = ""
    calls: list[CallDelta] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        return not (self.text or self.token_ids or self.finish or self.reasoning or self.calls)


@dataclass(frozen=True, slots=True, eq=False)
class StepTokens:
    """New tokens of a step, one entry a token: see `StepOutputs`.

    Lists, made once: a read of one number from an array costs ten times as much as from a list.

    Attributes:
        chosen: Log probabilities of the tokens, as in `logprobs`.
    """

    attempts: list[int]
    indices: list[int]
    positions: list[int]
    tokens: list[int]
    chosen: list[float]
    logprobs: Logprobs

    @staticmethod
    def from_outputs(outputs: StepOutputs) -> "StepTokens":
        return StepTokens(
            outputs.attempts.tolist(),
            outputs.indices.tolist(),
            outputs.positions.tolist(),
            outputs.tokens.tolist(),
            outputs.logprobs.chosen.tolist(),
            outputs.logprobs,
        )


class OutputGap(ValueError):
    """A token came before an earlier one of its sequence."""


class SequenceOutput:
    """Output of one sequence of a request: `accept` tokens, `take` the new output, `close` it.

    The known output is read like tokens that were accepted and taken. Text thus goes on where it stopped, also in the
    middle of a character or of a possible stop string.

    Args:
        index: Index of the sequence in its request.
        spec: The request as the client states it.
        request: The request as the engine gets it.
        tokenizer: Tokenizer of the model.
        known: Output tokens that the client has already.
        parsing: How the output is read; None where it is text alone.

    Attributes:
        reasoning_tokens: Count of tokens that are reasoning.
        tokens: Output tokens, known ones included.
        total: Sum of the log probabilities of tokens. Those of known tokens are lost, and not in it.
        finish: The sequence's end; None while it goes on.
    """

    def __init__(
        self,
        index: int,
        spec: Spec,
        request: Request,
        tokenizer: Tokenizer,
        known: tuple[int, ...],
        parsing: Parsing | None = None,
    ) -> None:
        self.index, self._spec = index, spec
        self.tokens: list[int] = []
        self.total = 0.0
        self.finish: Finish | None = None
        self._stop_ids, self._top_logprobs = frozenset(request.stop_ids), request.controls.top_logprobs
        needs_text = spec.output.text or bool(spec.stopping.stop)
        self._detokenizer = Detokenizer(tokenizer, spec.output.skip_special_tokens) if needs_text else None
        self._marks = NO_MARKS if parsing is None else parsing.marks.by_id
        self._parser = None if parsing is None else OutputParser(parsing)
        self.reasoning_tokens = 0
        self._stops = StopStrings(spec.stopping.stop, spec.stopping.include_stop)
        self._pending = Delta(index, 0)
        for token in known:
            self.tokens.append(token)
            if self._read_token(token):
                break
        self._pending = Delta(index, self.token_count, finish=self.finish)
        self._known = self.token_count

    @property
    def token_count(self) -> int:
        return len(self.tokens)

    @property
    def new_count(self) -> int:
        """Count of tokens that were not known at the start."""
        return self.token_count - self._known

    @property
    def score(self) -> float:
        """Length-normalized log probability, by which a beam search ranks; without a beam search the total."""
        beam = self._spec.sampling.beam
        return self.total if beam is None else self.total / max(1, self.token_count) ** beam.length_penalty

    @property
    def pending_tokens(self) -> int:
        """Count of tokens that wait to be taken."""
        return len(self._pending.token_ids)

    def accept(self, step: StepTokens, i: int) -> bool:
        """Accepts the i-th new token of a step, and returns whether a stop string ended the sequence with it.

        A token that the sequence has already, or that comes after its end, is ignored.

        Raises:
            OutputGap: A token is missing before this one.
        """
        position = step.positions[i]
        if self.finish is not None or position < self.token_count:
            return False
        if position > self.token_count:
            raise OutputGap(f"token {position} of sequence {self.index} came where {self.token_count} was due")
        token = step.tokens[i]
        self.tokens.append(token)
        self.total += step.chosen[i]
        self._pending.token_ids.append(token)
        if self._top_logprobs >= 0:
            self._pending.logprobs.append(logprobs_at(step.logprobs, i, token, self._top_logprobs))
        return self._read_token(token)

    def _read_token(self, token: int) -> bool:
        """Reads the token's text, and returns whether it completes a stop string."""
        if self._detokenizer is None or (token in self._stop_ids and not self._spec.stopping.include_stop):
            return False
        mark = self._marks.get(token)
        text = self._detokenizer.push(token) if mark is None else self._detokenizer.flush() + mark
        if self._parser is None:
            return self._read(text)
        stopped = self._add_parsed(self._parser.push(text))
        self.reasoning_tokens += self._parser.reasons
        return stopped

    def _add_parsed(self, new: Parsed) -> bool:
        """Adds output of a parser, and returns whether a stop string ended the sequence: text alone can have one."""
        if self._spec.output.text:
            self._pending.reasoning += new.reasoning
            add_calls(self._pending.calls, new.calls)
        return bool(new.content) and self._read(new.content)

    def _read(self, text: str) -> bool:
        found = self._stops.push(text, searched=self.token_count > self._spec.stopping.min_tokens)
        if self._spec.output.text:
            self._pending.text += found.text
        if found.stop is None:
            return False
        self.finish = self._pending.finish = Finish(FinishReason.STOP, stop_string=found.stop)
        return True

    def close(self, finish: Finish) -> None:
        """Ends the sequence with its output so far, and releases text that was held back for a stop string."""
        if self.finish is not None:
            return
        if self._detokenizer is not None:
            text = self._detokenizer.flush()
            if self._read(text) if self._parser is None else self._end_parser(self._parser, text):
                return  # the last characters completed a stop string
        if self._spec.output.text:
            self._pending.text += self._stops.flush()
        self.finish = self._pending.finish = finish

    def _end_parser(self, parser: OutputParser, text: str) -> bool:
        return self._add_parsed(parser.push(text)) or self._add_parsed(parser.end())

    def take(self) -> Delta:
        """Returns the output since the last call."""
        delta, self._pending = self._pending, Delta(self.index, self.token_count)
        return delta


def logprobs_at(step: Logprobs, i: int, token: int, wanted: int) -> list[TokenLogprob]:
    """Returns the log probabilities of one token and its alternatives.

    Args:
        step: Log probabilities of a step's tokens.
        i: Index of the token in the step.
        token: The token itself, which comes first in the result.
        wanted: Alternatives at most, likeliest first; a negative number counts as 0.
    """
    chosen = TokenLogprob(token, float(step.chosen[i]), int(step.rank[i]))
    wanted = max(0, wanted)
    top = zip(step.top_ids[i, :wanted].tolist(), step.top[i, :wanted].tolist(), strict=True)
    return [chosen, *(TokenLogprob(t, p, rank) for rank, (t, p) in enumerate(top, 1) if t != token)]
