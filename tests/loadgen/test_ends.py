"""Only a request that its server ended with a stop or at its length ended well, over each protocol."""

import asyncio
from typing import Any

import pytest
from quire.v1 import generation_service_pb2 as pb

from rpc.client.resuming_async import END
from rpc.client.security import OPEN
from rpc.loadgen.drive import Drive, LoadRun
from rpc.loadgen.native import Native
from rpc.loadgen.observation import Observation, Targets
from rpc.loadgen.open_inference import record_message
from rpc.loadgen.openai_http import record_chunk
from rpc.loadgen.summary import summary
from rpc.loadgen.wire import LoadRequest
from rpc.services.inference import pb as inference
from rpc.services.inference.tensors import join


class Call:
    """Messages of a server, one after the other."""

    def __init__(self, messages: list[Any]) -> None:
        self._messages = [*messages, END]

    async def read(self) -> Any:
        return self._messages.pop(0)


def native(reason: str, seen: Observation) -> None:
    deltas = [pb.SequenceDelta(token_count=1), pb.SequenceDelta(token_count=1, first_position=1)]
    deltas[1].finish_reason = pb.FinishReason.Value(f"FINISH_REASON_{reason or 'UNSPECIFIED'}")
    messages = [pb.StreamGenerateResponse(deltas=[delta]) for delta in deltas]

    async def read() -> None:
        wire = Native("127.0.0.1:1", "", OPEN, True)
        await wire.read(Call(messages), seen)

    asyncio.run(read())


def openai(reason: str, seen: Observation) -> None:
    shown = {"STOP": '"stop"', "LENGTH": '"length"', "ABORTED": '"abort"', "": "null"}[reason]
    record_chunk(b'{"choices": [{"text": "a", "finish_reason": null}]}', 1.0, seen)
    record_chunk(b'{"choices": [{"text": "b", "finish_reason": %s}]}' % shown.encode(), 1.0, seen)
    record_chunk(b'{"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 2}}', 1.0, seen)


def open_inference(reason: str, seen: Observation) -> None:
    last = {"STOP": "stop", "LENGTH": "length", "ABORTED": "abort", "DEADLINE": "deadline", "": "None"}[reason]
    for raw, shown in ((True, "None"), (False, last)):
        answer = inference.ModelStreamInferResponse()
        output = answer.infer_response.outputs.add(name="finish_reason", datatype="BYTES", shape=[1])
        if raw:
            answer.infer_response.raw_output_contents.append(join("BYTES", [shown.encode()]))
        else:
            output.contents.bytes_contents.append(shown.encode())
        record_message(answer, seen)


CASES = [
    (protocol, reason, code)
    for protocol, known in ((native, "SLADC"), (openai, "SLA"), (open_inference, "SLAD"))
    for reason, code in (("STOP", ""), ("LENGTH", ""), ("ABORTED", "ABORTED"), ("DEADLINE", "DEADLINE"), ("CLOSED", ""))
    if reason[0] in known
]


@pytest.mark.parametrize(
    ("protocol", "reason", "code"), [*CASES, *((p, "", "CUT_OFF") for p in (native, openai, open_inference))]
)
def test_how_it_ended_counts(protocol: Any, reason: str, code: str) -> None:
    seen = Observation(0.0, (1, 2))
    protocol(reason, seen)

    async def drive() -> LoadRun:
        async def send(_: LoadRequest, one: Observation) -> None:
            one.times, one.tokens, one.finish = [one.due + 0.1, one.due + 0.2], seen.tokens, seen.finish

        return await Drive(send, 60, scheduled=False).run_closed(iter([LoadRequest(0, [1], 1, 2)]), 1)

    run = asyncio.run(drive())
    result = summary(run, Targets(first=9.0))
    assert run.seen[0].code == code
    assert list(result["errors"]) == ([code] if code else [])
    good = int(not code)
    assert (result["ok"], result["failed"], result["goodput"]) == (good, 1 - good, good)
    assert bool(result["ttft_ms"]) == bool(good)


def test_other_reasons_have_their_own_names() -> None:
    async def drive() -> LoadRun:
        async def send(_: LoadRequest, seen: Observation) -> None:
            seen.finish = "content_filter"

        return await Drive(send, 60, scheduled=False).run_closed(iter([LoadRequest(0, [1], 1, 2)]), 1)

    (seen,) = asyncio.run(drive()).seen
    assert (seen.code, seen.message) == ("CONTENT_FILTER", "the server ended it after 0 of 2 tokens")
