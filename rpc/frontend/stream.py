"""One request's output as its client sees it: its sequences, its prompt's logprobs, its failure."""

from collections.abc import Sequence
from functools import partial

from model.inputs.chat_output.parser import Parsing
from model.inputs.tokenizer import Tokenizer
from rpc.frontend.completeness import Completeness, Question
from rpc.frontend.errors import RequestFailed, failed_end
from rpc.frontend.known_output import read_known
from rpc.frontend.output import Delta, Finish, FinishReason, SequenceOutput, StepTokens
from rpc.frontend.token_logprobs import TokenLogprob, logprobs_at
from scheduler.events import End, EndReason, PromptPart
from scheduler.request import Request
from scheduler.spec import Spec


class RequestStream:
    """Output of one request: `accept` tokens, `end` sequences, `take` the new output.

    An output prefix is the known output of the only sequence.

    Attributes:
        spec: The request as the client states it.
        request: The request as the engine gets it.
        cached_tokens: Prompt tokens whose KV the prefix cache had.
        sequences: Output of each sequence, by index.
        prompt_logprobs: Logprobs at each token of the prompt: the token first, then alternatives by rank; empty for the
            first token. Empty altogether where the client does not ask for them.
        failure: Failure of the request; None while it has none.
    """

    def __init__(
        self,
        spec: Spec,
        request: Request,
        tokenizer: Tokenizer,
        parsings: Sequence[Parsing | None] = (),
        completeness: Completeness | None = None,
    ) -> None:
        """Makes the output, which is empty.

        Args:
            spec: The request as the client states it.
            request: The request as the engine gets it.
            tokenizer: Tokenizer of the model.
            parsings: How the output of each sequence is read; empty where all are text alone.
            completeness: What is asked about the outputs; None without a constraint.

        Raises:
            RequestFailed: The questions about the output prefix cannot be answered.
        """
        self.spec, self.request = spec, request
        self._completeness = completeness
        self.cached_tokens = 0
        self.sequences = tuple(
            read_known(
                partial(SequenceOutput, index, spec, request, tokenizer, spec.output_prefix, parsing, completeness),
                completeness,
                bool(spec.output_prefix and spec.stopping.stop),
            )
            for index, parsing in enumerate(parsings or (None,) * request.count)
        )
        self.prompt_logprobs: list[list[TokenLogprob]] = [[]] if request.controls.prompt_logprobs else []
        self.failure: RequestFailed | None = None

    @property
    def ended(self) -> bool:
        return self.failure is not None or all(sequence.finish is not None for sequence in self.sequences)

    @property
    def token_count(self) -> int:
        """Count of output tokens of all sequences."""
        return sum(sequence.token_count for sequence in self.sequences)

    @property
    def reasoning_tokens(self) -> int:
        """Count of them that are reasoning."""
        return sum(sequence.reasoning_tokens for sequence in self.sequences)

    @property
    def length(self) -> int:
        """Count of tokens of the prompt and of the output so far."""
        return len(self.request.prompt) + self.token_count

    @property
    def pending_tokens(self) -> int:
        """Count of tokens that wait to be taken."""
        return sum(sequence.pending_tokens for sequence in self.sequences)

    def emitted(self) -> tuple[tuple[int, ...] | None, ...]:
        """Returns the emitted tokens of each sequence, behind which a new attempt starts, as in `Submit`."""
        if self.request.beam is not None or not self.token_count:
            return ()
        return tuple(None if s.engine_ended else tuple(s.tokens) for s in self.sequences)

    def is_complete(self, question: Question) -> bool:
        """Answers a question of a sequence. May take seconds; any thread may call it.

        Raises:
            RequestFailed: It cannot be answered.
        """
        return self._completeness is not None and self._completeness.is_complete(question)

    def accept(self, step: StepTokens, i: int) -> bool:
        """Accepts the i-th new token of a step, and returns whether a stop string ended its sequence with it.

        Raises:
            OutputGap: A token of the sequence is missing before this one.
        """
        return self.failure is None and self.sequences[step.indices[i]].accept(step, i)

    def accept_prompt(self, part: PromptPart) -> None:
        """Accepts log probabilities of prompt tokens; those that came before are ignored.

        Raises:
            ValueError: Some are missing before these.
        """
        known = len(self.prompt_logprobs)
        if part.start > known:
            raise ValueError(f"prompt token {part.start} came where {known} was due")
        for i in range(known - part.start, len(part.logprobs.chosen)):
            token, wanted = int(self.request.prompt[part.start + i]), self.request.controls.top_logprobs
            self.prompt_logprobs.append(logprobs_at(part.logprobs, i, token, wanted))

    def end(self, end: End) -> None:
        """Ends a sequence, or the whole stream where the end is a failure."""
        if self.ended:
            return
        self.failure = failed_end(end)
        if self.failure is not None:
            return
        if end.reason is EndReason.STOP:
            self.sequences[end.index].close(Finish(FinishReason.STOP, stop_token_id=end.stop_token_id))
        elif end.reason is EndReason.LENGTH:
            self.sequences[end.index].close(Finish(FinishReason.LENGTH))
        else:
            self.sequences[end.index].close(Finish(FinishReason.ABORTED))

    def close(self, finish: Finish) -> None:
        """Ends all sequences with their output so far."""
        if self.failure is None:
            for sequence in self.sequences:
                sequence.close(finish)

    def fail(self, failure: RequestFailed) -> None:
        """Ends the stream with an error."""
        if not self.ended:
            self.failure = failure

    def take(self) -> list[Delta]:
        """Returns the output since the last call, of the sequences that have some."""
        return [delta for sequence in self.sequences if not (delta := sequence.take()).is_empty]
