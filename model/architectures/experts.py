"""Reads mixtures of experts. Families share it; those that save experts in another way have their own."""

from dataclasses import dataclass

from model.blocks import MLP, Experts, GatedMLP, SharedExperts
from model.config import ModelConfig
from model.errors import CheckpointError
from model.layers import Activation, read_activation
from model.routing import AnyRouting, Groups
from model.tensors import Tensors


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Names of a mixture's tensors.

    Attributes:
        apart: Of an expert's gate, up and down products.
        together: Of the tensors with the gate and up, and with the down products of all experts.
        router: Of the product that gives the experts' logits.
    """

    apart: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    together: tuple[str, str] = ("experts.gate_up_proj", "experts.down_proj")  # as transformers 5 has them
    router: str = "gate"


PLAIN_NAMES, MIXTRAL_NAMES = ExpertNames(), ExpertNames(apart=("w1", "w3", "w2"))
MOST_EXPERTS = 2**15  # experts of all layers: each takes 0.1 ms before a weight is read


def read_used(config: ModelConfig, experts: int, default: int, key: str = "num_experts_per_tok") -> int:
    """Returns how many of a layer's experts a token goes through. Raises CheckpointError for numbers out of bounds."""
    if experts * config.layers > MOST_EXPERTS:
        raise CheckpointError(
            f"{config.fields.path}: {config.layers} layers of {experts} experts are {config.layers * experts} of them, "
            f"may be {MOST_EXPERTS}"
        )
    used = config.fields.positive(key, default)
    if used > experts:
        raise config.fields.refuse(key, f"there are {experts} experts")
    return used


def read_groups(config: ModelConfig, experts: int, used: int, best: int, default: tuple[int, int]) -> Groups | None:
    """Returns the groups that experts are chosen from, None where that is the same as from all.

    Args:
        config: Configuration of the model.
        experts: The number of experts.
        used: Experts of a token.
        best: Experts that make a group's score.
        default: 'n_group' and 'topk_group' where config.json says nothing.

    Raises:
        CheckpointError: Groups are unequal, or those of a token have fewer experts than it uses.
    """
    fields = config.fields
    count, of_token = fields.positive("n_group", default[0]), fields.positive("topk_group", default[1])
    if experts % count or experts // count < best:
        raise fields.refuse("n_group", f"cannot divide {experts} experts into groups of {best} or more")
    if of_token > count or of_token * (experts // count) < used:
        raise fields.refuse("topk_group", f"{used} of {experts} experts in {count} groups cannot be in so many")
    return None if of_token == count else Groups(count, of_token, best)


def load_experts(
    config: ModelConfig,
    at: Tensors,
    experts: int,
    width: int,
    routing: AnyRouting,
    names: ExpertNames = PLAIN_NAMES,
    transposed: bool = False,
) -> Experts:
    """Loads the experts of a layer, of which each rank has a part.

    Args:
        config: Configuration of the model.
        at: Tensors of the layer's experts.
        experts: The number of experts.
        width: Width of one expert.
        routing: Chooses experts.
        names: Names of its tensors.
        transposed: Whether the tensors with all experts are [experts, in, out] in the checkpoint.
    """
    rows, columns, all_of = at.shard.gated(width), at.shard.part(width), at.transposed() if transposed else at
    activation = read_activation(config.fields, "hidden_act", "silu")
    wide, narrow = names.together
    if all_of.is_stacked(wide, config.hidden, 2 * width) and all_of.is_stacked(narrow, width, config.hidden):
        gates = all_of.stacked(wide, experts, config.hidden, 2 * width, gated=True, rows=rows)
        downs = all_of.stacked(narrow, experts, width, config.hidden, columns=columns)
        parts = [GatedMLP(gate_up, last, activation) for gate_up, last in zip(gates, downs, strict=True)]
    else:
        parts = at.each("experts.", experts, names.apart, lambda own: _load_one(config, own, width, names.apart))
    return Experts(at.unquantized().linear(names.router, config.hidden, experts), parts, routing)


def load_ungated_experts(
    config: ModelConfig, at: Tensors, experts: int, width: int, routing: AnyRouting, activation: Activation
) -> Experts:
    """Loads experts that are MLPs without gates, each by itself or all in two tensors; arguments as `load_experts`."""
    up, down, mine = "up_proj", "down_proj", at.shard.part(width)
    if at.is_stacked(f"experts.{up}", config.hidden, width):
        wide = at.stacked(f"experts.{up}", experts, config.hidden, width, rows=[mine])
        narrow = at.stacked(f"experts.{down}", experts, width, config.hidden, columns=mine)
        parts = [MLP(first, last, activation) for first, last in zip(wide, narrow, strict=True)]
    else:

        def load(own: Tensors) -> MLP:
            wide = own.linear(up, config.hidden, width, rows=[mine])
            return MLP(wide, own.linear(down, width, config.hidden, columns=mine), activation)

        parts = at.each("experts.", experts, (up, down), load)
    return Experts(at.unquantized().linear("gate", config.hidden, experts), parts, routing)


def load_with_shared(
    config: ModelConfig,
    at: Tensors,
    routed: Experts,
    name: str,
    width: int,
    gate: str | None = None,
    bias: bool = False,
) -> SharedExperts:
    """Loads the MLP that all tokens go through beside their experts.

    Args:
        config: Configuration of the model.
        at: Tensors of the layer's experts.
        routed: The experts.
        name: Name of the MLP.
        width: Its width.
        gate: Name of the product whose sigmoid multiplies its result. None without one.
        bias: Whether it has biases.
    """
    shared = _load_one(config, at.under(f"{name}."), width, PLAIN_NAMES.apart, bias)
    return SharedExperts(routed, shared, None if gate is None else at.unquantized().linear(gate, config.hidden, 1))


def _load_one(
    config: ModelConfig, at: Tensors, width: int, names: tuple[str, str, str], bias: bool = False
) -> GatedMLP:
    gate, up, down = names
    return GatedMLP(
        at.linear([(gate, width), (up, width)], config.hidden, bias=bias, gated=True, rows=at.shard.gated(width)),
        at.linear(down, width, config.hidden, bias, columns=at.shard.part(width)),
        read_activation(config.fields, "hidden_act", "silu"),
    )
