"""Questions about constrained ends that are open: their tenants take turns, and what waits behind them is bounded."""

import asyncio
import threading
from contextlib import AsyncExitStack

import pytest

from model.inputs.tokenizer import Tokenizer
from rpc.frontend.completeness import Question
from scheduler.events import EndReason
from scheduler.parameters import Stopping
from scheduler.spec import Spec
from scheduler.structured import Structured
from tests.rpc.test_constrained_ends import accept, ids, make, stream_of
from tests.support.frontends import outputs


async def test_many_questions_of_one_tenant_do_not_delay_those_of_another_by_many(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered, asked, answer = list[str](), threading.Event(), threading.Event()

    def slow(question: Question) -> bool:
        asked.set()
        assert answer.wait(60)
        answered.append(question.constraint.text)
        return True

    monkeypatch.setattr("rpc.frontend.outputs.Outputs._is_complete", lambda self, question: slow(question))
    frontend, engine = make(tokenizer)
    try:
        async with AsyncExitStack() as stack:
            for number in range(6):
                spec = Spec("a", tenant="many", structured=Structured.regex(f"a|{number}"))
                await stack.enter_async_context(frontend.open(spec, str(number), None))
            spec = Spec("a", tenant="other", structured=Structured.regex("a|other"))
            last = await stack.enter_async_context(frontend.open(spec, "other", None))
            for attempt in engine.submitted():
                engine.deliver(outputs([(attempt, 0, ids("a")[0])], [(attempt, EndReason.LENGTH)], [attempt]))
            await asyncio.to_thread(asked.wait, 60)
            answer.set()
            async with asyncio.timeout(60):
                while not last.stream.ended:
                    await last.wait()
            assert answered.index("a|other") <= 2
    finally:
        answer.set()
        frontend.shutdown()


class Asked:
    """Answers no to all questions, but none before it may."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.may_answer = threading.Event()
        monkeypatch.setattr("rpc.frontend.outputs.Outputs._is_complete", lambda outputs, question: self._answer())

    def _answer(self) -> bool:
        assert self.may_answer.wait(60)
        return False


BACKLOG = 10
STOPS_AT_POINTS = Spec("a", structured=Structured.regex("[a-z.]+b"), stopping=Stopping(max_tokens=100, stop=(".",)))


async def test_a_client_that_reads_is_not_cut_off_behind_a_long_question(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer lets in more tokens than may wait, and the next step can come before the client's turn."""
    frontend, engine = make(tokenizer, backlog_tokens=BACKLOG)
    asked = Asked(monkeypatch)
    try:
        async with frontend.open(STOPS_AT_POINTS, "a", None) as live:
            (attempt,), (sequence,) = engine.submitted(), live.stream.sequences

            def deliver(start: int, text: str) -> None:
                engine.deliver(outputs([(attempt, start + i, token) for i, token in enumerate(ids(text))]))

            deliver(0, "a." + BACKLOG * "b")
            assert sequence.waiting_tokens == BACKLOG
            asked.may_answer.set()
            async with asyncio.timeout(60):
                while sequence.waiting_tokens:
                    await asyncio.sleep(0)
            deliver(2 + BACKLOG, "b")
            assert live.stream.failure is None
            assert "".join(delta.text for delta in live.stream.take()) == f"a.{BACKLOG * 'b'}b"
            deliver(3 + BACKLOG, (BACKLOG + 1) * "b")
            assert live.stream.failure is not None, "this one does not read"
            assert live.stream.failure.reason == "SLOW_READER"
    finally:
        asked.may_answer.set()
        frontend.shutdown()


async def test_a_client_that_never_reads_is_cut_off_behind_questions_too(tokenizer: Tokenizer) -> None:
    stream = stream_of(STOPS_AT_POINTS, lambda question: False)
    (sequence,) = stream.sequences
    for start in range(0, 60, 20):
        accept(stream, "." + 19 * "b", start)
        assert not sequence.answer(False)
    assert (sequence.pending_tokens, sequence.backlog) == (60, 41)
    stream.take()
    assert sequence.backlog == 0


@pytest.mark.parametrize("streaming", [True, False])
async def test_so_many_tokens_of_a_stream_wait_for_an_answer(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, streaming: bool
) -> None:
    frontend, engine = make(tokenizer, backlog_tokens=BACKLOG)
    asked = Asked(monkeypatch)
    try:
        async with frontend.open(STOPS_AT_POINTS, "a", None, streaming) as live:
            (attempt,) = engine.submitted()
            for position, token in enumerate(ids("." + (BACKLOG + 1) * "b")):
                assert live.stream.failure is None
                engine.deliver(outputs([(attempt, position, token)]))
            failure = live.stream.failure
            if not streaming:
                assert failure is None, "its tokens are kept until its end all the same"
                return
            assert failure is not None
            assert (failure.code, failure.reason) == ("UNAVAILABLE", "GRAMMAR_UNCHECKED")
            assert f"more than {BACKLOG} tokens, the limit of --max-backlog" in failure.message
            assert "stopping.stop" in failure.message
            assert engine.finished() == engine.submitted()
            assert not frontend.dispatch.delivery.open_questions
    finally:
        asked.may_answer.set()
        frontend.shutdown()
