"""Jump-forward decoding: tokens that a constraint leaves no choice of follow a draw without draws of their own.

A row that gets k of them computes them with the token that it drew, and draws from the last one's logits. So it is k
steps ahead. Quire's draws depend on a sequence's seed and the position alone, so they are those of a run without jumps.
Source: compressed finite state machines (SGLang: Zheng et al., NeurIPS 2024).

The executor finds the tokens, the scheduler decides: a row that draws again in a step in flight does not get them.
"""

import numpy as np

from scheduler.counters import Counters
from scheduler.events import Logprobs
from scheduler.rows import Index, Places
from scheduler.running import Running
from scheduler.step import Ints

WORTH_WAITING = 3  # tokens, for which a row leaves out a step while its draw in flight becomes known


class JumpForward:
    """Jumps of the rows of one engine. Writes `rows.length`, and of `Running` what is of jumps."""

    def __init__(self, running: Running, counters: Counters) -> None:
        self._running, self._rows, self._counters = running, running.rows, counters

    def take(self, jumps: Ints, rows: Places, tokens: Index, logprobs: Logprobs) -> tuple[Places, Index, Logprobs]:
        """Puts tokens that follow draws behind them.

        Args:
            jumps: [m, 2] int32, as in the result.
            rows: [n] intp. Rows that drew, each with the sequence that it had when the step was planned.
            tokens: [n] int32. What they drew.
            logprobs: Of these.

        Returns:
            The same with the tokens that rows got beside. Their logprob and their rank are 0.
        """
        self._running.sitting_out.difference_update(rows.tolist())
        offering = np.flatnonzero(np.isin(rows, jumps[:, 0])).tolist()
        got = [self._got(int(rows[i]), tokens[i], jumps[jumps[:, 0] == rows[i], 1]) for i in offering]
        if not any(map(len, got)):
            return rows, tokens, logprobs
        counts = np.ones(len(rows), np.int64)
        counts[offering] += [len(behind) for behind in got]
        source = np.repeat(np.arange(len(rows)), counts)
        jumped = np.append(False, source[1:] == source[:-1])
        longer = tokens[source]
        longer[jumped] = np.concatenate(got)
        self._counters.jumped += len(source) - len(rows)
        told = logprobs.select(source)
        told.chosen[jumped], told.rank[jumped] = 0.0, 0
        return rows[source], longer, told

    def _got(self, row: int, token: np.int32, offered: Ints) -> Ints:
        """Returns which of the offered tokens a row gets behind the one that it drew, and tells the executor."""
        rows, position, following = self._rows, int(self._rows.emitted[row]), np.append(token, offered)
        positions = np.arange(position, position + len(following), dtype=np.int32)
        stopped, full = rows.ends(np.full(len(following), row), positions, following)
        if len(ends := np.flatnonzero(stopped | full)):
            offered = offered[: ends[0]]  # nothing follows an end
        if rows.length[row] > rows.prompt[row] + position + 1:  # it draws again in a step in flight
            if len(offered) >= WORTH_WAITING:
                self._running.sitting_out.add(row)
            return offered[:0]
        if len(offered):
            self._running.jumps[row] = int(rows.length[row]), offered
            self._running.jumping.add(row)
            rows.length[row] += len(offered)
        return offered
