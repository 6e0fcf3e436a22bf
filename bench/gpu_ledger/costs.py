"""Bytes and operations of one launch, by the operands that it is given."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from model.gpu.attention import FIELDS

PRODUCT, ATTENTION, MIXTURE = "products", "attention", "mixtures"
ROWS, SAMPLER, SUM = "rows", "sampler", "sums of ranks"
"""Kinds of launches."""


@dataclass(frozen=True, slots=True)
class Work:
    """Work of a launch.

    Attributes:
        kind: Kind of the launch, which its efficiency goes by.
        weights: Bytes of weights that are read.
        kv: Bytes of KV that are read or written, each once.
        activations: Bytes of all else.
        operations: Floating-point operations of products, of what is seen alone.
        tiles: Tiles of keys that attention's programs go through.
        linked: Bytes that other devices send.
    """

    kind: str
    weights: float = 0
    kv: float = 0
    activations: float = 0
    operations: float = 0
    tiles: int = 0
    linked: float = 0

    @property
    def bytes(self) -> float:
        return self.weights + self.kv + self.activations


Arguments = Mapping[str, Any]
"""A kernel's arguments by name, `grid` among them."""


def of_product(x: Tensor, weight: Tensor, out: Tensor) -> Work:
    return Work(
        PRODUCT, weights=weight.nbytes, activations=x.nbytes + out.nbytes, operations=2 * len(x) * weight.numel()
    )


def of_kernel(name: str, given: Arguments) -> Work:
    """Returns the work of a launch of one of Triton's kernels. Raises KeyError for one whose costs are not known."""
    return KERNELS[name](given)


def _norm(given: Arguments) -> Work:
    each = given["out"].nbytes
    return Work(ROWS, given["weight"].nbytes, activations=(4 if given["ADDED"] else 2) * each)


def _rotate(given: Arguments) -> Work:
    x, pairs = given["x"], given["PAIRS"]
    angles = 2 * len(x) * pairs * given["cos"].itemsize
    return Work(ROWS, activations=2 * x.nbytes + angles)


def _write(given: Arguments) -> Work:
    each = given["keys"].nbytes + given["values"].nbytes
    return Work(ROWS, kv=each, activations=each)


def _attend(given: Arguments) -> Work:
    """Reads the pieces from the plan, where the kernel finds them."""
    plan: NDArray[np.int32] = given["plan"].numpy()
    count, at, _, order_at = plan[given["header"] : given["header"] + 4].tolist()
    pieces = plan[at : at + count * FIELDS.value].reshape(count, FIELDS.value).astype(np.int64)
    line, place, tokens, begin, end, chunk = pieces.T[:6]
    heads_per_kv, dim, rest, tile = (given[name] for name in ("HEADS_PER_KV", "HEAD_DIM", "REST", "TILE_KEYS"))
    columns = given["grid"][1]  # KV heads x tiles of query heads
    kv_heads = columns // given["HEAD_TILES"]
    heads = kv_heads * heads_per_kv
    piece = np.repeat(np.arange(count), tokens)
    token = plan[order_at + place[piece] + np.arange(len(piece)) - np.repeat(np.cumsum(tokens) - tokens, tokens)]
    first, last = (given[name].numpy()[token] for name in ("first_key", "end_key"))
    seen = int(np.maximum(np.minimum(last, end[piece]) - np.maximum(first, begin[piece]), 0).sum())
    element = given["keys"].itemsize
    keys = sum(int(end[line == one].max() - begin[line == one].min()) for one in np.unique(line))
    parts = chunk[piece] >= 0
    results = np.where(parts, 4 * (dim + 2), given["out"].itemsize * dim).sum() * heads
    queries = len(piece) * heads * (dim + rest) * given["queries"].itemsize
    return Work(
        ATTENTION,
        kv=keys * kv_heads * (dim + rest + (0 if rest else dim)) * element,
        activations=int(results) + queries,
        operations=2 * seen * heads * (2 * dim + rest),
        tiles=int((-(-end // tile) - begin // tile).sum()) * columns,
    )


def _join(given: Arguments) -> Work:
    joins, heads, dim = given["joins"].numpy(), given["grid"][1], given["HEAD_DIM"]
    parts, tokens = int(joins[:, 2].sum()), int((joins[:, 2] > 0).sum())
    return Work(ATTENTION, activations=heads * (parts * 4 * (dim + 2) + tokens * dim * given["out"].itemsize))


def _experts(given: Arguments) -> Work:
    """Counts the weights of the experts that some token uses, if each chooses evenly and by itself."""
    weight, places = given["weight"], given["factors"].numel()
    experts, tokens = len(given["weight_at"]), len(given["factors"])
    used = experts * (1 - (1 - places / tokens / experts) ** tokens)
    return Work(
        MIXTURE, used * weight.nbytes, activations=given["x"].nbytes + given["out"].nbytes,
        operations=2 * places * weight.numel(),
    )  # fmt: skip


def _operands(kind: str, *names: str) -> Callable[[Arguments], Work]:
    """Returns the costs of a kernel that reads or writes all of these arguments once."""
    return lambda given: Work(kind, activations=sum(given[name].nbytes for name in names))


KERNELS: Mapping[str, Callable[[Arguments], Work]] = {
    "norm_rows": _norm,
    "rotate_rows": _rotate,
    "gate_rows": _operands(ROWS, "gate_up", "out"),
    "add_ranks": _operands(ROWS, "parts", "out"),
    "write_slots": _write,
    "attend_pieces": _attend,
    "join_parts": _join,
    "choose_experts": _operands(MIXTURE, "logits", "weights", "chosen"),
    "count_places": _operands(MIXTURE, "chosen", "counts"),
    "arrange_places": _operands(MIXTURE, "chosen", "counts", "order", "tiles"),
    "multiply_experts": _experts,
    "add_places": _operands(MIXTURE, "parts", "out"),
    "summarise_blocks": _operands(SAMPLER, "logits", "tops", "tokens", "totals"),
    "join_summaries": _operands(SAMPLER, "tops", "tokens", "totals", "best", "token", "normal"),
    "pack_results": _operands(SAMPLER, "best", "tokens", "normal", "packed"),
}
