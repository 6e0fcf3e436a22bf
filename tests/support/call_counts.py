"""Clients that count what they get, under the names of the server's metrics that have to say the same."""

import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import grpc
from google.rpc import error_details_pb2
from quire.v1 import generation_service_pb2 as pb
from quire.v1 import generation_service_pb2_grpc as pb_grpc

from tests.support.server import details

TOKENS, FIRSTS, GAPS = (
    "quire_generation_tokens_total",
    "quire_time_to_first_token_seconds_count",
    "quire_inter_token_latency_seconds_count",
)
DELIVERED = (TOKENS, FIRSTS, GAPS)
STARTED = ("quire_request_queue_time_seconds_count", "quire_request_prompt_tokens_count")
COUNTED = (
    *DELIVERED,
    *STARTED,
    "quire_request_prefill_time_seconds_count",
    "quire_prompt_tokens_total",
    "quire_prompt_tokens_cached_total",
    "quire_request_prompt_tokens_sum",
    "quire_request_generation_tokens_count",
    "quire_request_generation_tokens_sum",
    "quire_request_decode_time_seconds_count",
    "quire_request_time_per_output_token_seconds_count",
    "quire_e2e_request_latency_seconds_count",
)


def ended(outcome: str) -> str:
    return f"quire_requests_total{{{outcome}}}"


@dataclass
class Running:
    """A stream on its way, followed in a thread."""

    call: grpc.Call
    done: Future[None] = field(default_factory=Future)


class CallCounts:
    """Counts all calls that are made through it."""

    def __init__(self, stub: pb_grpc.GenerationServiceStub) -> None:
        self.counts: Counter[str] = Counter()
        self._stub, self._lock = stub, threading.Lock()
        self._threads = ThreadPoolExecutor(64)

    def close(self) -> None:
        self._threads.shutdown()

    def add(self, **counts: int) -> None:
        with self._lock:
            self.counts.update(counts)

    def stream(self, request: pb.StreamGenerateRequest) -> Running:
        """At once; `done` once it has ended and is counted."""
        running = Running(self._stub.StreamGenerate(request, timeout=120))
        running.done = self._threads.submit(self._follow, running.call)
        return running

    def _follow(self, call: grpc.Call) -> None:
        by_sequence: Counter[int] = Counter()
        reason, submitted = "", False
        try:
            for answer in call:
                submitted = True
                self._take_prompt(answer)
                for delta in answer.deltas:
                    self._take_tokens(by_sequence, delta.index, delta.token_count)
                    if delta.finish_reason and delta.index == 0:
                        reason = outcome_of(delta.finish_reason)
        except grpc.RpcError as error:
            reason, submitted = refusal(error), submitted or error.code() is grpc.StatusCode.CANCELLED
        self._end(reason, submitted, by_sequence)

    def generate(self, request: pb.GenerateRequest) -> None:
        """Until it has ended."""
        by_sequence: Counter[int] = Counter()
        try:
            self._take_result(self._stub.Generate(request, timeout=120), by_sequence)
        except grpc.RpcError as error:
            self._end(refusal(error), False, by_sequence)

    def batch(self, requests: Sequence[pb.GenerateRequest]) -> None:
        """Until all have ended."""
        for answer in self._stub.BatchGenerate(pb.BatchGenerateRequest(requests=requests), timeout=120):
            if answer.HasField("error"):
                (info,) = (d for d in answer.error.details if d.TypeName() == "google.rpc.ErrorInfo")
                self._end(reason_in(info.value), False, Counter())
            else:
                self._take_result(answer.response, Counter())

    def _take_result(self, result: pb.GenerateResponse, by_sequence: Counter[int]) -> None:
        self._take_prompt(result)
        for sequence in result.sequences:
            self._take_tokens(by_sequence, sequence.index, len(sequence.token_ids))
        self._end(outcome_of(result.sequences[0].finish_reason), True, by_sequence)

    def _take_prompt(self, answer: pb.StreamGenerateResponse | pb.GenerateResponse) -> None:
        if answer.HasField("prompt_info"):
            info = answer.prompt_info
            self.add(
                quire_prompt_tokens_total=info.token_count,
                quire_request_prompt_tokens_sum=info.token_count,
                quire_prompt_tokens_cached_total=info.cached_token_count,
                **dict.fromkeys(STARTED, 1),
            )

    def _take_tokens(self, by_sequence: Counter[int], index: int, count: int) -> None:
        if not count:
            return
        firsts = int(not by_sequence)
        gaps = count - (by_sequence[index] == 0)
        by_sequence[index] += count
        prefills = {"quire_request_prefill_time_seconds_count": firsts}
        self.add(**{TOKENS: count, FIRSTS: firsts, GAPS: gaps}, **prefills)

    def _end(self, reason: str, submitted: bool, by_sequence: Counter[int]) -> None:
        self.add(**{ended(reason): 1}, quire_e2e_request_latency_seconds_count=int(submitted))
        if reason in ("stop", "length", "closed", "deadline"):
            self.add(
                quire_request_generation_tokens_count=max(1, len(by_sequence)),
                quire_request_generation_tokens_sum=by_sequence.total(),
                quire_request_decode_time_seconds_count=int(bool(by_sequence)),
                quire_request_time_per_output_token_seconds_count=int(by_sequence.total() > len(by_sequence)),
            )


def outcome_of(finish: int) -> str:
    return pb.FinishReason.Name(finish).removeprefix("FINISH_REASON_").lower()


def refusal(error: grpc.RpcError) -> str:
    if error.code() is grpc.StatusCode.CANCELLED:
        return "cancelled"
    return details(error)["ErrorInfo"].reason.lower()


def reason_in(packed: bytes) -> str:
    return error_details_pb2.ErrorInfo.FromString(packed).reason.lower()
