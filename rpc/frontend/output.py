"""One sequence's output as its client sees it: text, stop strings, finish reason, and the part that was not sent yet.

Knows nothing of threads, time or gRPC. Invariant: tokens past a stop string are neither sent nor counted.

Under a constraint a sequence may have a `question`, on whose answer its end depends. It reads nothing until the answer:
tokens that come meanwhile are kept, and so is its end.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from model.inputs.chat_output.parsed import CallDelta, Parsed, add_calls
from model.inputs.chat_output.parser import OutputParser, Parsing
from model.inputs.detokenizer import Detokenizer
from model.inputs.stop_strings import StopMatch, StopStrings
from model.inputs.tokenizer import Tokenizer
from rpc.frontend.completeness import Answer, Completeness, Question
from rpc.frontend.token_logprobs import TokenLogprob, logprobs_at
from scheduler.events import Logprobs, StepOutputs
from scheduler.prompts import Chat
from scheduler.request import Request
from scheduler.spec import Spec

PROMPT_ENDS = (64, 4096)  # last tokens of a prompt, among which text is looked for
NO_MARKS: Mapping[int, str] = {}


class FinishReason(StrEnum):
    """Why a sequence ended. CLOSED: max_tokens, at which the output was complete under its constraint."""

    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"
    DEADLINE = "deadline"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class Finish:
    """Reason of a sequence's end, and the token or string that matched if it was a stop."""

    reason: FinishReason
    stop_token_id: int | None = None
    stop_string: str | None = None

    def __str__(self) -> str:
        return self.reason.value


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


class WaitingToken(NamedTuple):
    """A token that came while a question was open. logprobs: None where they are not asked for."""

    token: int
    chosen: float
    logprobs: list[TokenLogprob] | None


def _follows_text(spec: Spec, request: Request, tokenizer: Tokenizer) -> bool:
    """Returns whether a space at the output's beginning is its own, and not the tokenizer's.

    It is where the output goes on from the prompt's text, and under a constraint, to which each character counts. The
    next message of a conversation is a text of its own.
    """
    if spec.structured is not None:
        return True
    if isinstance(spec.prompt, Chat) and not spec.prompt.continue_final_message:
        return False
    # Behind the text may be special tokens, and placeholders of images.
    return any(tokenizer.decode(request.prompt[-last:].tolist(), True).strip() for last in PROMPT_ENDS)


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
        completeness: What is asked about the output; None without a constraint.
        answer: Answers the questions of known tokens; None without such questions.

    Attributes:
        question: The open question; None without one.
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
        completeness: Completeness | None = None,
        answer: Answer | None = None,
    ) -> None:
        self.index, self._spec = index, spec
        self.question: Question | None = None
        self._completeness, self._content = completeness, list[str]()
        self._match: StopMatch | None = None  # that the question is about
        self._waiting = deque[WaitingToken]()
        self._burst = 0  # tokens of the largest number that an answer let in at once, since the last `take`
        self._ending: Finish | None = None  # the engine's end of the sequence
        self.tokens: list[int] = []
        self.total = 0.0
        self.finish: Finish | None = None
        self._stop_ids, self._top_logprobs = frozenset(request.stop_ids), request.controls.top_logprobs
        needs_text = spec.output.text or bool(spec.stopping.stop)
        self._detokenizer = None
        if needs_text:
            follows = _follows_text(spec, request, tokenizer)
            self._detokenizer = Detokenizer(tokenizer, spec.output.skip_special_tokens, follows)
        self._marks = NO_MARKS if parsing is None else parsing.marks.by_id
        self._parser = None if parsing is None else OutputParser(parsing)
        self.reasoning_tokens = 0
        self._stops = StopStrings(spec.stopping.stop, spec.stopping.include_stop)
        self._pending = Delta(index, 0)
        for token in known:
            self.tokens.append(token)
            if self._read_token(token) or (answer is not None and self._settle(answer)):
                break
        self._pending = Delta(index, self.token_count, finish=self.finish)
        self._known = self.token_count

    @property
    def token_count(self) -> int:
        return len(self.tokens)

    @property
    def engine_ended(self) -> bool:
        """Whether no more tokens come of it."""
        return self.finish is not None or self._ending is not None

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

    @property
    def backlog(self) -> int:
        """Count of tokens for which their reader had time, and that it has not taken.

        An answer may let in many tokens at once. Those of one answer are left out, so the tokens of a reader that never
        comes are counted all the same.
        """
        return self.pending_tokens - self._burst

    @property
    def waiting_tokens(self) -> int:
        """Count of tokens that wait for the answer to the question."""
        return len(self._waiting)

    def accept(self, step: StepTokens, i: int) -> bool:
        """Accepts the i-th new token of a step, and returns whether a stop string ended the sequence with it.

        A token that the sequence has already, or that comes after its end, is ignored.

        Raises:
            OutputGap: A token is missing before this one.
        """
        position, due = step.positions[i], len(self.tokens) + len(self._waiting)
        if self.finish is not None or position < due:
            return False
        if position > due:
            raise OutputGap(f"token {position} of sequence {self.index} came where {due} was due")
        token, wanted = step.tokens[i], self._top_logprobs
        logprobs = logprobs_at(step.logprobs, i, token, wanted) if wanted >= 0 else None
        if self.question is not None:
            self._waiting.append(WaitingToken(token, step.chosen[i], logprobs))
            return False
        return self._accept(token, step.chosen[i], logprobs)

    def _accept(self, token: int, chosen: float, logprobs: list[TokenLogprob] | None) -> bool:
        self.tokens.append(token)
        self.total += chosen
        self._pending.token_ids.append(token)
        if logprobs is not None:
            self._pending.logprobs.append(logprobs)
        return self._read_token(token)

    def settle(self) -> bool:
        """Has open questions answered at once, and returns whether a stop string ended the sequence. May take seconds.

        Raises:
            RequestFailed: A question cannot be answered.
        """
        return self._completeness is not None and self._settle(self._completeness.is_complete)

    def _settle(self, answer: Answer) -> bool:
        stopped = False
        while self.question is not None:
            stopped = self.answer(answer(self.question))
        return stopped

    def answer(self, complete: bool) -> bool:
        """Answers the open question, and goes on. Returns whether a stop string ended the sequence.

        Args:
            complete: The text is a complete output.
        """
        self.question, match, self._match = None, self._match, None
        if match is None:
            self._finish(Finish(FinishReason.CLOSED) if complete else self._ending or Finish(FinishReason.LENGTH))
            return False
        if complete:
            self._waiting.clear()
            return self._stop(match)
        self._found(self._stops.pass_over())
        before = self.pending_tokens
        while self.question is None and self._waiting:
            self._accept(*self._waiting.popleft())
        self._burst = max(self._burst, self.pending_tokens - before)
        if self.question is None and self._ending is not None:
            self._end(self._ending)
        return False

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
        return self._found(self._stops.push(text, searched=self.token_count > self._spec.stopping.min_tokens))

    def _found(self, found: StopMatch) -> bool:
        """Gives out text, and returns whether a stop string behind it ends the sequence."""
        if self._completeness is not None:
            if found.stop is not None:
                self._content = ["".join(self._content)]  # one text, which the next question does not join again
                if (question := self._completeness.of_stop(self._content[0] + found.before)) is not None:
                    self.question, self._match = question, found
                    return False
            if self._spec.stopping.stop:
                self._content.append(found.text)
        if found.stop is not None:
            return self._stop(found)
        self._give(found.text)
        return False

    def _give(self, text: str) -> None:
        if self._spec.output.text:
            self._pending.text += text

    def _stop(self, match: StopMatch) -> bool:
        self._give(match.text)
        self._finish(Finish(FinishReason.STOP, stop_string=match.stop))
        return True

    def _finish(self, finish: Finish) -> None:
        self.finish = self._pending.finish = finish

    def close(self, finish: Finish) -> None:
        """Ends the sequence with its output so far, and releases text that was held back for a stop string.

        An end that an engine reports waits for the answer to an open question. Any other end does not: the output ends
        before the stop string that the question is about.
        """
        if self.finish is not None:
            return
        of_engine = finish.reason in (FinishReason.STOP, FinishReason.LENGTH)
        if self.question is None:
            self._end(finish)
        elif of_engine:
            self._ending = self._ending or finish
        if self.question is not None and not of_engine:
            self._cut_off(finish)

    def _cut_off(self, finish: Finish) -> None:
        """Ends the sequence without an answer. Where the question is about its end, the engine's reason holds."""
        if self._match is not None:
            self._give(self._match.before)
        self._finish(finish if self._match is not None or self._ending is None else self._ending)
        self.question = self._match = None
        self._waiting.clear()

    def _end(self, finish: Finish) -> None:
        """Reads the rest of the text. Called again with the same end where an answer lets the sequence go on."""
        self._ending = finish
        if self._detokenizer is not None:
            text = self._detokenizer.flush()
            if self._read(text) if self._parser is None else self._end_parser(self._parser, text):
                return  # the last characters completed a stop string
        if self.question is not None:
            return
        self._give(self._stops.flush())
        if finish.reason is FinishReason.LENGTH and self._completeness is not None:
            in_text = None if self._parser is None else self._parser.in_text
            self.question = self._completeness.of_end(self.tokens, in_text)
        if self.question is None:
            self._finish(finish)

    def _end_parser(self, parser: OutputParser, text: str) -> bool:
        if self._add_parsed(parser.push(text)):
            return True
        return self.question is None and self._add_parsed(parser.end())

    def take(self) -> Delta:
        """Returns the output since the last call."""
        delta, self._pending, self._burst = self._pending, Delta(self.index, self.token_count), 0
        return delta
