"""Stand-ins: token ids that tell which pages are equal and which draw is a stop token, and nothing else.

A scheduler's plans depend on token ids in two places. The prefix cache compares whole pages behind equal prefixes, and
a draw that is one of the request's stop tokens ends its sequence. So a recording needs no token:

- The last token of each full page is replaced by a keyed hash of the page and of all before it. The key is random and
  is kept nowhere. Two pages have equal stand-ins where their block hashes are equal.
- A stop token is replaced by its index in the request.
- All other tokens are replaced by one and the same number.

Two readers of tokens need more. Draft tokens are guessed from repetitions within a sequence, and a beam search ranks
continuations of equal probability by their ids. Recordings of these have to keep the tokens.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cache_manager.block_hash import BlockHash, BlockHasher, HashChain
from scheduler.events import EndReason, StepOutputs, Submit
from scheduler.request import Request
from scheduler.rows import Rows
from scheduler.step import Ints, StepResult

FILLER = 1
FIRST_STOP = 2
FIRST_PAGE = 2**16  # more stop tokens than this no request has
LAST_TOKEN = 2**31 - 1


def page_stand_in(block_hash: BlockHash) -> int:
    """Returns the stand-in of the last token of the page with this hash."""
    return FIRST_PAGE + int.from_bytes(block_hash[:8], "little") % (LAST_TOKEN - FIRST_PAGE)


@dataclass(slots=True, eq=False)
class StepDraws:
    """Sequences that draw in a step, [n] each, parallel to the plan's `logits`.

    Attributes:
        logits: The plan's. While rows decode in lockstep, each plan has the same array, and one drawing is of them all.
        attempts: Attempt of each.
        indices: Index of each in its request.
        prompts: Tokens of its prompt.
    """

    logits: Ints
    attempts: NDArray[np.int64]
    indices: Ints
    prompts: Ints
    _base: int = 0
    _ends: dict[int, list[int]] | None = None

    @staticmethod
    def of(rows: Rows, logits: Ints) -> "StepDraws":
        """Returns the sequences that have these rows now. logits: as in the plan that was just made."""
        which = logits[:, 1].astype(np.intp)
        return StepDraws(logits, rows.attempt[which], rows.index[which], rows.prompt[which])

    def page_ends(self, positions: Ints, size: int) -> Seq[int]:
        """Returns which of the draws are the last tokens of their pages.

        Args:
            positions: [n] int32. Output position of each draw.
            size: Tokens of a page.
        """
        if not len(positions):
            return ()
        if self._ends is None:
            self._base, self._ends = int(positions[0]), {}
            for i, left in enumerate((-(self.prompts + positions + 1) % size).tolist()):
                self._ends.setdefault(left, []).append(i)
        # Legal for the later steps of a drawing too: each of them moves all sequences by one token.
        return self._ends.get((int(positions[0]) - self._base) % size, ())


@dataclass(slots=True, eq=False)
class _Known:
    """Parts of an open attempt that are needed: its request, and the chain of its prompt and of each sequence."""

    request: Request
    prompt: HashChain | None
    sequences: dict[int, HashChain] = field(default_factory=dict)

    def chain(self, index: int) -> HashChain | None:
        if self.prompt is not None and index not in self.sequences:
            self.sequences[index] = self.prompt.copy()
        return self.sequences.get(index)


class StandIns:
    """Finds the stand-ins of the tokens of one recording."""

    def __init__(self, key: bytes, page_size: int, prefix_cache: bool) -> None:
        """Makes stand-ins under a key of at least 16 bytes. Without a prefix cache no page has one."""
        self._size = page_size
        self._hasher = BlockHasher(key, b"recording", page_size) if prefix_cache else None
        self._open: dict[int, _Known] = {}

    def submit(self, event: Submit) -> dict[str, Any]:
        """Returns the tokens of a request as `submitted_tokens` reads them."""
        request = event.request
        chain = None if self._hasher is None else self._hasher.chain(request.scope)
        if chain is not None:
            chain.extend(request.prompt)
        known = self._open[event.attempt] = _Known(request, chain)
        return {
            "prompt": len(request.prompt),
            "pages": [] if chain is None else list(map(page_stand_in, chain.hashes)),
            "emitted": [
                None if tokens is None else self._emitted(known, index, tokens)
                for index, tokens in enumerate(event.emitted)
            ],
            "stops": len(request.stop_ids),
        }

    def _emitted(self, known: _Known, index: int, tokens: tuple[int, ...]) -> list[Any]:
        """Returns the length of an output, the stand-ins of its pages, and the index of a stop token at its end."""
        request, stop = known.request, None
        if tokens and tokens[-1] in request.stop_ids:
            stop = request.stop_ids.index(tokens[-1])
        chain = known.chain(index) if tokens else None  # a sequence without output goes on from the prompt's chain
        if chain is None:
            return [len(tokens), [], stop]
        self._extend(chain, request, np.array(tokens, np.int32))
        prompt_pages = len(request.prompt) // self._size
        return [len(tokens), list(map(page_stand_in, chain.hashes[prompt_pages:])), stop]

    def _extend(self, chain: HashChain, request: Request, emitted: Ints) -> None:
        tokens = np.concatenate((request.prompt, emitted))
        chain.extend(tokens[len(chain.hashes) * self._size :])

    def drawn(self, drawing: StepDraws, result: StepResult, outputs: StepOutputs, rows: Rows) -> list[list[int]]:
        """Returns index and stand-in of the draws that are no filler.

        Args:
            drawing: Sequences that drew.
            result: Their draws.
            outputs: Outputs of the commit of these draws.
            rows: The rows after it.
        """
        found, tokens = dict[int, int](), result.tokens
        if np.count_nonzero(failed := tokens < 0):
            found = {i: int(tokens[i]) for i in np.flatnonzero(failed).tolist()}
        stops = [end for end in outputs.ends if end.reason is EndReason.STOP] if outputs.ends else []
        each_one = len(outputs.tokens) == len(tokens) and not len(result.jumps)
        finals = self._page_ends(drawing, outputs, each_one)
        if not stops and not finals:
            return [[i, found[i]] for i in sorted(found)]
        keys = () if each_one and not stops else zip(drawing.attempts.tolist(), drawing.indices.tolist(), strict=True)
        place = {key: i for i, key in enumerate(keys)}
        for k, attempt, index, position in finals:
            if (stand_in := self._page_end(attempt, index, position, rows)) is not None:
                found[k if each_one else place[attempt, index]] = stand_in
        for end in stops:
            i = place.get((end.attempt, end.index))
            if i is not None and end.stop_token_id == tokens[i]:
                found[i] = self._stop(end.attempt, int(tokens[i]))
        return [[i, found[i]] for i in sorted(found)]

    def jumps(self, drawing: StepDraws, jumps: Ints, outputs: StepOutputs, rows: Rows) -> list[list[int]]:
        """Returns row and stand-in of each token that follows a draw.

        Args:
            drawing: Sequences that drew.
            jumps: [n, 2] int32, as in the result.
            outputs: As in `drawn`.
            rows: As in `drawn`.
        """
        keys = zip(drawing.attempts.tolist(), drawing.indices.tolist(), strict=True)
        key_of = dict(zip(drawing.logits[:, 1].tolist(), keys, strict=True))
        new = dict[tuple[int, int], list[int]]()
        each = zip(outputs.attempts.tolist(), outputs.indices.tolist(), outputs.positions.tolist(), strict=True)
        for attempt, index, position in each:
            new.setdefault((attempt, index), []).append(position)
        behind, found = Counter[int](), list[list[int]]()
        for row, token in jumps.tolist():
            attempt, index = key_of[row]
            behind[row] += 1
            positions, stand_in = new.get((attempt, index), []), None
            if attempt in self._open and token in self._open[attempt].request.stop_ids:
                stand_in = self._stop(attempt, token)
            elif behind[row] < len(positions) and self._ends_page(attempt, positions[behind[row]]):
                stand_in = self._page_end(attempt, index, positions[behind[row]], rows)
            found.append([row, FILLER if stand_in is None else stand_in])
        return found

    def forget(self, attempts: Iterable[int]) -> None:
        """Forgets attempts that have ended."""
        for attempt in attempts:
            self._open.pop(attempt, None)

    def _stop(self, attempt: int, token: int) -> int:
        """Returns the stand-in of a stop token of an attempt."""
        return FIRST_STOP + self._open[attempt].request.stop_ids.index(token)

    def _ends_page(self, attempt: int, position: int) -> bool:
        """Whether the token at an output position is the last one of its page."""
        return self._hasher is not None and (len(self._open[attempt].request.prompt) + position + 1) % self._size == 0

    def _page_ends(self, drawing: StepDraws, outputs: StepOutputs, each_one: bool) -> list[tuple[int, int, int, int]]:
        """Finds the draws in the outputs that are the last tokens of their pages.

        Args:
            drawing: Sequences that drew.
            outputs: Outputs of the commit.
            each_one: Whether these have one token of each draw.

        Returns:
            Number among the draws in the outputs, attempt, index and output position of each.
        """
        if self._hasher is None:
            return []
        attempts, indices, positions = outputs.attempts, outputs.indices, outputs.positions
        if not each_one:
            # Draws of sequences that are gone are not in the outputs. Tokens that follow a draw are.
            first = np.ones(len(attempts), np.bool_)
            first[1:] = (attempts[1:] != attempts[:-1]) | (indices[1:] != indices[:-1])
            attempts, indices, positions = attempts[first], indices[first], positions[first]
            lengths = [len(self._open[attempt].request.prompt) for attempt in attempts.tolist()]
            drawing = StepDraws(drawing.logits, attempts, indices, np.array(lengths, np.int32))
        ends = drawing.page_ends(positions, self._size)
        return [(k, int(attempts[k]), int(indices[k]), int(positions[k])) for k in ends]

    def _page_end(self, attempt: int, index: int, position: int, rows: Rows) -> int | None:
        """Returns the stand-in of the token at an output position, the last of its page.

        None where the sequence has ended, so that no page gets the token.
        """
        known, row = self._open[attempt], rows.row_of(attempt, index)
        chain = None if row is None else known.chain(index)
        if row is None or chain is None:
            return None
        emitted, done = rows.sequence(row).emitted, len(chain.hashes)
        page, start = (len(known.request.prompt) + position) // self._size, position + 1 - self._size
        if start >= 0:
            chain.extend_by_page(page, emitted[start : position + 1].tobytes())
        if len(chain.hashes) == done:  # a page with tokens of the prompt, or with other inputs, or not the next one
            self._extend(chain, known.request, emitted)
        return page_stand_in(chain.hashes[page])


def submitted_tokens(
    recorded: Mapping[str, Any], page_size: int
) -> tuple[Ints, tuple[tuple[int, ...] | None, ...], tuple[int, ...]]:
    """Returns prompt, emitted tokens and stop ids of a request whose tokens `StandIns.submit` has replaced."""
    length, pages = recorded["prompt"], recorded["pages"]
    prompt = _filled(0, length, pages, page_size)
    emitted: list[tuple[int, ...] | None] = []
    for one in recorded["emitted"]:
        if one is None:
            emitted.append(None)
            continue
        count, own, stop = one
        tokens = _filled(length, count, own, page_size).tolist()
        if stop is not None:
            tokens[-1] = FIRST_STOP + stop
        emitted.append(tuple(tokens))
    return prompt, tuple(emitted), tuple(range(FIRST_STOP, FIRST_STOP + recorded["stops"]))


def _filled(start: int, count: int, pages: list[int], page_size: int) -> Ints:
    """Returns [count] int32: fillers, with the stand-ins of pages that end at position `start` or later."""
    tokens = np.full(count, FILLER, np.int32)
    first = page_size - 1 - start % page_size
    tokens[first::page_size][: len(pages)] = pages
    return tokens


def drawn_tokens(count: int, replaced: list[list[int]]) -> Ints:
    """Returns [count] int32 draws of a step, of which `StandIns.drawn` has replaced some by other than the filler."""
    tokens = np.full(count, FILLER, np.int32)
    for i, token in replaced:
        tokens[i] = token
    return tokens
