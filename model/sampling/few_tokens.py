"""Constraints on draws from a few tokens, of which each is checked: no mask is computed.

The likeliest tokens of a row are checked one by one. Forbidden ones get the logit -inf, until all tokens that min_p and
top_k keep are allowed. Then the draw is the one that the whole mask would give, to the bit:

- An allowed token has the largest logit, so scaled logits are the same.
- min_p keeps the same tokens: it compares with the largest logit alone.
- top_k keeps the same tokens: of the k likeliest, the mask forbids none.
- top_p sums what these two leave, in the same order.
- The noise of a draw belongs to its token.

A row with top_p alone needs its mask: top_p cuts by the sum over all allowed tokens. A draw among all tokens needs none
of this: see `ProcessorRows.late`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from model.structured.grammar_mask import GrammarMask

CHECKED, REFUSED = 96, 32  # most tokens of a row that are checked, and that may be forbidden; else its mask is computed
MOST_TOP_K, LEAST_MIN_P = 64, 0.02  # bounds within which a row keeps few enough tokens to check them
BLOCK = 64  # logits of a block, of which the largest is compared first
LOWEST = float(np.finfo(np.float32).min)  # least finite logit: one of -inf is never drawn, so it is not checked

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
MapRows = Callable[[Callable[[int], list[int] | None], list[int], list[GrammarMask]], list[list[int] | None]]


@dataclass(frozen=True, slots=True, eq=False)
class Cuts:
    """Rows that min_p or top_k leaves a few tokens of, as arrays [n].

    Attributes:
        places: Indices of rows of logits.
        top_k: 0 is off.
        reach: Distance of a logit below the largest one, from which on min_p keeps no token; infinity where it is off.
    """

    places: Ints
    top_k: Ints
    reach: Floats

    @classmethod
    def of(cls, places: Ints, temperature: Floats, top_k: Ints, min_p: Floats) -> "Cuts":
        """Makes them of the controls of rows, [n] each."""
        with np.errstate(divide="ignore"):
            below = -np.log(min_p)
        return cls(places, top_k, temperature * (1.001 * below + 0.001))  # farther than scaled logits are rounded


def draws_few(temperature: Floats, top_k: Ints, min_p: Floats) -> NDArray[np.bool_]:
    """Returns which rows draw from a few tokens. Arguments are controls, [n] each."""
    return (temperature > 0) & (((top_k > 0) & (top_k <= MOST_TOP_K)) | (min_p >= LEAST_MIN_P))


def forbid_few(logits: Tensor, cuts: Cuts, masks: Sequence[GrammarMask], map_rows: MapRows) -> Ints:
    """Forbids what the draws of rows might take otherwise, in place.

    Args:
        logits: [n, vocabulary] float32.
        cuts: The rows.
        masks: Constraint of each.
        map_rows: Calls a function with each index of a row and returns the results; may use several threads, as that of
            `ProcessorRows` does. Gets the function, the indices and the mask of each.

    Returns:
        Places that need no mask any more.
    """
    chosen = logits if len(cuts.places) == len(logits) else logits[torch.from_numpy(cuts.places).to(logits.device)]
    values, ids = (part.tolist() for part in likeliest(chosen, CHECKED))

    def forbidden(i: int) -> list[int] | None:
        return refused(masks[i], values[i], ids[i], int(cuts.top_k[i]), float(cuts.reach[i]))

    found = map_rows(forbidden, list(range(len(masks))), list(masks))
    for place, tokens in zip(cuts.places.tolist(), found, strict=True):
        if tokens:
            logits[place, torch.tensor(tokens, device=logits.device)] = -torch.inf
    return cuts.places[[tokens is not None for tokens in found]]


def refused(
    mask: GrammarMask, values: Sequence[float], tokens: Sequence[int], top_k: int, reach: float
) -> list[int] | None:
    """Finds the forbidden tokens among those that are as likely as what min_p and top_k keep.

    Args:
        mask: Constraint of the row.
        values: Largest logits of the row, descending. No other logit of the row is larger than the last.
        tokens: Ids of these logits.
        top_k: As in `Cuts`.
        reach: As in `Cuts`.

    Returns:
        Forbidden ones; None where too many would have to be checked or forbidden, or the constraint has failed.
    """
    found, allowed, lowest = list[int](), 0, np.inf
    for value, token in zip(values, tokens, strict=True):
        if allowed and value < lowest:
            return found
        if mask.allows(token):
            allowed += 1
            if allowed == 1:
                lowest = max(value - reach, LOWEST)
            if allowed == top_k:
                lowest = max(value, lowest)
        elif mask.has_failed or len(found) == REFUSED:
            return None
        else:
            found.append(token)
    return None


def likeliest(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Returns the largest logits of each row, descending, and their ids: any of those that are equal to the last.

    Of a large vocabulary only the blocks with the largest logits are read twice.
    """
    width = logits.shape[1]
    if width <= BLOCK * count:
        return torch.topk(logits, min(count, width), -1)
    whole = logits if width % BLOCK == 0 else F.pad(logits, (0, -width % BLOCK), value=-torch.inf)
    blocks = torch.topk(whole.unflatten(1, (-1, BLOCK)).amax(-1), count, -1, sorted=False).indices
    ids = (blocks[:, :, None] * BLOCK + torch.arange(BLOCK, device=logits.device)).flatten(1)
    values, places = torch.topk(whole.gather(1, ids), count, -1)
    return values, ids.gather(1, places)
