"""The generation service with a client whose writes take their time."""

import asyncio

from quire.v1 import generation_service_pb2 as pb

from model.inputs.tokenizer import Tokenizer
from rpc.services.generation import GenerationService
from scheduler.events import EndReason
from tests.support.frontends import PuppetEngine, make_frontend, outputs


class SlowContext:
    """Enough of grpc.aio's ServicerContext; a number of steps come while the first message is written, the last of them
    ends the stream.
    """

    def __init__(self, engine: PuppetEngine, steps: int = 1) -> None:
        self.engine, self.steps = engine, steps
        self.messages: list[pb.StreamGenerateResponse] = []
        self.frontend = None

    def time_remaining(self) -> None:
        return None

    def invocation_metadata(self) -> tuple[()]:
        return ()

    async def send_initial_metadata(self, metadata: object) -> None:
        self.submitted = asyncio.create_task(self._answer())

    async def _answer(self) -> None:
        while not self.engine.submitted():
            await asyncio.sleep(0.001)
        self.engine.deliver(outputs([(self.engine.submitted()[0], 0, 70)]))

    async def write(self, message: pb.StreamGenerateResponse) -> None:
        self.messages.append(message)
        if len(self.messages) == 1:
            attempt = self.engine.submitted()[0]
            for position in range(1, self.steps + 1):
                ends = [(attempt, EndReason.LENGTH)] if position == self.steps else []
                self.engine.deliver(outputs([(attempt, position, 70 + position)], ends))
                await asyncio.sleep(0)


def stream(tokenizer: Tokenizer, steps: int) -> list[pb.StreamGenerateResponse]:
    async def test() -> list[pb.StreamGenerateResponse]:
        frontend, engine, _ = make_frontend(tokenizer)
        context = SlowContext(engine, steps)
        context.frontend = frontend
        request = pb.StreamGenerateRequest(spec=pb.GenerationSpec(text="cat"))
        await GenerationService(frontend).StreamGenerate(request, context)
        return context.messages

    return asyncio.run(asyncio.wait_for(test(), 30))


def test_tokens_that_come_during_a_write_go_into_one_message(tokenizer: Tokenizer) -> None:
    first, rest = stream(tokenizer, 5)
    assert (first.deltas[0].first_position, first.deltas[0].token_count) == (0, 1)
    assert (rest.deltas[0].first_position, rest.deltas[0].token_count) == (1, 5)
    assert first.deltas[0].text + rest.deltas[0].text == tokenizer.decode(list(range(70, 76)), True)
    assert rest.usage.completion_tokens == 6


def test_end_that_comes_during_a_write_is_still_sent(tokenizer: Tokenizer) -> None:
    messages = stream(tokenizer, 1)
    assert [m.deltas[0].token_count for m in messages] == [1, 1]
    assert messages[-1].deltas[0].finish_reason == pb.FINISH_REASON_LENGTH
    assert messages[-1].usage.completion_tokens == 2


def test_entry_cancelled_while_it_waits_for_its_turn_is_counted(tokenizer: Tokenizer) -> None:
    async def test() -> float | None:
        frontend, _, metrics = make_frontend(tokenizer)
        door = asyncio.Lock()
        await door.acquire()
        waiting = asyncio.create_task(GenerationService(frontend).hold_slot(door, "ann").__aenter__())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        door.release()
        return metrics.registry.get_sample_value("quire_requests_total", {"model_name": "m", "outcome": "cancelled"})

    assert asyncio.run(asyncio.wait_for(test(), 30)) == 1
