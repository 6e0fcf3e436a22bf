"""The product of each head with weights of its own."""

from collections.abc import Sequence

import torch

from model.cpu.kernels.buffer import Buffer
from model.cpu.kernels.code import Code
from model.cpu.kernels.group_panels import GroupPanels
from model.cpu.kernels.linear import BLOCK_BYTES, Epilogue, multiply
from model.cpu.kernels.panels import PANEL, Panels
from model.cpu.kernels.product import KernelLinear, NotCompiled
from model.cpu.kernels.program import Call
from model.cpu.kernels.rows import Writer
from model.cpu.kernels.sides import MOST_ROWS, TILE, Sides, WeightPanel
from model.cpu.kernels.sums import PanelSums


def write_by_head(weights: Panels, ending: Epilogue) -> Writer:
    """Writes the kernel of a product for each head.

    Kernel arguments:
        count: Cell. The number of rows.
        x: Input, of the element.
        x_stride: Bytes of a row of x.
        x_width: Bytes from a head's inputs to those of the next head.
        places: Addresses of each head's panels, int64.
        heads: The number of heads.
        panels: The number of panels of a head.
        steps: Steps of a panel.
        y: Result.
        y_stride: Bytes of a row of y.
        y_width: Bytes from a head's outputs to those of the next head.
        kernel: See `sums_kernel`.
    """

    def write(code: Code) -> None:
        count, x, x_stride, x_width, places, heads, panels, steps, y, y_stride, y_width, kernel = code.arguments(12)
        rows, sums = code.held(count), PanelSums(code, weights, kernel, steps)
        block = code.smaller((code.integer(BLOCK_BYTES) // x_width // TILE + 1) * TILE, code.integer(MOST_ROWS))
        blocks = (rows + block - 1) // block
        first, last = code.share(heads * blocks * panels)
        with code.loop(first, last) as item:
            number, head, start = item % panels, item // panels // blocks, item // panels % blocks * block
            own = code.held(places + head * 8) + number * weights.panel_bytes(steps)
            sides, here = (
                Sides(x + head * x_width, x_stride, y + head * y_width, y_stride),
                code.smaller(rows - start, block),
            )
            sums.take(item // panels, sides, start, here)
            multiply(code, sums, ending, start, here, sides, WeightPanel(number, own, steps, own, own, own))

    return write


def by_head_call(products: Sequence[KernelLinear], rows: int, x: Buffer, y: Buffer, y_width: int) -> Call:
    """Makes the call of the product of each head.

    Args:
        products: The products, by head, all of one shape and without biases. They must outlive the call.
        rows: Address of the cell with the number of rows.
        x: Input: of each row the inputs of all heads, one after the other.
        y: Buffer of the result.
        y_width: Elements from a head's outputs to those of the next head.

    Raises:
        NotCompiled: The outputs of a head are no multiple of a panel, and would write over those of the next.
    """
    parts = [product.only for product in products]
    first, kind = parts[0], parts[0].kind
    if first.outputs % PANEL:
        raise NotCompiled(f"a product of each head has {first.outputs} outputs, no multiple of {PANEL}")
    if isinstance(kind, GroupPanels) or first.bias is not None:
        raise NotCompiled("the product of each head is in groups or has a bias")
    ending = Epilogue(y.element)
    return Call(
        f"by_head_{kind.name}_{ending.name}",
        write_by_head(kind, ending),
        (
            rows, x.tensor, x.stride, products[0].inputs * x.element.size,
            torch.tensor([part.panels.data_ptr() for part in parts]), len(parts), len(first.panels), first.steps,
            y.tensor, y.stride, y_width * y.element.size, first.sums,
        ),
    )  # fmt: skip
