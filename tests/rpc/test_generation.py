"""The generation service with a client whose writes take their time."""

import asyncio

from quire.v1 import generation_service_pb2 as pb

from model.inputs.tokenizer import Tokenizer
from rpc.services.generation import GenerationService
from scheduler.events import EndReason
from tests.support.frontends import PuppetEngine, make_frontend, outputs


class SlowContext:
    """Enough of grpc.aio's ServicerContext; the step that ends the stream comes while the first message is written."""

    def __init__(self, engine: PuppetEngine) -> None:
        self.engine = engine
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
        self.frontend._deliver(outputs([(self.engine.submitted()[0], 0, 70)]))

    async def write(self, message: pb.StreamGenerateResponse) -> None:
        self.messages.append(message)
        if len(self.messages) == 1:
            attempt = self.engine.submitted()[0]
            self.frontend._deliver(outputs([(attempt, 1, 71)], [(attempt, EndReason.LENGTH)]))


def test_end_that_comes_during_a_write_is_still_sent(tokenizer: Tokenizer) -> None:
    async def test() -> list[pb.StreamGenerateResponse]:
        frontend, engine, _ = make_frontend(tokenizer)
        context = SlowContext(engine)
        context.frontend = frontend
        request = pb.StreamGenerateRequest(spec=pb.GenerationSpec(text="cat"))
        await GenerationService(frontend).StreamGenerate(request, context)
        return context.messages

    messages = asyncio.run(asyncio.wait_for(test(), 30))
    assert [m.deltas[0].token_count for m in messages] == [1, 1]
    assert messages[-1].deltas[0].finish_reason == pb.FINISH_REASON_LENGTH
    assert messages[-1].usage.completion_tokens == 2


def test_entry_cancelled_while_it_waits_for_its_turn_is_counted(tokenizer: Tokenizer) -> None:
    async def test() -> float | None:
        frontend, _, metrics = make_frontend(tokenizer)
        door = asyncio.Lock()
        await door.acquire()
        waiting = asyncio.create_task(GenerationService(frontend)._turn(door).__aenter__())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        door.release()
        return metrics.registry.get_sample_value("quire_requests_total", {"model_name": "m", "outcome": "cancelled"})

    assert asyncio.run(asyncio.wait_for(test(), 30)) == 1
