"""Writes mixtures of experts as calls of kernels for the CPU."""

from collections.abc import Callable

from torch import Tensor

from model.blocks import MLP, Experts, GatedMLP
from model.cpu.kernels.buffer import Buffer
from model.cpu.kernels.choice import MOST_EXPERTS, Choice, write_choice, write_sparse_mixer
from model.cpu.kernels.element import FLOAT, Element
from model.cpu.kernels.experts import Routes, write_jobs, write_mixed, write_weighed
from model.cpu.kernels.product import NotCompiled, experts_call
from model.cpu.kernels.program import Call
from model.cpu.known_parts import activation_name, kernel_of
from model.routing import AnyRouting, SparseMixer

MakeBuffer = Callable[[str, int, Element | None, int], Buffer]


class Mixtures:
    """Writes mixtures of experts. Layers of one size share the room for a step's choices.

    Args:
        tokens: Most tokens of a step.
        hidden: Width of the residual stream.
        rows: Address of the cell with the number of rows.
        buffer: Returns the buffer of a name, width, element and number of rows for a token, which all layers share.
    """

    def __init__(self, tokens: int, hidden: int, rows: int, buffer: MakeBuffer) -> None:
        self._tokens, self._hidden, self._rows, self._buffer = tokens, hidden, rows, buffer
        self._routes: dict[tuple[int, int], Routes] = {}

    def calls(self, mlp: Experts, x: Buffer, seen: Buffer, y: Buffer, add: bool) -> list[Call]:
        """Returns the calls of a mixture, whose result is written to y or added.

        Args:
            mlp: The mixture.
            x: What its experts read.
            seen: What its router reads.
            y: Buffer of the result.
            add: Whether it is added.

        Raises:
            NotCompiled: There are no kernels for its experts.
        """
        parts, routes = _parts(mlp), self._routes_of(len(mlp.experts), mlp.routing.used)
        firsts, downs = [kernel_of(_first(part)) for part in parts], [kernel_of(part.down) for part in parts]
        limits = {part.limit if isinstance(part, GatedMLP) else None for part in parts}
        if len(limits) > 1 or len({part.activation for part in parts}) > 1:
            raise NotCompiled("its experts' activations differ, or the limits of their gates")
        rows, experts, used = self._rows, len(parts), mlp.routing.used
        logits = self._buffer("logits of experts", experts, FLOAT, 1)
        inner = self._buffer("inner of experts", downs[0].inputs, None, used)
        made = self._buffer("made by experts", self._hidden, FLOAT, used)
        activation, weights, read, weighed = activation_name(parts[0].activation), routes.weights, x, list[Call]()
        if mlp.weighs_inputs:
            read, weights = self._buffer("weighed for experts", self._hidden, x.element, used), routes.ones
            weighed = [
                Call(
                    f"weighed_{x.element.name}", write_weighed(x.element),
                    (rows, used, routes.weights, x.tensor, x.stride, read.tensor, read.stride, self._hidden),
                )
            ]  # fmt: skip
        return [
            *kernel_of(mlp.router).calls(rows, seen, logits, self._room),
            choice_call(mlp.routing, routes, rows, logits),
            Call("jobs", write_jobs, (rows, used, experts, routes.chosen, routes.order, routes.jobs, routes.count)),
            *weighed,
            experts_call(
                firsts, routes, read, inner, gather=True, activation=activation, limit=limits.pop(),
                by_place=mlp.weighs_inputs,
            ),
            experts_call(downs, routes, inner, made, gather=False),
            Call(
                f"mixed{'_add' if add else ''}", write_mixed(add),
                (rows, used, weights, made.tensor, made.stride, y.tensor, y.stride, self._hidden),
            ),
        ]  # fmt: skip

    def _room(self, name: str, width: int, element: Element) -> Buffer:
        return self._buffer(name, width, element, 1)

    def _routes_of(self, experts: int, used: int) -> Routes:
        if experts > MOST_EXPERTS:
            raise NotCompiled(f"there are {experts} experts, more than {MOST_EXPERTS}")
        if (experts, used) not in self._routes:
            self._routes[experts, used] = Routes.of(self._tokens, experts, used)
        return self._routes[experts, used]


def choice_call(routing: AnyRouting, routes: Routes, rows: int | Tensor, logits: Buffer) -> Call:
    """Makes the call that chooses the experts of each row.

    Args:
        routing: How they are chosen.
        routes: Where the result goes.
        rows: Cell with the number of rows.
        logits: [rows, experts] float32.
    """
    if isinstance(routing, SparseMixer):
        return Call(
            "sparse_mixer", write_sparse_mixer,
            (rows, logits.tensor, logits.stride, routes.experts, routes.chosen, routes.weights, routing.band),
        )  # fmt: skip
    groups = routing.groups
    choice = Choice(
        routing.normalised, routing.by_sigmoid, routing.bias is not None, 0 if groups is None else groups.best,
        routing.factor != 1.0, routing.scales is not None,
    )  # fmt: skip
    of_groups = (1, 1) if groups is None else (groups.count, groups.used)
    return Call(
        choice.name,
        write_choice(choice),
        (
            rows, logits.tensor, logits.stride, routes.experts, routes.used, routes.chosen, routes.weights,
            0 if routing.bias is None else routing.bias, *of_groups, routing.factor, routing.least,
            0 if routing.scales is None else routing.scales,
        ),
    )  # fmt: skip


def _first(part: GatedMLP | MLP) -> object:
    """Returns the first product of an expert. Raises NotCompiled unless its gates, if it has some, lie beside it."""
    if isinstance(part, MLP):
        return part.up
    if not kernel_of(part.gate_up).gated:
        raise NotCompiled("its experts' gates were not loaded as such (gated=True)")
    return part.gate_up


def _parts(mlp: Experts) -> list[GatedMLP | MLP]:
    parts = [part for part in mlp.experts if isinstance(part, GatedMLP | MLP)]
    if len(parts) < len(mlp.experts):
        raise NotCompiled("there are no kernels for its experts")
    return parts
