"""Frontends that use another server's engines: they have what its table has, and do what it asks of them."""

import asyncio
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from model.inputs.tokenizer import Tokenizer
from rpc.engines import joined as module
from rpc.engines.joined import JoinedEngines, JoinError
from rpc.engines.supervisor import Supervisor
from rpc.frontend.engine_client import Reach
from rpc.frontend.errors import RequestFailed
from rpc.frontend.frontend import Frontend
from rpc.frontend.live import Live
from rpc.frontend.prepare import Preparer
from rpc.frontend.settings import FrontendSettings
from rpc.link.client import LinkClient
from rpc.link.server import LinkService
from rpc.link.table import TableService
from rpc.observe.metrics import Metrics
from rpc.private_files import read_token
from rpc.settings import JoinSettings, SharingSettings
from scheduler.events import Abort, EndReason, Submit
from scheduler.limits import ModelDefaults
from scheduler.settings import RequestLimits
from scheduler.spec import Spec
from tests.support.distance import far_away
from tests.support.frontends import outputs
from tests.support.links import DEADLINE, MortalEngine, eventually, serving

MODEL = b"m" * 32
TOKEN = "right"  # noqa: S105 - of these tests


class Owner:
    """A server of engines that are puppets, each behind a link of its own; and its table."""

    def __init__(self, directory: Path, tokenizer: Tokenizer, token: str = "") -> None:
        self.directory, self.address = directory, f"unix:{directory / 'table'}"
        preparer = Preparer("m", tokenizer, ModelDefaults(eos_token_ids=(0,)))
        self.frontend = Frontend(preparer, FrontendSettings(), Metrics("m"), secret=b"s" * 32)
        self.table = TableService(self.frontend.replicas, self.address, token, MODEL)
        self.engines: dict[int, MortalEngine] = {}

    async def bring(self, stack: AsyncExitStack, number: int) -> MortalEngine:
        """In the place of the one with this number, if there is one."""
        place = Path(tempfile.mkdtemp(dir=self.directory))
        service = LinkService("secret")
        engine = self.engines[number] = MortalEngine(service.sink)
        address, _ = await stack.enter_async_context(serving(service, place))
        engine.reach = Reach(address, "secret")
        self.frontend.new_sink(number)
        service.attach(engine)
        self.frontend.attach(engine, number)
        return engine


@asynccontextmanager
async def owned(directory: Path, tokenizer: Tokenizer, engines: int = 2, token: str = "") -> AsyncIterator[Owner]:
    async with AsyncExitStack() as stack:
        owner = Owner(directory, tokenizer, token)
        for number in range(engines):
            await owner.bring(stack, number)
        await owner.table.open()
        stack.push_async_callback(owner.table.close)
        yield owner


class Guest:
    """A frontend that has joined."""

    def __init__(
        self, owner: Owner, tokenizer: Tokenizer, token: str = "", model: bytes = MODEL, start: float = 10.0
    ) -> None:
        preparer = Preparer("m", tokenizer, ModelDefaults(eos_token_ids=(0,)))
        self.metrics = Metrics("m", shows_engines=False)
        self.frontend = Frontend(preparer, FrontendSettings(), self.metrics)
        settings = JoinSettings(owner.address, start=start)
        self.fleet = JoinedEngines(settings, token, RequestLimits(), model, self.frontend)

    def states(self) -> dict[int, tuple[int, bool]]:
        """Epoch, and whether it takes requests, by number."""
        return {replica.number: (replica.epoch, replica.open) for replica in self.frontend.replicas}

    def place_of(self, live: Live) -> int:
        return self.frontend.replica_of(live).number


@asynccontextmanager
async def joined(owner: Owner, tokenizer: Tokenizer) -> AsyncIterator[Guest]:
    guest = Guest(owner, tokenizer)
    await guest.fleet.start()
    try:
        yield guest
    finally:
        await guest.fleet.stop()


async def submitted(engine: MortalEngine, count: int = 1) -> list[Submit]:
    """The next ones that reach it."""
    await eventually(lambda: len(engine.submitted()) >= count)
    return [event for event in engine.sent if isinstance(event, Submit)]


async def test_it_has_the_engines_of_the_table_and_serves_with_them(tmp_path: Path, tokenizer: Tokenizer) -> None:
    async with owned(tmp_path, tokenizer) as owner, joined(owner, tokenizer) as guest:
        await eventually(lambda: guest.states() == {0: (1, True), 1: (1, True)})
        assert guest.fleet.summary == f"engines of {owner.address}"
        assert guest.frontend.replicas.secret == b"s" * 32
        async with guest.frontend.open(Spec("cat"), "r", None) as live:
            engine = owner.engines[guest.place_of(live)]
            (submit,) = await submitted(engine)
            engine.tell(outputs([(submit.attempt, 0, 70)], [(submit.attempt, EndReason.LENGTH)], [submit.attempt]))
            await eventually(lambda: live.stream.ended)
            assert [delta.token_ids for delta in live.stream.take()] == [[70]]
        exposed = guest.metrics.registry.get_sample_value
        assert exposed("quire_replicas", {"model_name": "m"}) == 2
        assert exposed("quire_kv_pages", {"model_name": "m"}) is None, "its owner shows it"


async def test_requests_leave_an_engine_that_is_drained_or_replaced(tmp_path: Path, tokenizer: Tokenizer) -> None:
    async with (
        AsyncExitStack() as stack,
        owned(tmp_path, tokenizer) as owner,
        joined(owner, tokenizer) as guest,
    ):
        await eventually(lambda: len(guest.states()) == 2)
        live = await stack.enter_async_context(guest.frontend.open(Spec("cat"), "r", None))
        first = guest.place_of(live)
        other = 1 - first
        (submit,) = await submitted(owner.engines[first])
        owner.engines[first].tell(outputs([(submit.attempt, 0, 70)], starts=[submit.attempt]))
        await eventually(lambda: live.stream.sequences[0].token_count)
        owner.frontend.drain_replica(first)
        await owner.table.settled()
        assert guest.states()[first] == (1, False)
        assert guest.place_of(live) == other, "before its owner goes on"
        await eventually(lambda: Abort(submit.attempt) in owner.engines[first].sent)
        (again,) = await submitted(owner.engines[other])
        assert (again.emitted, again.again, again.isolated_steps) == (((70,),), True, 0)
        owner.frontend.resume_replica(first)
        await owner.table.settled()
        assert guest.states()[first] == (1, True)
        owner.frontend.mark(owner.frontend.serving(other), drained=False, leaving=True)
        await owner.table.settled()
        await submitted(owner.engines[first], 2)
        owner.frontend.detach(other)
        await eventually(lambda: other not in guest.states())
        await owner.bring(stack, other)
        await eventually(lambda: guest.states() == {first: (1, True), other: (2, True)})
        assert not guest.frontend.dispatch.quarantine.implicated, "no engine died with it"


async def test_an_engine_that_is_dead_is_not_in_the_table(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Its keeper needs a while to let go of it."""
    async with owned(tmp_path, tokenizer) as owner, joined(owner, tokenizer) as guest:
        await eventually(lambda: guest.states() == {0: (1, True), 1: (1, True)})
        owner.engines[1].failure = "device lost"
        owner.frontend.replicas.mark(owner.frontend.serving(0), drained=False, leaving=False)
        await eventually(lambda: guest.states() == {0: (1, True)})


async def test_a_link_that_breaks_is_made_anew_while_the_engine_lives(tmp_path: Path, tokenizer: Tokenizer) -> None:
    async with owned(tmp_path, tokenizer, engines=1) as owner, joined(owner, tokenizer) as guest:
        replica = guest.frontend.replicas.get(0)
        replica.client.fail("a cable was cut")
        await eventually(lambda: guest.frontend.replicas.get(0) not in (replica, None))
        assert guest.states() == {0: (1, True)}


async def test_requests_wait_for_another_server_in_the_place_of_one(tmp_path: Path, tokenizer: Tokenizer) -> None:
    async with AsyncExitStack() as stack:
        async with owned(tmp_path, tokenizer, engines=1) as owner:
            guest = await stack.enter_async_context(joined(owner, tokenizer))
            live = await stack.enter_async_context(guest.frontend.open(Spec("cat"), "r", None))
            await submitted(owner.engines[0])
        await eventually(lambda: not guest.frontend.replicas.open)
        (tmp_path / "next").mkdir()
        owner = Owner(tmp_path / "next", tokenizer)
        owner.table = TableService(owner.frontend.replicas, f"unix:{tmp_path / 'table'}", "", MODEL)
        engine = await owner.bring(stack, 0)
        await owner.table.open()
        stack.push_async_callback(owner.table.close)
        (submit,) = await submitted(engine)
        assert submit.again
        assert live.stream.failure is None


async def test_requests_leave_a_server_that_ends_before_its_engines_do(tmp_path: Path, tokenizer: Tokenizer) -> None:
    async with owned(tmp_path, tokenizer, engines=1) as owner, joined(owner, tokenizer) as guest:
        async with guest.frontend.open(Spec("cat"), "r", None) as live:
            await submitted(owner.engines[0])
            await Supervisor([], owner.frontend, table=owner.table).stop()
            assert guest.frontend.dispatch.waiting_for_engine == [live]
        assert not guest.frontend.dispatch.quarantine.implicated


@pytest.mark.parametrize(
    ("token", "model", "message"),
    [("wrong", MODEL, "refuses this frontend"), (TOKEN, b"x" * 32, "another configuration")],
)
async def test_what_does_not_belong_to_it_is_refused(
    tmp_path: Path, tokenizer: Tokenizer, token: str, model: bytes, message: str
) -> None:
    async with owned(tmp_path, tokenizer, token=TOKEN) as owner:
        guest = Guest(owner, tokenizer, token, model)
        with pytest.raises(JoinError, match=message):
            await guest.fleet.start()
        await guest.fleet.stop()


async def test_engines_of_another_server_are_drained_there(tmp_path: Path, tokenizer: Tokenizer) -> None:
    async with owned(tmp_path, tokenizer, engines=1) as owner, joined(owner, tokenizer) as guest:
        for refused in (guest.fleet.drain, guest.fleet.resume):
            with pytest.raises(RequestFailed, match="ask that one"):
                refused(0)
        with pytest.raises(RequestFailed, match="ask that one"):
            await guest.fleet.restart(0)


async def test_a_frontend_that_does_nothing_holds_up_a_table_for_a_while_only(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rpc.link.table.SETTLE_SECONDS", 0.05)

    async with owned(tmp_path, tokenizer, engines=1) as owner, joined(owner, tokenizer) as guest:
        await owner.table.settled()
        monkeypatch.setattr(guest.frontend, "until_moved", asyncio.Event().wait)
        owner.frontend.replicas.mark(owner.frontend.serving(0), drained=True, leaving=True)
        loop = asyncio.get_running_loop()
        began = loop.time()
        await owner.table.settled()
        assert loop.time() - began >= 0.04, "it waits for them"


async def test_a_frontend_that_acts_upon_an_older_table_is_waited_for(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It acts upon a table as long as requests move away from an engine that leaves."""
    async with owned(tmp_path, tokenizer) as owner, joined(owner, tokenizer) as guest:
        await eventually(lambda: len(guest.states()) == 2)
        await owner.table.settled()
        acting, may_act = asyncio.Event(), asyncio.Semaphore(0)

        async def slowly() -> None:
            acting.set()
            await may_act.acquire()

        monkeypatch.setattr(guest.frontend, "until_moved", slowly)
        first, second = owner.frontend.serving(0), owner.frontend.serving(1)
        owner.frontend.replicas.mark(first, drained=True, leaving=True)
        await acting.wait()
        older = owner.frontend.replicas.version
        owner.frontend.replicas.mark(second, drained=True, leaving=True)
        may_act.release()
        await eventually(lambda: list(owner.table.acknowledged.values()) == [older])
        settled = asyncio.create_task(owner.table.settled())
        may_act.release()
        await settled
        assert list(owner.table.acknowledged.values()) == [older + 1]


async def test_a_frontend_that_has_left_holds_up_nothing(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else each restart of an engine waits in vain for all who were ever there."""
    monkeypatch.setattr("rpc.link.table.SETTLE_SECONDS", 1e6)

    async with owned(tmp_path, tokenizer, engines=1) as owner:
        async with joined(owner, tokenizer):
            await owner.table.settled()
        owner.frontend.replicas.mark(owner.frontend.serving(0), drained=True, leaving=False)
        async with asyncio.timeout(DEADLINE):
            await owner.table.settled()


@pytest.mark.parametrize(
    ("address", "token", "message"),
    [
        ("10.0.0.1:7000", None, "can be reached by others: give a --join-token-file"),
        ("tcp://x", None, "must be unix:PATH or HOST:PORT"),
        ("10.0.0.1", "t", "must be unix:PATH or HOST:PORT"),
        (None, "t", "give a --join-address"),
    ],
)
def test_addresses_that_are_none_or_open_to_all(address: str | None, token: str | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SharingSettings(address, token)
    if address is not None:
        with pytest.raises(ValueError, match=message):
            JoinSettings(address, token)


def test_a_token_that_others_can_read_is_none(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("t\n")
    path.chmod(0o640)
    with pytest.raises(ValueError, match=r"--join-token-file .*token can be used by others"):
        read_token(path, "--join-token-file")
    path.chmod(0o600)
    assert read_token(path, "--join-token-file") == "t"


async def test_a_server_that_ends_while_its_table_is_acted_upon_is_followed_by_the_next(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with AsyncExitStack() as stack:
        async with owned(tmp_path, tokenizer, engines=1) as owner:
            guest = await stack.enter_async_context(joined(owner, tokenizer))
            await eventually(lambda: guest.states() == {0: (1, True)})
            acting, go_on = asyncio.Event(), asyncio.Event()

            async def slowly() -> None:
                acting.set()
                await go_on.wait()

            monkeypatch.setattr(guest.frontend, "until_moved", slowly)
            owner.frontend.replicas.mark(owner.frontend.serving(0), drained=True, leaving=True)
            await acting.wait()
        go_on.set()
        owner = await stack.enter_async_context(owned(tmp_path, tokenizer, engines=1))
        await eventually(lambda: guest.states() == {0: (1, True)})


async def test_a_table_of_a_server_that_lives_is_not_taken_from_it(tmp_path: Path, tokenizer: Tokenizer) -> None:
    async with owned(tmp_path, tokenizer, engines=0) as owner:
        second = TableService(owner.frontend.replicas, owner.address, "", MODEL)
        with pytest.raises(OSError, match="is another server's"):
            await second.open()


async def test_a_server_whose_answers_come_late_is_joined(tmp_path: Path, tokenizer: Tokenizer) -> None:
    async with owned(tmp_path, tokenizer, engines=1) as owner, far_away(owner.address, tmp_path, 0.4) as address:
        owner.address = address
        async with joined(owner, tokenizer) as guest:
            assert guest.states() == {0: (1, True)}


async def test_an_engine_that_leaves_the_table_is_shown_no_more(tmp_path: Path, tokenizer: Tokenizer) -> None:
    async with owned(tmp_path, tokenizer) as owner, joined(owner, tokenizer) as guest:
        await eventually(lambda: len(guest.states()) == 2)
        owner.frontend.detach(1)
        owner.frontend.replicas.retire(1)
        await eventually(lambda: [replica.number for replica in guest.frontend.replicas.newest] == [0])


async def test_a_link_that_is_never_made_is_given_up_and_tried_again(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect, tries = LinkClient.connect, list[LinkClient]()

    async def slow(self: LinkClient) -> None:
        tries.append(self)
        monkeypatch.setattr(module, "CONNECT_SECONDS", 10.0)
        if len(tries) == 1:
            await asyncio.Event().wait()
        await connect(self)

    monkeypatch.setattr(module, "CONNECT_SECONDS", 0.01)
    monkeypatch.setattr(module, "PAUSE", 0.0)
    monkeypatch.setattr(LinkClient, "connect", slow)
    async with owned(tmp_path, tokenizer, engines=1) as owner, joined(owner, tokenizer) as guest:
        assert guest.states() == {0: (1, True)}
        assert len(tries) == 2


async def test_a_start_without_any_engine_says_so_in_time(tmp_path: Path, tokenizer: Tokenizer) -> None:
    async with owned(tmp_path, tokenizer, engines=0) as owner:
        guest = Guest(owner, tokenizer, start=0.05)
        with pytest.raises(OSError, match=r"no engine of the server at .* could be reached within 0\.05 s"):
            await guest.fleet.start()
        await guest.fleet.stop()


async def test_an_engine_that_is_leaving_when_its_link_is_made_gets_no_requests(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    async with owned(tmp_path, tokenizer) as owner:
        owner.frontend.mark(owner.frontend.serving(1), drained=False, leaving=True)
        async with joined(owner, tokenizer) as guest:
            await eventually(lambda: guest.states() == {0: (1, True), 1: (1, False)})


async def test_a_table_is_acted_upon_once_requests_have_left_the_engine(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its owner ends the engine then."""
    waiting, moved = asyncio.Event(), asyncio.Event()

    async def until_moved() -> None:
        waiting.set()
        await moved.wait()

    async with owned(tmp_path, tokenizer) as owner, joined(owner, tokenizer) as guest:
        await eventually(lambda: len(guest.states()) == 2)
        monkeypatch.setattr(guest.frontend, "until_moved", until_moved)
        owner.frontend.replicas.mark(owner.frontend.serving(1), drained=False, leaving=True)
        settled = asyncio.create_task(owner.table.settled())
        await eventually(waiting.is_set)
        assert not settled.done()
        moved.set()
        await settled


async def test_a_server_of_another_model_in_the_place_of_one_is_not_the_end(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was put there by mistake: the frontend says so, and waits for the right one."""
    monkeypatch.setattr(module, "PAUSE", 0.01)

    async with AsyncExitStack() as stack:
        async with owned(tmp_path, tokenizer, engines=1) as owner:
            guest = await stack.enter_async_context(joined(owner, tokenizer))
        wrong = Owner(tmp_path, tokenizer)
        wrong.table = TableService(wrong.frontend.replicas, owner.address, "", b"x" * 32)
        await wrong.table.open()
        await eventually(lambda: "another configuration" in guest.fleet.trouble)
        await wrong.table.close()
        await stack.enter_async_context(owned(tmp_path, tokenizer, engines=1))
        await eventually(lambda: guest.states() == {0: (1, True)})
