"""Mamba-2 (Dao and Gu, 2024): each layer is a state-space mixer, and there is no attention."""

from model.architectures.llama import load_decoder, norm_eps
from model.architectures.mixers import load_state_space
from model.blocks import Single
from model.config import ModelConfig
from model.decoder import Decoder
from model.recurrent import ScanShape
from model.tensors import Tensors


def load_mamba2(config: ModelConfig, tensors: Tensors) -> Decoder:
    """Mamba2ForCausalLM."""
    c, eps, bias = config, norm_eps(config), config.fields.flag("use_bias")

    def layer(number: int) -> Single:
        at, shape = tensors.under(f"backbone.layers.{number}."), c.recurrent[number]
        if not isinstance(shape, ScanShape):
            raise TypeError(f"layer {number} has no state-space mixer")
        mixer = load_state_space(c, at.under("mixer."), number, shape, eps, bias, bias)
        return Single(at.rms_norm("norm", c.hidden, eps), mixer)

    layers = [layer(number) for number in range(c.layers)]
    return load_decoder(c, tensors, layers, embedding="backbone.embeddings", norm="backbone.norm_f")
