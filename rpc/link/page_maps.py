"""Answers to an operator's questions, between `scheduler.events` and the link's messages."""

from quire.engine.v1 import engine_service_pb2 as pb

from cache_manager.ledger import Holder, PageMap
from rpc.link.arrays import INT32, UINT8, packed, unpacked
from scheduler.events import AdminAnswer


def encode_answer(answer: AdminAnswer) -> pb.Answer:
    message = pb.Answer(ticket=answer.ticket, forgotten=answer.forgotten)
    pages = answer.page_map
    if pages is not None:
        message.page_map.CopyFrom(
            pb.PageMap(
                page_size=pages.page_size,
                states=packed(pages.states, UINT8),
                counts=packed(pages.counts, INT32),
                holders=[
                    pb.Holder(step=holder.is_step, number=holder.number, pages=packed(holder.pages, INT32))
                    for holder in pages.holders
                ],
            )
        )
    return message


def decode_answer(message: pb.Answer) -> AdminAnswer:
    """Returns the answer of a message. Raises LinkError where an array has the wrong size."""
    return AdminAnswer(
        message.ticket, message.forgotten, _decode_map(message.page_map) if message.HasField("page_map") else None
    )


def _decode_map(message: pb.PageMap) -> PageMap:
    states = unpacked(message.states, UINT8, None, "states")
    return PageMap(
        page_size=message.page_size,
        states=states,
        counts=unpacked(message.counts, INT32, len(states), "counts"),
        holders=tuple(Holder(h.step, h.number, unpacked(h.pages, INT32, None, "pages")) for h in message.holders),
    )
