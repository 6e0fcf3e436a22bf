"""KV transfers: copies the KV pages of requests that move from another engine, where a copy is cheaper than computing.

Such a request waits here until its pages have come; then the engine gets both together. Pages that do not come, or not
in time, are computed. So the worst that a transfer can do to a stream is to make it wait.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Container, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from itertools import dropwhile

import grpc
from grpc import aio
from quire.engine.v1 import engine_service_pb2_grpc as pb_grpc

from cache_manager.block_hash import BlockHash
from cache_manager.transfers import TransferredPage
from rpc.link import CHANNEL_OPTIONS
from rpc.link.arrays import LinkError
from rpc.link.pages import PagePort, joined_hashes
from rpc.link.proof import StrangerError, TokenProof
from rpc.link.transfer_rate import TransferRate
from scheduler.costs import copying_pays
from scheduler.events import SHORT_HASH, Abort, AdminQuery, AdminQuestion, Event, KVSource, StepOutputs, Submit

log = logging.getLogger("quire.link")

TRANSFER_SECONDS = 3.0  # longest wait of a request for its pages
AT_ONCE = 2  # transfers; the first requests go on while the next ones' pages come
MOST_HELD = 2**30  # bytes of pages whose requests have not started yet
MOST_TRANSFERRED = 2**28  # bytes of one request's pages, which the engine writes into its pool within one step

Wanted = list[list[tuple[BlockHash, bytes]]]
"""Pages of each sequence in order: block hash, and the bytes that it is made from beside the hash before it."""


@dataclass(slots=True, eq=False)
class PendingTransfer:
    """A request that waits for its pages.

    Attributes:
        submit: The request's Submit, which the engine gets with the pages.
        wanted: Pages to copy.
        transferred: Pages that have come and passed their checks.
        task: Task that copies them.
    """

    submit: Submit
    wanted: Wanted
    transferred: dict[BlockHash, TransferredPage]
    task: asyncio.Task[None] | None = None


class PendingTransfers:
    """The KV transfers to one engine. Used on the link's loop alone.

    Args:
        port: KV pages of the engine.
        here: Block hashes in the engine's prefix cache, SHORT_HASH bytes each.
        send: Hands events to the engine.

    Attributes:
        pending: Requests that wait for their pages, by attempt.
        held: Bytes of pages that are to come, or whose request has not started, by attempt.
        several: Attempts with several sequences whose pages are copied.
        channels: Open channel to each source, and the count of transfers that use it.
        rate: Rate of the transfers so far.
    """

    def __init__(self, port: PagePort, here: Container[bytes], send: Callable[[Sequence[Event]], None]) -> None:
        self._port, self._here, self._send = port, here, send
        self.pending: dict[int, PendingTransfer] = {}
        self.held: dict[int, int] = {}
        self.several: set[int] = set()
        self._freed = asyncio.Event()
        self._slots = asyncio.Semaphore(AT_ONCE)
        self.channels: dict[KVSource, tuple[aio.Channel, int]] = {}
        self.rate = TransferRate()

    def hold_back(self, events: Sequence[Event]) -> list[Event]:
        """Holds back Submits whose pages are to be copied, and returns the events that the engine gets now.

        The engine gets a Submit that was held back once its pages have come. An Abort ends the transfer.
        """
        now = list[Event]()
        for event in events:
            if isinstance(event, Submit) and event.source is not None and (wanted := self.wanted(event)):
                transfer = self.pending[event.attempt] = PendingTransfer(event, wanted, {})
                transfer.task = asyncio.create_task(self._run(transfer, event.source))
                if event.request.count > 1:
                    self.several.add(event.attempt)
                continue
            if isinstance(event, AdminQuery) and event.question is AdminQuestion.RESET_PREFIX_CACHE:
                now += self.give_up()  # pages that came after the reset would be cached again
            if isinstance(event, Abort) and (ended := self.pending.pop(event.attempt, None)) is not None:
                if ended.task is not None:
                    ended.task.cancel()
                self._release(event.attempt)
                now.append(ended.submit)
            now.append(event)
        return now

    def release(self, outputs: StepOutputs) -> None:
        """Stops counting the pages of requests that have started, or ended, as held.

        A request with several sequences holds its pages to its end, since a start says nothing of its last sequence.
        """
        for start in outputs.starts:
            if start.attempt not in self.several:
                self._release(start.attempt)
        for attempt in outputs.over:
            self._release(attempt)
            self.several.discard(attempt)

    def give_up(self) -> list[Event]:
        """Ends all transfers, and returns their Submits, without pages, for the engine."""
        transfers, self.pending = self.pending, {}
        for attempt, transfer in transfers.items():
            if transfer.task is not None:
                transfer.task.cancel()
            self._release(attempt)
        return [replace(transfer.submit, source=None) for transfer in transfers.values()]

    def wanted(self, submit: Submit) -> Wanted:
        """Returns the pages to copy: those that the engine lacks, of sequences for which the copy pays."""
        form, wanted, asked = self._port.form, Wanted(), set[BlockHash]()
        most, cost = form.most(min(MOST_TRANSFERRED, MOST_HELD)), self.rate.cost()
        for pages in self._port.block_hashes(submit):
            lacking = list(dropwhile(lambda page: page[0][:SHORT_HASH] in self._here or page[0] in asked, pages))
            lacking = lacking[: most - len(asked)]
            count = len(lacking)
            if copying_pays(count, cost.expected(form.size(count)), self._port.compute_seconds(count * form.page_size)):
                wanted.append(lacking)
                asked.update(block_hash for block_hash, _ in lacking)
        return wanted

    async def _run(self, transfer: PendingTransfer, source: KVSource) -> None:
        attempt = transfer.submit.attempt
        try:
            async with asyncio.timeout(TRANSFER_SECONDS), self._slots:
                await self._hold(attempt, sum(self._port.form.size(len(pages)) for pages in transfer.wanted))
                with self.rate.running():
                    await self._fetch(transfer, source)
        except TimeoutError:
            log.warning("not all pages of a request came within %g s, the missing ones are computed", TRANSFER_SECONDS)
        except (grpc.RpcError, StrangerError, LinkError) as error:
            log.warning("pages of a request cannot be fetched, they are computed: %s", _why(error))
        except Exception:
            log.exception("pages of a request cannot be copied, they are computed")
        del self.pending[attempt]
        self._send([replace(transfer.submit, source=None, transferred=transfer.transferred)])
        if not transfer.transferred:
            self._release(attempt)

    async def _fetch(self, transfer: PendingTransfer, source: KVSource) -> None:
        """Copies the pages from the source into `transfer.transferred`.

        Raises:
            RpcError: The call failed.
            StrangerError: The source does not know the token.
            LinkError: A page fails its checks, or more has come than was asked for.
        """
        form = self._port.form
        async with self._channel_to(source) as channel:
            fetch_pages = pb_grpc.EngineServiceStub(channel).Pages
            for wanted in transfer.wanted:
                due, left = iter(wanted), (most := form.size(len(wanted)))
                proof = TokenProof(source.token)
                request = joined_hashes([block_hash for block_hash, _ in wanted])
                call = fetch_pages(iter([request]), metadata=proof.metadata, timeout=TRANSFER_SECONDS)
                await proof.check(call)
                async for response in call:
                    for page, (block_hash, tokens) in zip(response.pages, due, strict=False):
                        left -= len(page.content)
                        if left < 0:
                            raise LinkError(f"more than {most} bytes have come for {len(wanted)} pages")
                        transfer.transferred[block_hash] = form.decode(page, tokens)
                        self.rate.receive(len(page.content))

    @asynccontextmanager
    async def _channel_to(self, source: KVSource) -> AsyncIterator[aio.Channel]:
        """Yields a channel to a source, the same for all transfers from there that run at once."""
        channel, users = self.channels.get(source) or (_open(source.address), 0)
        self.channels[source] = channel, users + 1
        try:
            yield channel
        finally:
            _, users = self.channels.pop(source)
            if users > 1:
                self.channels[source] = channel, users - 1
            else:
                await channel.close(None)

    async def _hold(self, attempt: int, size: int) -> None:
        """Waits until there is room for this many bytes, and takes it."""
        while self.held and sum(self.held.values()) + size > MOST_HELD:
            self._freed.clear()
            await self._freed.wait()
        self.held[attempt] = size

    def _release(self, attempt: int) -> None:
        if self.held.pop(attempt, None) is not None:
            self._freed.set()


def _open(address: str) -> aio.Channel:
    return aio.insecure_channel(address, options=[*CHANNEL_OPTIONS, ("grpc.enable_http_proxy", 0)])


def _why(error: Exception) -> str:
    return f"{error.code().name.lower()}: {error.details()}" if isinstance(error, grpc.RpcError) else str(error)
