"""Logits that are computed and read part by part.

Logprobs of a prompt need the logits of all its tokens. For 8,192 tokens and 128,000 ids these take 38 GB, with what is
made from them. So the residual stream of all tokens is kept, and the output layer runs once for each part.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

LOGIT_BYTES = 40
"""Bytes for each logit of a step: changed by controls, and copied and ordered for alternatives."""
PART_BYTES = 2**29
"""Most bytes of the logits of a part, with what is made from them. A part has one row at least."""


def rows_of_part(vocabulary: int) -> int:
    """Returns the most rows of a part."""
    return max(1, PART_BYTES // (vocabulary * LOGIT_BYTES))


@dataclass(frozen=True, slots=True, eq=False)
class LogitParts:
    """Tokens whose logits are read in parts.

    Attributes:
        wanted: [n] int64. Packed offsets of the tokens, at least one.
        read: Takes the logits of the next tokens, [part, vocabulary] float32. They hold until it returns.
    """

    wanted: Tensor
    read: Callable[[Tensor], None]

    def split(self, vocabulary: int) -> Sequence[Tensor]:
        """Returns the offsets of each part, in order. Parts differ by one row at most.

        All ranks of a group split alike: the parts follow from the number of tokens and the vocabulary.
        """
        return self.wanted.tensor_split(-(-len(self.wanted) // rows_of_part(vocabulary)))
