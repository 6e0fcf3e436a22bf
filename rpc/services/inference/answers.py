"""Turns a `RequestStream` into the tensors that its client asked for."""

import json
from collections.abc import Callable

from rpc.frontend.errors import RequestFailed
from rpc.frontend.output import Delta, FinishReason, SequenceOutput
from rpc.frontend.pacing import Work
from rpc.frontend.stream import RequestStream
from rpc.frontend.token_logprobs import TokenLogprob
from rpc.services.inference import pb
from rpc.services.inference.asking import VERSION, InferRequest
from rpc.services.inference.tensors import Elements, add_outputs
from rpc.status import LONGEST

FINAL = "triton_final_response"
REASONS = {
    FinishReason.STOP: b"stop",
    FinishReason.LENGTH: b"length",
    FinishReason.ABORTED: b"abort",
    FinishReason.DEADLINE: b"deadline",
    FinishReason.CLOSED: b"stop",  # vLLM has no other word for a complete output
}
RUNNING = b"None"  # finish reason of a sequence that goes on, Python's None as text


class Answers:
    """Makes the answers to one request; each has the output since the one before.

    Args:
        request: The request.
        stream: Its output.
        model: Name of the model.
        token_text: Returns the text of a token id.
    """

    def __init__(
        self, request: InferRequest, stream: RequestStream, model: str, token_text: Callable[[int], str]
    ) -> None:
        self._request, self._stream, self._model, self._token_text = request, stream, model, token_text
        self._first = True

    def next(self, final: bool) -> Work[pb.ModelInferResponse]:
        """Returns work that makes the next answer. final: the stream has ended."""
        deltas = [sequence.take() for sequence in self._stream.sequences]
        answer = answer_to(self._request.id, self._model, final)
        outputs = dict[str, Elements]()
        for name in self._request.outputs:
            outputs[name] = yield from self._output(name, deltas)
        add_outputs(answer, outputs, self._request.raw)
        self._first = False
        return answer

    def _output(self, name: str, deltas: list[Delta]) -> Work[Elements]:
        """Makes an output, with one element for each sequence, or one in all for an output of the prompt."""
        sequences = self._stream.sequences
        match name:
            case "text_output":
                before = self._request.before if self._first else ""
                return [(before + delta.text).encode() for delta in deltas]
            case "finish_reason":
                return [_reason(sequence) for sequence in sequences]
            case "cumulative_logprob":
                return [sequence.total for sequence in sequences]
            case "logprobs":
                shown = list[bytes]()
                for delta in deltas:
                    shown.append((yield from self._logprobs(delta.logprobs, self._request.logprobs)))
                return shown
            case "prompt_logprobs":
                known = self._stream.prompt_logprobs if self._first else []
                return [(yield from self._logprobs(known, self._request.prompt_logprobs))]
            case "num_input_tokens":
                return [len(self._stream.request.prompt)]
            case "num_output_tokens":
                return [len(delta.token_ids) for delta in deltas]
            case _:
                raise RequestFailed("INTERNAL", "NO_OUTPUT", f"no code makes the output {name}")

    def _logprobs(self, positions: list[list[TokenLogprob]], most: int | None) -> Work[bytes]:
        """Makes JSON: null, or for each position an object by token id, of the token and the `most` likeliest."""
        if most is None:
            return b"null"
        shown = list[str]()
        for position in positions:
            shown.append(json.dumps(self._by_token(position, most) or None))
            yield
        return f"[{', '.join(shown)}]".encode()

    def _by_token(self, position: list[TokenLogprob], most: int) -> dict[int, dict[str, object]]:
        return {
            token.token_id: {
                "logprob": token.logprob,
                "rank": token.rank,
                "decoded_token": self._token_text(token.token_id),
            }
            for i, token in enumerate(position)
            if i == 0 or token.rank <= most
        }


def _reason(sequence: SequenceOutput) -> bytes:
    return RUNNING if sequence.finish is None else REASONS[sequence.finish.reason]


def answer_to(request_id: str, model: str, final: bool) -> pb.ModelInferResponse:
    """Returns an answer without tensors. final: it is the last one of its request."""
    answer = pb.ModelInferResponse(model_name=model, model_version=VERSION, id=request_id)
    answer.parameters[FINAL].bool_param = final
    return answer


def failed_answer(request_id: str, model: str, failure: RequestFailed) -> pb.ModelStreamInferResponse:
    """Returns the answer to a failed request of a stream that goes on; parameters have the details of its status."""
    answer = answer_to(request_id, model, final=True)
    said = {"code": failure.code, "reason": failure.reason, "field": failure.field}
    for name, value in said.items():
        if value:
            answer.parameters[f"quire_error_{name}"].string_param = value[:LONGEST]
    if failure.retry_after is not None:
        answer.parameters["quire_error_retry_after"].double_param = failure.retry_after
    # An empty message would be none at all.
    return pb.ModelStreamInferResponse(error_message=failure.message or failure.reason, infer_response=answer)
