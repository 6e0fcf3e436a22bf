"""Calls of kernels in the order of a step, and the buffers between them."""

from collections.abc import Callable

from torch import Tensor

from model.cpu.kernels.buffer import Buffer
from model.cpu.kernels.element import Element
from model.cpu.kernels.experts import write_mixed
from model.cpu.kernels.product import NotCompiled
from model.cpu.kernels.program import Argument, Call
from model.cpu.kernels.rows import write_norm, write_rounded
from model.cpu.known_parts import kernel_of
from model.cpu.norm_arguments import bias_of, kind_of
from model.cpu.rounds import HostCall, Rounds
from model.cpu.step_values import Cells
from model.layers import LayerNorm, RMSNorm
from model.parallel.collective import Summed


class CallList:
    """Calls while they are written.

    Attributes:
        calls: The calls so far.
        cells: Addresses and counts of a step.
        hidden: Width of the residual stream.
    """

    def __init__(self, tokens: int, wanted: int, hidden: int, element: Element, rounds: Rounds | None) -> None:
        """Starts a list.

        Args:
            tokens: Most tokens of a step.
            wanted: Most tokens of a step whose logits are wanted.
            hidden: Width of the residual stream.
            element: Element of products.
            rounds: Rounds of the ranks. None for one rank.
        """
        self.calls: list[Call | HostCall] = []
        self.cells, self.hidden = Cells(tokens), hidden
        self._tokens, self._wanted, self._element, self._rounds = tokens, wanted, element, rounds
        self._buffers: dict[tuple[str, int, str, int], Buffer] = {}

    def call(self, name: str, write: Callable, *arguments: Argument) -> None:
        self.calls.append(Call(name, write, arguments))

    def buffer(self, name: str, width: int, element: Element | None = None, times: int = 1) -> Buffer:
        """Returns the buffer of this name, width and element, which all layers share; `times` is its rows for a token.

        The output layer uses such buffers too, and may have more rows than a step has tokens.
        """
        kind = element or self._element
        key = name, width, kind.name, times
        if key not in self._buffers:
            self._buffers[key] = Buffer.of(max(self._tokens, self._wanted) * times, width, kind)
        return self._buffers[key]

    def linear(
        self,
        product: object,
        x: Buffer,
        y: Buffer,
        rows: str = "rows",
        add: bool = False,
        activation: str | None = None,
    ) -> None:
        if isinstance(product, Summed):
            self.summed(
                y, self.hidden, add, lambda part: self.linear(product.part, x, part, rows, activation=activation)
            )
            return
        self.calls += kernel_of(product).calls(self.cells.at(rows), x, y, self.buffer, add, activation)

    def summed(self, y: Buffer, width: int, add: bool, made: Callable[[Buffer], None]) -> None:
        """Writes a part that is divided among ranks, and the sum of all ranks' parts.

        Args:
            y: Buffer of the sum.
            width: Columns, a multiple of 16.
            add: Whether the sum is added to y.
            made: Writes this rank's part into a buffer of this width.
        """
        if self._rounds is None:
            raise NotCompiled("a part of it is divided among ranks, its output layer is not")
        made(self._rounds.to_sum(self._tokens, width))
        self.calls.append(self._rounds.summed(self.cells.at("rows"), y, width, add))

    def norm(
        self, norm: object, x: Buffer, y: Buffer, rows: str = "rows", add: bool = False, chosen: bool = False
    ) -> None:
        if not isinstance(norm, RMSNorm | LayerNorm):
            raise NotCompiled("there is no kernel for one of its norms")
        kind = kind_of(norm)
        name = f"{kind.name}_{y.element.name}{'_add' if add else ''}{'_chosen' if chosen else ''}"
        self.call(
            name,
            write_norm(kind, y.element, add, chosen),
            self.cells.at(rows), self.cells.at("wanted"), x.tensor, x.stride, norm.weight.float(),
            bias_of(norm), y.tensor, y.stride, len(norm.weight), norm.eps,
        )  # fmt: skip

    def rounded(self, x: Buffer, y: Buffer, width: int, rows: str = "rows", chosen: bool = False) -> None:
        self.call(
            f"rounded_{y.element.name}{'_chosen' if chosen else ''}", write_rounded(y.element, chosen),
            self.cells.at(rows), self.cells.at("wanted"), x.tensor, x.stride, y.tensor, y.stride, width,
        )  # fmt: skip

    def mixed(self, weights: Tensor, part: Buffer, y: Buffer, add: bool) -> None:
        """Writes the rows of a part to y, or adds them, by weights [rows] float32."""
        self.call(
            f"mixed{'_add' if add else ''}", write_mixed(add),
            self.cells.at("rows"), 1, weights, part.tensor, part.stride, y.tensor, y.stride, self.hidden,
        )  # fmt: skip
