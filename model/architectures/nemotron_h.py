"""Nemotron-H and Nemotron 3 (NVIDIA, 2025): each layer is a state-space mixer, attention, an MLP or experts.

There are no positions, and no gates in MLPs: their activation is the square of ReLU.
"""

from model.architectures.experts import load_ungated_experts
from model.architectures.glm4_moe import read_sigmoid_routing
from model.architectures.llama import AttentionNames, load_attention, load_decoder, norm_eps
from model.architectures.mixers import load_state_space
from model.blocks import MLP, FeedForward, Mixer, SharedExperts, Single
from model.config import ModelConfig
from model.decoder import Decoder
from model.hybrids import EXPERTS, nemotron_kinds
from model.layers import read_activation
from model.recurrent import ScanShape
from model.tensors import Tensors

NAMES = AttentionNames("mixer.q_proj", "mixer.k_proj", "mixer.v_proj", output="mixer.o_proj")
PREFIXES = ("backbone.", "model.")  # as the hub has them, and as transformers 5 does


def load_nemotron_h(config: ModelConfig, tensors: Tensors) -> Decoder:
    """NemotronHForCausalLM. Layers that predict further tokens are passed over, as in transformers.

    Time steps are bounded by 'time_step_limit' alone, in prompts and answers alike: a state must not depend on the cut.
    transformers bounds those of a prompt by 'time_step_min', and not those of its answer.
    """
    c, eps, body = config, norm_eps(config), tensors.under_any(PREFIXES, "embeddings.weight")

    def layer(number: int, kind: str) -> Single:
        at = body.under(f"layers.{number}.")
        return Single(at.rms_norm("norm", c.hidden, eps), _part(c, at, number, kind))

    tensors.ignore(r"mtp\..*")
    layers = [layer(number, kind) for number, kind in enumerate(nemotron_kinds(c.fields))]
    prefix = body.prefix
    return load_decoder(c, tensors, layers, embedding=f"{prefix}embeddings", norm=f"{prefix}norm_f")


def _part(config: ModelConfig, at: Tensors, number: int, kind: str) -> Mixer | FeedForward:
    c, shape, bias = config, config.recurrent[number], config.fields.flag("use_bias")
    if isinstance(shape, ScanShape):
        return load_state_space(c, at.under("mixer."), number, shape, norm_eps(c), bias, bias)
    if c.attends[number]:
        return load_attention(c, at, number, None, names=NAMES)
    mixer = at.under("mixer.")
    made = _experts(c, mixer) if kind == EXPERTS else _mlp(c, mixer, c.fields.positive("intermediate_size"))
    return mixer.ranks.summed(made)


def _mlp(config: ModelConfig, at: Tensors, width: int) -> MLP:
    bias, activation = config.fields.flag("mlp_bias"), read_activation(config.fields, "mlp_hidden_act", "relu2")
    mine = at.shard.part(width)
    up = at.linear("up_proj", config.hidden, width, bias, rows=[mine])
    return MLP(up, at.linear("down_proj", width, config.hidden, bias, columns=mine), activation)


def _experts(config: ModelConfig, at: Tensors) -> FeedForward:
    fields = config.fields
    if "moe_latent_size" in fields:
        raise fields.refuse("moe_latent_size", "experts behind a projection are not served")
    width, shared = (fields.positive(f"moe_{part}intermediate_size", 7688) for part in ("", "shared_expert_"))
    routing, experts = read_sigmoid_routing(config, at, (8, 2), (1, 1), 1.0)
    routed = load_ungated_experts(
        config, at, experts, width, routing, read_activation(fields, "mlp_hidden_act", "relu2")
    )
    return SharedExperts(routed, _mlp(config, at.under("shared_experts."), shared))
