"""The Python clients, sync and asyncio, against real servers: the same answers, typed errors, waits and cancels."""

import asyncio
import threading
from collections.abc import Iterator

import pytest
from quire.v1 import generation_service_pb2 as pb

from rpc.client import (
    AsyncClient,
    CancelledError,
    Client,
    DeadlineError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    UnavailableError,
)
from tests.support.server import RunningServer, running_server

GREEDY = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
LONG = {"max_tokens": 900, "ignore_eos": True}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server() as running:
        yield running


def test_both_clients_give_what_the_api_gives(server: RunningServer) -> None:
    async def with_asyncio() -> tuple:
        async with AsyncClient(server.address) as client:
            ids = await client.tokenize("First Citizen:")
            whole = await client.generate("First Citizen:", **GREEDY)
            async with client.stream("First Citizen:", **GREEDY) as stream:
                text = "".join([piece async for piece in stream.text()])
            models = [model.name for model in await client.models()]
            return ids, await client.detokenize(ids), whole.sequences[0].text, text, models

    with Client(server.address) as client:
        ids = client.tokenize("First Citizen:")
        whole = client.generate("First Citizen:", **GREEDY)
        with client.stream(ids, **GREEDY) as stream:
            text = "".join(stream.text())
        models = [model.name for model in client.models()]
        found = (ids, client.detokenize(ids), whole.sequences[0].text, text, models)
    assert whole.sequences[0].finish_reason == pb.FINISH_REASON_LENGTH
    assert whole.usage.completion_tokens == 12
    assert found == asyncio.run(with_asyncio())
    assert found[1:] == ("First Citizen:", text, text, [server.model])


def test_a_chat_is_a_list_of_turns(server: RunningServer) -> None:
    with Client(server.address) as client, pytest.raises(InvalidRequestError) as raised:
        client.generate([{"role": "user", "content": "Hello"}], max_tokens=1)
    assert raised.value.reason == "NO_CHAT_TEMPLATE", "it came as a chat, and the demo model has no template"


def test_errors_have_types_and_say_what_is_wrong(server: RunningServer) -> None:
    with Client(server.address) as client:
        with pytest.raises(InvalidRequestError, match=r"sampling.top_p is 7.0: must be in \(0, 1\]") as raised:
            client.generate("x", top_p=7)
        assert (raised.value.field, raised.value.reason) == ("spec.sampling.top_p", "INVALID_FIELD")
        with pytest.raises(NotFoundError, match="is not served here"), client.stream("x", model="gpt-5") as stream:
            next(stream)
        with pytest.raises(DeadlineError):
            client.generate("x", timeout=0.02, **LONG)
    with Client("127.0.0.1:1", timeout=5) as nobody, pytest.raises(UnavailableError, match="no server answers"):
        nobody.models()


def test_a_stream_that_is_left_is_cancelled(server: RunningServer) -> None:
    before = server.metrics()["quire_requests_total{cancelled}"]
    with Client(server.address) as client:
        with client.stream("x", **LONG) as stream:
            next(stream)
        server.wait_for_metric("quire_requests_total{cancelled}", before + 1)
        stream = client.stream("x", **LONG)
        next(stream)
        threading.Thread(target=stream.cancel).start()
        with pytest.raises(CancelledError):
            for _ in stream:
                pass
        server.wait_for_metric("quire_requests_total{cancelled}", before + 2)

    async def cancelled() -> None:
        async with AsyncClient(server.address) as client:
            task = asyncio.create_task(client.generate("x", **LONG))
            async with client.stream("x", **LONG) as stream:
                await anext(stream)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            async with client.stream("x", **LONG) as stream:
                await anext(stream)
                stream.cancel()
                with pytest.raises(CancelledError):
                    async for _ in stream:
                        pass

    asyncio.run(cancelled())
    server.wait_for_metric("quire_requests_total{cancelled}", before + 5)


def test_a_client_that_is_closed_says_so_to_who_waits_and_cancels_no_task(server: RunningServer) -> None:
    async def closed() -> list[BaseException | object]:
        client = AsyncClient(server.address)
        stream = client.stream("x", **LONG)
        await anext(stream)

        async def rest() -> None:
            async for _ in stream:
                pass

        waiting = asyncio.gather(client.generate("x", **LONG), rest(), return_exceptions=True)
        await asyncio.to_thread(server.wait_for_metric, "quire_num_requests_running", 2)
        await client.close()
        return await waiting

    assert [type(end) for end in asyncio.run(closed())] == [CancelledError, CancelledError]


def test_a_full_queue_is_waited_out() -> None:
    flags = ("--max-sequences", "1", "--max-queue", "1", "--max-batched-tokens", "64")
    with running_server(*flags) as server, Client(server.address) as client:
        streams = [client.stream("x", **LONG) for _ in range(2)]
        next(streams[0])
        waiting = threading.Thread(target=lambda: list(streams[1]))
        waiting.start()
        server.wait_for_metric("quire_num_requests_waiting", 1)
        with Client(server.address, refusals=0) as impatient, pytest.raises(OverloadedError) as raised:
            impatient.generate("y", max_tokens=1)
        assert raised.value.reason == "QUEUE_FULL"
        assert raised.value.retry_after is not None

        async def patient() -> int:
            async with AsyncClient(server.address, refusals=100) as one:
                return (await one.generate("y", max_tokens=1, ignore_eos=True)).usage.completion_tokens

        answers = list[int]()
        asking = threading.Thread(target=lambda: answers.append(asyncio.run(patient())))
        asking.start()
        refused = server.metrics()["quire_requests_total{queue_full}"]
        server.wait_until(lambda metrics: min(refused + 1, metrics["quire_requests_total{queue_full}"]), refused + 1)
        for _ in streams[0]:
            pass
        for thread in (waiting, asking):
            thread.join(60)
        assert answers == [1]
