"""The frontend against an engine that misbehaves in every way an engine can."""

import asyncio
import threading
import time
from dataclasses import replace

import numpy as np
import pytest

from cache_manager.block_hash import Scope
from model.inputs.tokenizer import Tokenizer
from rpc.frontend.errors import RequestFailed
from rpc.frontend.frontend import Frontend
from rpc.frontend.live import Live
from rpc.frontend.prepare import Preparer
from rpc.frontend.stream import FinishReason
from rpc.observe.records import RequestRecord
from rpc.services import convert
from scheduler.events import AdminQuestion, End, EndReason
from scheduler.limits import Limits
from scheduler.parameters import Beam, Sampling, Stopping
from scheduler.request import Request
from scheduler.spec import Spec
from tests.support.frontends import make_frontend, outputs


async def test_duplicates_and_zombies_are_ignored(tokenizer: Tokenizer) -> None:
    frontend, engine, metrics = make_frontend(tokenizer)
    async with frontend.open(Spec("cat"), "a", None) as live:
        (attempt,) = engine.submitted()
        for step in (
            outputs([(attempt, 0, 70)], starts=[attempt]),
            outputs([(attempt, 0, 70)]),
            outputs([(attempt + 9, 0, 72)]),
            outputs([(attempt, 1, 73)], [(attempt, EndReason.LENGTH), (attempt + 9, EndReason.STOP)]),
            outputs([(attempt, 2, 74)], [(attempt, EndReason.STOP)]),
        ):
            engine.deliver(step)
        await live.wait()
        (delta,) = live.stream.take()
        assert delta.token_ids == [70, 73]
        assert delta.finish is not None
        assert delta.finish.reason is FinishReason.LENGTH
    assert engine.finished() == []
    assert metrics.registry.get_sample_value("quire_generation_tokens_total", {"model_name": "m"}) == 2


async def test_cached_tokens_are_told_with_the_prompt_and_with_the_usage(tokenizer: Tokenizer) -> None:
    frontend, engine, metrics = make_frontend(tokenizer)
    async with frontend.open(Spec(tuple(range(1, 41))), "a", None) as live:
        (attempt,) = engine.submitted()
        engine.deliver(outputs([(attempt, 0, 70)], [(attempt, EndReason.LENGTH)], [attempt], cached=32))
        await live.wait()
        assert convert.prompt_info(live.stream).cached_token_count == 32
        usage = convert.usage(live.stream)
        assert (usage.prompt_tokens, usage.cached_prompt_tokens, usage.completion_tokens) == (40, 32, 1)
    assert metrics.registry.get_sample_value("quire_prompt_tokens_cached_total", {"model_name": "m"}) == 32


async def test_a_request_goes_to_the_engine_with_its_salt(tokenizer: Tokenizer) -> None:
    frontend, engine, _ = make_frontend(tokenizer)
    async with frontend.open(Spec("cat", cache_salt="a-B_9"), "a", None):
        assert [event.request.scope for event in engine.sent] == [Scope(salt="a-B_9")]


async def test_stream_that_cannot_be_read_fails_alone(tokenizer: Tokenizer) -> None:
    frontend, engine, metrics = make_frontend(tokenizer)
    async with frontend.open(Spec("a"), "lost", None) as lost, frontend.open(Spec("a"), "fine", None) as fine:
        first, second = engine.submitted()
        engine.deliver(outputs([(first, 1, 70), (second, 0, 71)], [(second, EndReason.LENGTH)]))
        await lost.wait()
        assert lost.stream.failure is not None
        assert lost.stream.failure.code == "INTERNAL"
        await fine.wait()
        (delta,) = fine.stream.take()
        assert delta.token_ids == [71]
        assert delta.finish is not None
    assert engine.finished() == [first]
    counted = {"model_name": "m", "outcome": "internal"}
    assert metrics.registry.get_sample_value("quire_requests_total", counted) == 1


async def test_deadline_holds_though_the_last_text_cannot_be_read(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    frontend, engine, _ = make_frontend(tokenizer)
    async with frontend.open(Spec("cat", max_time=0.05), "a", None) as live:
        monkeypatch.setattr(live.stream, "close", lambda finish: 1 / 0)
        await live.wait()
        assert live.stream.failure is not None
        assert live.stream.failure.code == "INTERNAL"
    assert engine.finished() == engine.submitted()


async def test_failure_of_the_caller_is_the_outcome(tokenizer: Tokenizer) -> None:
    frontend, _, metrics = make_frontend(tokenizer)
    stalled = RequestFailed("RESOURCE_EXHAUSTED", "SLOW_READER", "the client read nothing")
    with pytest.raises(RequestFailed):
        await _open_and_raise(frontend, stalled)
    counted = {"model_name": "m", "outcome": "slow_reader"}
    assert metrics.registry.get_sample_value("quire_requests_total", counted) == 1


async def _open_and_raise(frontend: Frontend, error: Exception) -> None:
    async with frontend.open(Spec("cat"), "a", None):
        raise error


async def test_tokenizer_takes_a_bounded_number_of_prompts(tokenizer: Tokenizer) -> None:
    frontend, engine, _ = make_frontend(tokenizer, max_preparing=1)
    first = frontend.open(Spec("cat"), "a", None)
    opening = asyncio.create_task(first.__aenter__())
    await asyncio.sleep(0)
    with pytest.raises(RequestFailed) as refused:
        await frontend.open(Spec("cat"), "b", None).__aenter__()
    assert refused.value.reason == "QUEUE_FULL"
    await opening
    await first.__aexit__(None, None, None)
    assert engine.finished() == engine.submitted()


async def test_one_tenant_leaves_half_of_the_tokenizer_to_others(tokenizer: Tokenizer) -> None:
    frontend, _, _ = make_frontend(tokenizer, max_preparing=4)
    held = threading.Event()
    busy = [asyncio.create_task(frontend.in_worker(lambda _limits: held.wait(30), tenant="ann")) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(RequestFailed, match="2 requests are being tokenized for 'ann', the limit for one tenant is 2"):
        await frontend.in_worker(lambda _limits: None, tenant="ann")
    other = asyncio.create_task(frontend.in_worker(lambda _limits: "served", tenant="bob"))
    held.set()
    assert await other == "served"
    await asyncio.gather(*busy)
    assert await frontend.in_worker(lambda _limits: "again", tenant="ann") == "again"


async def test_output_prefix_is_not_read_on_the_loop(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: set[str] = set()
    decode = tokenizer.decode

    def spy(ids: list[int], skip_special_tokens: bool) -> str:
        threads.add(threading.current_thread().name)
        return decode(ids, skip_special_tokens)

    frontend, engine, _ = make_frontend(tokenizer)
    monkeypatch.setattr(tokenizer, "decode", spy)
    async with frontend.open(Spec("cat", output_prefix=(70, 71, 72)), "a", None) as live:
        assert live.stream.token_count == 3
        assert engine.sent[0].emitted == ((70, 71, 72),)
    assert threads
    assert all(name.startswith("quire-prepare") for name in threads)


async def test_stop_string_finishes_the_attempt_at_once(tokenizer: Tokenizer) -> None:
    frontend, engine, _ = make_frontend(tokenizer)
    ids = tokenizer.encode("xxSTOPyy", False)
    async with frontend.open(Spec("cat", stopping=Stopping(stop=("STOP",))), "a", None) as live:
        (attempt,) = engine.submitted()
        for position, token in enumerate(ids):
            engine.deliver(outputs([(attempt, position, token)]))
        assert engine.finished() == [attempt]
        (delta,) = live.stream.take()
        assert delta.text == "xx"
        assert len(delta.token_ids) == len(ids) - 2
        assert delta.finish is not None
        assert delta.finish.stop_string == "STOP"
    assert engine.finished() == [attempt], "an ended attempt is not finished twice"


@pytest.mark.parametrize(
    ("reason", "code"),
    [
        (EndReason.QUEUE_FULL, "RESOURCE_EXHAUSTED"),
        (EndReason.QUEUE_TIMEOUT, "RESOURCE_EXHAUSTED"),
        (EndReason.FAULT, "INTERNAL"),
    ],
)
async def test_failed_ends_become_failures(tokenizer: Tokenizer, reason: EndReason, code: str) -> None:
    frontend, engine, metrics = make_frontend(tokenizer)
    async with frontend.open(Spec("cat"), "a", None) as live:
        engine.deliver(outputs(ends=[(engine.submitted()[0], reason)]))
        await live.wait()
        assert live.stream.failure is not None
        assert live.stream.failure.code == code
    counted = {"model_name": "m", "outcome": live.stream.failure.reason.lower()}
    assert metrics.registry.get_sample_value("quire_requests_total", counted) == 1


@pytest.mark.parametrize("last", ["token", "end", "delay"])
async def test_reader_who_wants_several_tokens_sleeps_until_they_are_there(tokenizer: Tokenizer, last: str) -> None:
    frontend, engine, _ = make_frontend(tokenizer)
    async with frontend.open(Spec("cat"), "a", None) as live:
        (attempt,) = engine.submitted()
        reading = asyncio.create_task(live.wait(3, 0.2 if last == "delay" else None))
        for position in range(2):
            engine.deliver(outputs([(attempt, position, 70)]))
            await asyncio.sleep(0.01)
        assert not reading.done()
        if last != "delay":
            ends = [(attempt, EndReason.LENGTH)] if last == "end" else []
            engine.deliver(outputs([(attempt, 2, 70)] if last == "token" else [], ends))
        await reading
        assert live.stream.pending_tokens == (3 if last == "token" else 2)
        live.stream.take()
        if last != "end":  # and the next reader is content with one
            engine.deliver(outputs([(attempt, 3 if last == "token" else 2, 70)]))
            await live.wait()
            assert live.stream.pending_tokens == 1


async def test_a_token_in_the_moment_when_the_delay_runs_out_is_no_news_once_taken(tokenizer: Tokenizer) -> None:
    frontend, engine, _ = make_frontend(tokenizer)
    async with frontend.open(Spec("cat"), "a", None) as live:
        (attempt,) = engine.submitted()
        engine.deliver(outputs([(attempt, 0, 70)]))
        reading = asyncio.create_task(live.wait(3, 0.01))
        await asyncio.sleep(0)  # it waits for more
        loop = asyncio.get_running_loop()
        loop.call_later(0.02, engine.deliver, outputs([(attempt, 1, 70), (attempt, 2, 70)]))
        time.sleep(0.03)  # the loop stands still: both are due in its next turn
        await reading
        assert live.stream.pending_tokens == 3
        live.stream.take()
        waiting = asyncio.create_task(live.wait())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not waiting.done(), "woken by what was taken"
        engine.deliver(outputs([(attempt, 3, 70)]))
        await waiting


async def test_reader_that_falls_behind_is_cut_off_but_a_unary_call_is_not(tokenizer: Tokenizer) -> None:
    frontend, engine, _ = make_frontend(tokenizer, backlog_tokens=10)
    lives: list[Live] = []
    async with frontend.open(Spec("a"), "slow", None) as slow, frontend.open(Spec("a"), "u", None, False) as unary:
        lives += [slow, unary]
        first, second = engine.submitted()
        for position in range(11):
            engine.deliver(outputs([(first, position, 70), (second, position, 70)]))
        assert slow.stream.failure is not None
        assert slow.stream.failure.reason == "SLOW_READER"
        assert engine.finished() == [first]
        assert unary.stream.failure is None
        assert unary.stream.pending_tokens == 11
    assert frontend.live_requests == 0


async def test_a_search_s_result_is_no_backlog(tokenizer: Tokenizer) -> None:
    """It comes at once, however fast its client reads."""
    frontend, engine, _ = make_frontend(tokenizer, backlog_tokens=10)
    async with frontend.open(Spec("a", sampling=Sampling(beam=Beam(2))), "a", None) as live:
        (attempt,) = engine.submitted()
        engine.deliver(outputs([(attempt, position, 70) for position in range(11)], starts=[attempt]))
        engine.deliver(outputs(ends=[(attempt, EndReason.LENGTH)]))
        await live.wait()
        assert live.stream.failure is None
        assert live.stream.ended
        assert sum(len(delta.token_ids) for delta in live.stream.take()) == 11


async def test_a_question_ends_with_its_engine(tokenizer: Tokenizer) -> None:
    frontend, engine, _ = make_frontend(tokenizer)
    asking = asyncio.create_task(frontend.ask(AdminQuestion.PAGE_MAP, 0))
    while not engine.sent:
        await asyncio.sleep(0)
    engine.failure = "it was killed"
    engine.deliver(outputs())
    with pytest.raises(RequestFailed) as raised:
        await asking
    assert (raised.value.code, raised.value.reason) == ("UNAVAILABLE", "ENGINE_FAILED"), "it waited for an answer"


async def test_leaving_early_finishes_the_attempt_and_frees_the_id(tokenizer: Tokenizer) -> None:
    frontend, engine, _ = make_frontend(tokenizer)

    async def leave() -> None:
        async with frontend.open(Spec("cat"), "same", None):
            with pytest.raises(RequestFailed) as twice:
                await frontend.open(Spec("cat"), "same", None).__aenter__()
            assert twice.value.code == "ALREADY_EXISTS"
            raise RuntimeError("client went")

    with pytest.raises(RuntimeError, match="client went"):
        await leave()
    assert engine.finished() == engine.submitted()
    assert frontend.live_requests == 0
    await frontend.wait_idle()
    async with frontend.open(Spec("cat"), "same", None):
        assert frontend.live_requests == 1


async def test_max_time_ends_with_what_there_is(tokenizer: Tokenizer) -> None:
    frontend, engine, _ = make_frontend(tokenizer)
    async with frontend.open(Spec("cat", max_time=0.05), "a", None) as live:
        engine.deliver(outputs([(engine.submitted()[0], 0, 70)]))
        while not live.stream.ended:
            await live.wait()
        (delta,) = live.stream.take()
        assert delta.token_ids == [70]
        assert delta.finish is not None
        assert delta.finish.reason is FinishReason.DEADLINE
    assert engine.finished() == engine.submitted()


async def test_preparation_is_taken_off_the_time_of_a_request(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    frontend, _, _ = make_frontend(tokenizer)
    prepare, submit = Preparer.prepare, frontend.dispatch.submit
    spent, given = list[float](), list[float]()

    def slow(self: Preparer, spec: Spec, limits: Limits) -> Request:
        began = time.monotonic()
        made = prepare(self, spec, limits)
        spent.append(time.monotonic() - began)
        return made

    def spy(live: Live, seconds: float) -> None:
        given.append(seconds)
        submit(live, seconds)

    monkeypatch.setattr(Preparer, "prepare", slow)
    monkeypatch.setattr(frontend.dispatch, "submit", spy)
    for asked, most in ((5.0, 5.0), (None, frontend.settings.request_time)):
        async with frontend.open(Spec("cat", max_time=asked), "a", None):
            assert given.pop() <= most - spent.pop()


async def test_the_first_token_of_a_request_is_that_of_its_first_sequence_to_have_one(tokenizer: Tokenizer) -> None:
    frontend, engine, _ = make_frontend(tokenizer)
    records = list[RequestRecord]()
    frontend.reporter.watchers.append(records.append)
    spec = Spec("cat", sampling=Sampling(temperature=1.0, sequence_count=2))
    async with frontend.open(spec, "a", None) as live:
        (attempt,) = engine.submitted()
        for position, index in ((0, 1), (1, 1), (0, 0)):
            step = outputs([(attempt, position, 70)])
            engine.deliver(replace(step, indices=np.array([index], np.int32)))
        ends = (End(attempt, EndReason.LENGTH, more=True), End(attempt, EndReason.LENGTH, index=1))
        engine.deliver(replace(outputs(), ends=ends))
        assert live.stream.ended
        second, first = live.first_tokens[0], live.first_tokens[1]
    (record,) = records
    assert first < live.last_tokens[1] < second
    assert record.moments is not None
    assert record.moments.first is not None
    assert record.moments.last is not None
    assert record.moments.last - record.moments.first == pytest.approx(second - first, abs=1e-9)


async def test_health_is_progress(tokenizer: Tokenizer) -> None:
    frontend, engine, _ = make_frontend(tokenizer, stall_timeout=5)
    assert frontend.health()
    engine.stalled = 6
    assert not frontend.health(), "a loop with work that finishes no step"
    engine.stalled = 0
    engine.failure = "RuntimeError: device lost"
    assert not frontend.health()
    engine.failure = None
    frontend.draining = True
    assert not frontend.health()
    with pytest.raises(RequestFailed) as refused:
        await frontend.open(Spec("cat"), "a", None).__aenter__()
    assert refused.value.reason == "DRAINING"


async def test_time_remaining_bounds_the_wait_in_the_queue(tokenizer: Tokenizer) -> None:
    frontend, engine, _ = make_frontend(tokenizer)
    for spec_time, remaining, expected in (
        (None, None, None),
        (90.0, None, 90.0),
        (90.0, 60.0, 60.0),
        (None, 60.0, 60.0),
    ):
        engine.sent.clear()
        async with frontend.open(Spec("cat", max_queue_time=spec_time), "a", remaining):
            queue_timeout = engine.sent[0].request.queue_timeout
            assert (queue_timeout is None) == (expected is None)
            # The time that tokenizing took is not there for the queue any more.
            assert queue_timeout is None or 0 < queue_timeout <= expected
