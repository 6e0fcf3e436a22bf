"""The logits processors of a batch's rows: made as sequences join, updated by each draw, applied before it.

A row's processors are the built-in ones that its request asks for, in the order of `BUILT_IN`, then the user's own in
theirs, then the constraint on its output. A step applies one kind after the other, each to all rows that have it. So a
built-in control costs a handful of operations however many rows ask for it, and a row without processors costs nothing.

Their state depends on the prompt and the drawn tokens alone. A join makes all of a row's processors anew, also after a
preemption, and updates them with each token of the output so far.
"""

import time
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model.sampling.builtin_processors import BUILT_IN, ApplyRows, BuiltIn, Penalties
from model.sampling.few_tokens import Cuts, forbid_few
from model.sampling.logits_processors import UserProcessors, args_of
from model.sampling.sources import NO_SOURCES, ProcessorSources
from model.structured.forbidding import Forbid, apply_masks, forbid
from model.structured.grammar_mask import SLOW, GrammarMask
from scheduler.controls import NO_LOGITS_PARAMS, LogitsParams
from scheduler.drafts import NO_DRAFTS
from scheduler.step import Join

Ints = NDArray[np.int64]
Processor = BuiltIn | UserProcessors
NONE = np.empty(0, np.int64)
Item = TypeVar("Item")
Result = TypeVar("Result")

KINDS: tuple[type[Processor], ...] = (*BUILT_IN, UserProcessors)
"""In the order in which they apply, before the constraints on outputs."""


class ProcessorRows:
    """Logits processors by batch row.

    Attributes:
        asking: [rows] bool. Rows that have a processor.
        searching: [rows] bool. Hypotheses of beam searches, which go on with a token that they are told.
    """

    def __init__(self, rows: int, sources: ProcessorSources = NO_SOURCES) -> None:
        """Makes rows that have none.

        Args:
            rows: The number of rows.
            sources: Sources of processors that are not built in.
        """
        self.asking, self.searching = np.zeros(rows, np.bool_), np.zeros(rows, np.bool_)
        self._sources = sources
        self._rows: dict[int, list[tuple[int, Processor]]] = {}  # of a row, by index in KINDS
        self._masks: dict[int, GrammarMask] = {}  # of rows that have one
        self._jumping: set[int] = set()  # of these, such as get forced tokens without draws
        self._outputs: dict[int, tuple[LogitsParams, list[int]]] = {}  # of these, hypotheses: what the mask has taken

    def join(self, join: Join) -> None:
        """Makes the processors of a sequence that takes a row."""
        params, row = join.controls.logits_params, join.row
        prompt, output = join.tokens[: join.prompt_count], join.tokens[join.prompt_count :]
        made: list[Processor | None] = []
        if params != NO_LOGITS_PARAMS:
            made += [kind.of(params, prompt) for kind in BUILT_IN]
        if self._sources.factories:
            made.append(UserProcessors.of(self._sources.factories, prompt, args_of(params)))
        self._masks.pop(row, None)
        self._outputs.pop(row, None)
        self._jumping.discard(row)
        self.searching[row] = join.searching
        mask, taken = self._forked(params, output.tolist()) if join.searching else (None, 0)
        if mask is None:
            mask = GrammarMask.of(params, self._sources.grammars)
        self._rows[row] = [(KINDS.index(type(one)), one) for one in made if one is not None]
        self.asking[row] = bool(self._rows[row]) or mask is not None
        known = output.tolist() if self.asking[row] else []
        for token in known[:taken]:  # before the row has its mask, which has taken these
            self._drew(row, token)
        if mask is not None:
            self._masks[row] = mask
            # Not where logprobs are reported, nor where another control might forbid what the constraint leaves.
            bans = params.allowed or params.banned or (params.min_tokens and params.not_yet)
            if join.controls.top_logprobs < 0 and not (bans or self._sources.factories):
                self._jumping.add(row)
        for token in known[taken:]:
            self._drew(row, token)
        if mask is not None and join.searching:
            self._outputs[row] = params, known

    def _forked(self, params: LogitsParams, output: list[int]) -> tuple[GrammarMask | None, int]:
        """Returns a copy of the mask of the hypothesis that a new one continues, and how many tokens it has taken.

        A mask that is made anew takes all tokens again, and near the end of an output looks for a completion behind
        each.
        """
        found = [
            (len(tokens), row)
            for row, (its, tokens) in self._outputs.items()
            if tokens == output[: len(tokens)] and its == params
        ]
        if not found:
            return None, 0
        taken, row = max(found)
        copied = self._masks[row].copy()
        return copied, 0 if copied is None else taken

    def leave(self, row: int) -> None:
        """Drops the processors of a sequence that has ended."""
        self._rows.pop(row, None)
        self._masks.pop(row, None)
        self._outputs.pop(row, None)
        self._jumping.discard(row)
        self.asking[row] = self.searching[row] = False

    def drew(self, rows: Ints, tokens: NDArray[np.int32]) -> None:
        """Updates processors with the tokens that their rows drew, below 0 for a row that drew none."""
        drew = [
            (int(rows[i]), int(tokens[i]))
            for i in np.flatnonzero(self.asking[rows] & ~self.searching[rows] & (tokens >= 0)).tolist()
        ]
        for row, token in drew:
            for _, processor in self._rows[row]:
                processor.drew(token)
        masked = [one for one in drew if one[0] in self._masks]
        self._each(lambda one: self._masks[one[0]].drew(one[1]), masked, [self._masks[row] for row, _ in masked])

    def told(self, row: int, token: int) -> None:
        """Updates the processors of a hypothesis with the token that it goes on with."""
        if self.asking[row] and self.searching[row]:
            self._drew(row, token)
            if row in self._outputs:
                self._outputs[row][1].append(token)

    def _drew(self, row: int, token: int) -> None:
        for _, processor in self._rows[row]:
            processor.drew(token)
        if (mask := self._masks.get(row)) is not None:
            mask.drew(token)

    def forced(self, rows: Ints) -> NDArray[np.bool_]:
        """Returns which rows draw a token that their constraint leaves no choice of, once their masks were applied."""
        if not self._jumping:
            return np.zeros(len(rows), np.bool_)
        return np.array([row in self._jumping and self._masks[row].is_forced for row in rows.tolist()], np.bool_)

    def jumps(self, rows: Ints) -> NDArray[np.int32]:
        """Returns the tokens that must come next in these rows, as `StepResult.jumps`."""
        jumping = [row for row in rows.tolist() if row in self._jumping] if self._jumping else []
        masks = [self._masks[row] for row in jumping]
        forced = self._each(GrammarMask.jump, masks, masks)
        found = [(row, token) for row, tokens in zip(jumping, forced, strict=True) for token in tokens]
        return np.array(found, np.int32) if found else NO_DRAFTS

    def _each(self, call: Callable[[Item], Result], items: list[Item], masks: list[GrammarMask]) -> list[Result]:
        """Calls with each item, on several threads. masks: that of each. Raises what the first call raises."""
        if (grammars := self._sources.grammars) is None:
            return [call(item) for item in items]
        return grammars.threads.map(call, items, [mask.lock for mask in masks])

    def close_within(self, row: int, most: int) -> None:
        """Has the constrained output of a row be complete within fewer tokens. most: tokens of the whole output."""
        if (mask := self._masks.get(row)) is not None:
            mask.close_within(most)

    def needs_host(self, rows: Ints) -> bool:
        """Returns whether the host must know the draws at once.

        That of a row may have to be `settled`, or a search is to have its alternatives from changed logits.
        """
        if (self.asking[rows] & self.searching[rows]).any():
            return True
        return bool(self._masks) and any(
            (mask := self._masks.get(row)) is not None and mask.soon for row in rows.tolist()
        )

    def settled(self, rows: Ints, tokens: Ints) -> Ints:
        """Returns the tokens that are kept in place of drawn ones, so that constrained outputs are closed in time.

        Args:
            rows: [n] int64. Batch rows.
            tokens: [n] int64. Drawn tokens.
        """
        near = [
            i
            for i, row in enumerate(rows.tolist())
            if (mask := self._masks.get(row)) is not None and mask.near and not self.searching[row]
        ]
        if not near:
            return tokens
        kept = tokens.copy()
        masks = [self._masks[int(rows[i])] for i in near]
        kept[near] = self._each(lambda i: self._masks[int(rows[i])].settled(int(tokens[i])), near, masks)
        return kept

    def offered(self, logits: Tensor, changed: Tensor, rows: Ints, most: Ints) -> Tensor:
        """Returns logits of the alternatives to the draws: raw ones, but for hypotheses what they may go on with.

        Args:
            logits: [n, vocabulary] float32. Raw logits.
            changed: [n, vocabulary] float32. What `apply` made of them.
            rows: [n] int64. Batch row of each.
            most: [n] int64. Alternatives of each.
        """
        (places,) = (self.asking[rows] & self.searching[rows]).nonzero()
        if not len(places):
            return logits
        until = time.thread_time() + SLOW  # for all hypotheses together: other requests wait
        where = torch.from_numpy(places).to(logits.device)
        # Raw ones: a penalty or a bias is no part of a hypothesis' score.
        left = logits[where].masked_fill(changed[where] == -torch.inf, -torch.inf)
        for i, place in enumerate(places.tolist()):
            if (mask := self._masks.get(int(rows[place]))) is not None and mask.near:
                likeliest = torch.topk(left[i], min(int(most[place]), left.shape[1]))
                tokens = likeliest.indices[likeliest.values > -torch.inf].tolist()
                if not tokens:  # its logits are no numbers
                    continue
                kept = torch.tensor(mask.closable(tokens, until), device=left.device)
                narrow = torch.full_like(left[i], -torch.inf)
                narrow[kept] = logits[int(place), kept]
                left[i] = narrow
        return logits.index_copy(0, where, left)

    def late(self, rows: Ints, may: NDArray[np.bool_]) -> Ints:
        """Returns whose masks are not needed before their draws, which `refused` then looks at.

        Within texts most tokens are allowed, and the masks are the slow ones there, since all of these are looked at.

        Args:
            rows: [n] int64. Batch rows.
            may: [n] bool. Draws that are the same without the tokens that a mask forbids, if it allows their own.

        Returns:
            [m] int64. Places in `rows`.
        """
        places = np.flatnonzero(may & self.asking[rows] & ~self.searching[rows]).tolist()
        found = [i for i in places if (mask := self._masks.get(int(rows[i]))) is not None and mask.can_wait()]
        return np.array(found, np.int64)

    def few(self, rows: Ints, may: NDArray[np.bool_]) -> Ints:
        """Returns whose likeliest tokens are checked in place of a mask, where masks take long.

        Args:
            rows: [n] int64. Batch rows.
            may: [n] bool. Rows that draw among a few tokens.

        Returns:
            [m] int64. Places in `rows`.
        """
        found = [i for i in self.late(rows, may).tolist() if self._masks[int(rows[i])].is_slow]
        return np.array(found, np.int64)

    def refused(self, rows: Ints, tokens: Ints, likeliest: Ints, late: Ints) -> Ints:
        """Returns which of the places `late` would draw otherwise behind their masks.

        Args:
            rows: [n] int64. Batch rows.
            tokens: [n] int64. Draws among all tokens.
            likeliest: [n] int64. Tokens with the largest logits. Without these, scaled logits are rounded otherwise.
            late: [m] int64. Places.
        """
        found = list[int]()
        for i in late.tolist():
            mask = self._masks[int(rows[i])]
            if not all(mask.allows(token) for token in {int(tokens[i]), int(likeliest[i])}):
                found.append(i)
        return np.array(found, np.int64)

    def masked(self, logits: Tensor, rows: Ints, places: Ints, forbid: Forbid = forbid) -> Tensor:
        """Applies masks that `apply` left out.

        Args:
            logits: [n, vocabulary] float32, as `apply` returned them.
            rows: [n] int64. Batch row of each.
            places: [m] int64. Those whose masks are applied, in a copy.
            forbid: Applies the masks.

        Returns:
            [m, vocabulary] float32.

        Raises:
            RequestFault: A grammar's matcher fails.
        """
        masks = [self._masks[int(row)] for row in rows[places]]
        self._each(GrammarMask.mask, masks, masks)
        changed = logits[torch.from_numpy(places).to(logits.device)]
        apply_masks(changed, np.arange(len(masks)), masks, forbid)
        return changed

    def apply(
        self,
        logits: Tensor,
        rows: Ints,
        positions: Ints,
        keeps: bool = True,
        forbid: Forbid = forbid,
        late: Ints = NONE,
        cuts: Cuts | None = None,
        penalise: ApplyRows | None = None,
    ) -> Tensor:
        """Changes the logits of rows that have processors.

        Args:
            logits: [n, vocabulary] float32. Changes go to a copy.
            rows: [n] int64. Batch row of each.
            positions: [n] int64. Output position of each draw.
            keeps: Logits of forbidden tokens are wanted later. Else constraints alone change `logits` themselves, as
                they leave those of allowed tokens.
            forbid: Applies the masks of constraints.
            late: [m] int64. Places whose masks are left out.
            cuts: Places whose masks are left out where a few tokens can be forbidden instead.
            penalise: Applies penalties. None for `Penalties.apply_rows`.

        Returns:
            [n, vocabulary] float32. `logits` itself where no row has a processor.

        Raises:
            RequestFault: A user's processor fails.
        """
        asking = np.flatnonzero(self.asking[rows]).tolist()
        if not asking:
            return logits
        groups = [(list[int](), list[Processor]()) for _ in KINDS]
        for i in asking:
            for number, processor in self._rows[int(rows[i])]:
                which, processors = groups[number]
                which.append(i)
                processors.append(processor)
        # Logprobs are of the raw logits, so these must stay. A copy of 16 rows of 151,936 takes 1.5 ms on a CPU.
        masks_alone = all(not which for which, _ in groups)
        waiting = set(late.tolist())
        masked = [i for i in asking if int(rows[i]) in self._masks and i not in waiting]
        changed = logits if masks_alone and not (keeps and masked) else logits.clone()
        for kind, (which, processors) in zip(KINDS, groups, strict=True):
            if which:
                apply_rows: ApplyRows = penalise if penalise and kind is Penalties else kind.apply_rows
                apply_rows(changed, np.array(which), processors, positions[which])
        if cuts is not None and len(cuts.places):
            settled = forbid_few(changed, cuts, [self._masks[int(row)] for row in rows[cuts.places]], self._each)
            masked = np.setdiff1d(masked, settled).tolist()
        if masked:
            masks = [self._masks[int(rows[i])] for i in masked]
            self._each(GrammarMask.mask, masks, masks)  # each keeps its own
            apply_masks(changed, np.array(masked), masks, forbid)
        return changed
