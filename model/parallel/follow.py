"""A follower: computes its part of every step that rank 0 sends, until the connection closes."""

import logging
from dataclasses import dataclass

import numpy as np
import torch

from model.attention.backend import AttentionBackend
from model.errors import RankLost
from model.forward import ForwardBatch, Model
from model.logit_parts import LogitParts
from model.page_store import Store, copy_or_lose
from model.parallel.collective import Collective
from model.parallel.members import FollowerGroup
from model.parallel.steps import Step, receive_inputs, unpack_moves, unpack_step
from model.parallel.wire import FrameKind, WireError, pack_arrays

log = logging.getLogger("quire.ranks")


@dataclass(frozen=True, slots=True, eq=False)
class ShardParts:
    """A follower's shard of the model, of the KV pool and of the host tier.

    Attributes:
        store: None without a host tier.
        dtype: Type of the model's activations.
    """

    model: Model
    attention: AttentionBackend
    store: Store | None
    dtype: torch.dtype
    device: torch.device


class FollowerLoop:
    """Does the work that rank 0 sends."""

    def __init__(self, parts: ShardParts, collective: Collective) -> None:
        self._parts, self._collective = parts, collective

    @torch.inference_mode()
    def until_the_end(self, joined: FollowerGroup) -> None:
        """Works until rank 0 closes the connection. Raises RankLost, WireError, and errors of a step."""
        while (frame := joined.follower.next()) is not None:
            kind, content = frame
            answer = self._do(kind, content)
            if answer is not None:
                joined.follower.reply(FrameKind.LOST, answer)
            joined.started()

    def _do(self, kind: FrameKind, content: bytearray) -> bytes | None:
        attention, store = self._parts.attention, self._parts.store
        match kind:
            case FrameKind.STEP:
                self._step(unpack_step(content, self._parts.dtype, self._parts.device))
            case FrameKind.COPY:
                return pack_arrays(copy_or_lose(attention, unpack_moves(content, 2)))
            case FrameKind.POISON:
                attention.poison(unpack_moves(content, 1))
            case FrameKind.SAVE | FrameKind.LOAD:
                if store is None:
                    raise WireError("pages are to be swapped, and there is no host tier")
                moves = unpack_moves(content, 3)
                if kind is FrameKind.LOAD:
                    return pack_arrays(store.load(moves).astype(np.int32))
                store.save(moves)
            case _:
                raise WireError(f"{kind.name} is no work for a follower")
        return None

    def _step(self, step: Step) -> None:
        attention, device = self._parts.attention, self._parts.device
        plan = attention.plan(step.shape)
        parts = LogitParts(torch.from_numpy(step.parts).to(device), _unread) if len(step.parts) else None
        given = step.inputs or receive_inputs(self._collective, step, device)
        batch = ForwardBatch(given.tokens, given.positions, given.wanted, attention, plan, step.images, parts=parts)
        self._parts.model.forward(batch)


def _unread(_: torch.Tensor) -> None:
    """Drops a part of the logits: rank 0 alone has all of them."""


def follow(parts: ShardParts, joined: FollowerGroup) -> None:
    """Works until rank 0 ends. Errors are sent to rank 0 before they are raised."""
    try:
        FollowerLoop(parts, joined.collective).until_the_end(joined)
    except RankLost as error:
        joined.follower.failed(str(error))
        raise
    except Exception as error:
        log.exception("a step has failed")
        joined.follower.failed(f"{type(error).__name__}: {error}")
        raise
