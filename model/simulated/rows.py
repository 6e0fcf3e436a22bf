"""Rows of a simulated engine: all that its draws depend on."""

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from model.errors import RequestFault
from model.simulated.changed_logits import ChangedRow, changes_logits, whole_logits
from model.simulated.distribution import (
    CANDIDATES,
    END,
    FLOOR,
    LOGITS,
    LOGPROBS,
    candidates,
    cumulative,
    draw_key,
    draw_noise,
    drawn_ranks,
    likeliest,
    output_length,
    prompt_key,
)
from model.structured.grammar_mask import GrammarMask
from model.structured.grammar_store import GrammarStore
from scheduler.controls import LogitsParams
from scheduler.events import Logprobs
from scheduler.step import FAULTED, Ints, Join

Places = NDArray[np.int64]
Floats = NDArray[np.float64]
NEVER = -1
RANKS = np.arange(CANDIDATES)
WITH_OTHERS = np.append(LOGPROBS, LOGPROBS[0] + np.float32(FLOOR))
"""Logprob of each candidate, then of a token that is none."""


class SimulatedRows:
    """State of each batch row. A join sets all of a row's state.

    Attributes:
        prompt: [rows] int64. Tokens of each prompt.
    """

    def __init__(self, rows: int, output_tokens: float, grammars: GrammarStore | None = None) -> None:
        """Makes empty rows.

        Args:
            rows: The number of rows.
            output_tokens: Mean length of an output; 0: the model draws no end token.
            grammars: Compiled grammars of constraints; None where there can be none.
        """
        self._mean, self._grammars = output_tokens, grammars
        self.prompt = np.zeros(rows, np.int64)
        self._prompts, self._draws = np.zeros(rows, np.uint64), np.zeros(rows, np.uint64)
        self._end = np.full(rows, NEVER, np.int64)  # output position of the end token
        self._sums = np.ones((rows, CANDIDATES))
        self._top = np.full(rows, -1, np.int64)
        self._changed: dict[int, ChangedRow] = {}
        self._asks: dict[int, Ints] = {}  # prompts whose logprobs are due

    def join(self, join: Join) -> None:
        """Sets a row. Tokens behind its prompt were drawn by an earlier attempt."""
        row, controls = join.row, join.controls
        prompt = join.tokens[: join.prompt_count]
        self.prompt[row] = join.prompt_count
        self._prompts[row] = key = prompt_key(prompt)
        self._draws[row] = draws = draw_key(key, controls, join.index)
        least = controls.logits_params.min_tokens
        self._end[row] = max(output_length(draws, self._mean), least) if self._mean else NEVER
        self._sums[row] = cumulative(LOGITS, controls)
        self._top[row] = controls.top_logprobs
        self.leave(row)
        if changes_logits(controls.logits_params):
            mask = GrammarMask.of(self._bounded(row, controls.logits_params), self._grammars)
            self._changed[row] = changed = ChangedRow(controls, prompt, mask=mask, searching=join.searching)
            for token in join.tokens[join.prompt_count :].tolist():
                changed.drew(token)
        if controls.prompt_logprobs and len(join.tokens) == join.prompt_count:
            self._asks[row] = prompt

    def _bounded(self, row: int, params: LogitsParams) -> LogitsParams:
        """Returns the parameters with which a constrained output is closed where the model would end it."""
        if not params.grammar_tokens or self._end[row] == NEVER:
            return params
        end = max(int(self._end[row]), params.grammar_short)
        return replace(params, grammar_tokens=min(params.grammar_tokens, end))

    def leave(self, row: int) -> None:
        self._changed.pop(row, None)
        self._asks.pop(row, None)

    def force(self, row: int, token: int) -> None:
        """Replaces the token that a row drew last."""
        changed = self._changed.get(row)
        if changed is not None and changed.searching:
            changed.drew(token)

    def close_within(self, row: int, most: int) -> None:
        """Has the constrained output of a row be complete within fewer tokens. most: tokens of the whole output."""
        changed = self._changed.get(row)
        if changed is not None and changed.mask is not None:
            changed.mask.close_within(most)

    def draw(self, rows: Places, positions: Places) -> tuple[Ints, Logprobs, tuple[tuple[int, str], ...]]:
        """Draws a token for each of these rows.

        Args:
            rows: [n] Rows that draw.
            positions: [n] Output position of each.

        Returns:
            Tokens and logprobs, and the faults of a step's result.
        """
        first = likeliest(self._prompts[rows], positions)
        noise = draw_noise(self._draws[rows], positions)
        ends = positions == self._end[rows]
        ranks = np.where(ends, 0, drawn_ranks(self._sums[rows], noise))
        tokens = np.where(ends, END, candidates(first, ranks))
        chosen, place = LOGPROBS[ranks], ranks + 1
        wanted = int(self._top[rows].max(initial=-1))
        offers, faults = dict[int, tuple[Places, Floats]](), list[tuple[int, str]]()
        for i in [i for i, row in enumerate(rows.tolist()) if row in self._changed] if self._changed else ():
            row, position = int(rows[i]), int(positions[i])
            ids, end = candidates(first[i], RANKS), self._is_end(row, position)
            likely, logits = np.append(END, ids)[:CANDIDATES] if end else ids, whole_logits(ids, end, END)
            try:
                tokens[i], rank = self._draw_changed(row, position, likely, logits, float(noise[i]))
                if self._changed[row].searching:
                    offers[i] = self._offered(row, position, likely, logits, wanted)
            except RequestFault as fault:
                faults.append((row, str(fault)))
                tokens[i], rank = FAULTED, CANDIDATES
            chosen[i] = WITH_OTHERS[rank] if tokens[i] >= 0 else 0.0
            place[i] = rank + 1
        logprobs = logprobs_of(_alternatives(first, ends, wanted), chosen, place)
        for i, (ids, top) in offers.items():
            logprobs.top_ids[i], logprobs.top[i] = ids, top
        return tokens.astype(np.int32), logprobs, tuple(faults)

    def _is_end(self, row: int, position: int) -> bool:
        """Returns whether END is the likeliest token of a row with changed logits, before the changes."""
        end = int(self._end[row])
        if self._changed[row].mask is not None:  # an output that is not complete goes on, and ends as soon as it is
            return end != NEVER and position >= end
        return position == end

    def _draw_changed(self, row: int, position: int, likely: Places, logits: Floats, noise: float) -> tuple[int, int]:
        """Returns the token that a row with changed logits draws, and its place among the likeliest."""
        changed = self._changed[row]
        token = changed.draw(logits, position, noise)
        if token >= 0 and not changed.searching:
            changed.drew(token)
        found = np.flatnonzero(likely == token)
        return token, int(found[0]) if len(found) else CANDIDATES

    def _offered(self, row: int, position: int, likely: Places, logits: Floats, most: int) -> tuple[Places, Floats]:
        """Returns what a hypothesis may go on with: ids [most], likeliest first, and logprobs, -inf of others."""
        ids, allowed = self._changed[row].offered(logits, position, most)
        places = [int(found[0]) if len(found := np.flatnonzero(likely == one)) else CANDIDATES for one in ids.tolist()]
        return ids, np.where(allowed, WITH_OTHERS[places], -np.inf)

    def prompt_parts(self, slices: Iterable[list[int]]) -> tuple[tuple[int, int, Logprobs], ...]:
        """Returns the logprobs of prompt tokens that are due. slices: as in the plan."""
        parts = []
        for row, start, count in slices if self._asks else ():
            prompt = self._asks.get(row)
            end = 0 if prompt is None else min(start + count, len(prompt) - 1)
            if prompt is not None and start < end:
                # Positions of the prompt stand before those of the output, which begin at 0.
                positions = np.arange(start + 1, end + 1) - len(prompt)
                first = likeliest(np.full(end - start, self._prompts[row]), positions)
                found = candidates(first[:, None], RANKS) == prompt[start + 1 : end + 1, None]
                ranks = np.where(found.any(1), found.argmax(1), CANDIDATES)
                ids = _alternatives(first, np.zeros(len(first), np.bool_), int(self._top[row]))
                parts.append((row, start + 1, logprobs_of(ids, WITH_OTHERS[ranks], ranks + 1)))
        return tuple(parts)


def _alternatives(first: Places, ends: NDArray[np.bool_], top: int) -> Places:
    """Returns the ids of the likeliest tokens of each position, [n, top]. top: -1 for none."""
    ids = candidates(first[:, None], RANKS[: max(0, top)])
    if ids.shape[1]:
        ids[ends, 1:], ids[ends, 0] = ids[ends, :-1], END
    return ids


def logprobs_of(ids: Places, chosen: NDArray[np.float32], place: Places) -> Logprobs:
    """Returns the logprobs of tokens.

    Args:
        ids: [n, k] Alternatives of each token, likeliest first.
        chosen: [n] Logprob of each token.
        place: [n] Place of each token among the likeliest, from 1.
    """
    top = np.broadcast_to(LOGPROBS[: ids.shape[1]], ids.shape).copy()
    return Logprobs(chosen, place.astype(np.int32), ids.astype(np.int32), top)
