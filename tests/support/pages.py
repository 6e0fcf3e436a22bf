"""Content of KV pages, where a test has a back end without a runner."""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from model.attention.backend import AttentionBackend
from model.config import KV_BYTES


def exported(attention: AttentionBackend, pages: Sequence[int], group: int = 0) -> Tensor:
    """Returns pages of one layer group in canonical form."""
    return attention.export(np.array(pages, np.int32), np.full(len(pages), group, np.int32))


def imported(attention: AttentionBackend, pages: Sequence[int], content: Tensor, group: int = 0) -> None:
    """Fills pages of one layer group from canonical form."""
    attention.import_pages(np.array(pages, np.int32), np.full(len(pages), group, np.int32), content)


def sizes_of(dtype: str) -> dict[str, int]:
    """Returns the byte sizes of a `KVLayout` whose elements have this dtype."""
    element, scale = KV_BYTES[dtype]
    return {"element_bytes": element, "scale_bytes": scale}
