"""Llama and its kin: RMSNorm before, rotary positions, grouped-query attention, SwiGLU. Touvron et al., 2023."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from model.attention.backend import AttentionBackend
from model.config import ModelConfig
from model.layers import Linear, Rope, rms_norm, rotate, silu_mul
from model.weights import Checkpoint


@dataclass(frozen=True, slots=True, eq=False)
class _Layer:
    input_norm: Tensor
    qkv: Linear
    output: Linear
    post_norm: Tensor
    gate_up: Linear
    down: Linear


class Llama:
    """LlamaForCausalLM, MistralForCausalLM and MinistralForCausalLM over packed tokens."""

    # Buffers that old checkpoints saved; the output layer of a tied model, which some save although it is the
    # embedding.
    IGNORED = (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",)

    def __init__(self, config: ModelConfig, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> None:
        self._config = config
        self._take = lambda name, *shape: checkpoint.take(name, shape, dtype).to(device)
        self._embedding = self._take("model.embed_tokens.weight", config.vocabulary, config.hidden)
        self._layers = [self._load_layer(number) for number in range(config.layers)]
        self._norm = self._take("model.norm.weight", config.hidden)
        if config.tied_embeddings:
            self._head = Linear(self._embedding)
        else:
            self._head = Linear(self._take("lm_head.weight", config.vocabulary, config.hidden))
        self._rope = Rope(config.head_dim, config.rope_theta, config.context, dtype, device)
        checkpoint.finish((*self.IGNORED, "lm_head.weight") if config.tied_embeddings else self.IGNORED)
        del self._take

    def _load_layer(self, number: int) -> _Layer:
        c, prefix = self._config, f"model.layers.{number}."
        queries, keys = c.heads * c.head_dim, c.kv_heads * c.head_dim
        qkv = [("self_attn.q_proj", queries), ("self_attn.k_proj", keys), ("self_attn.v_proj", keys)]
        gate_up = [("mlp.gate_proj", c.intermediate), ("mlp.up_proj", c.intermediate)]
        return _Layer(
            input_norm=self._take(prefix + "input_layernorm.weight", c.hidden),
            qkv=self._fused(prefix, qkv, c.hidden, c.attention_bias),
            output=self._fused(prefix, [("self_attn.o_proj", c.hidden)], queries, c.attention_bias),
            post_norm=self._take(prefix + "post_attention_layernorm.weight", c.hidden),
            gate_up=self._fused(prefix, gate_up, c.hidden, c.mlp_bias),
            down=self._fused(prefix, [("mlp.down_proj", c.hidden)], c.intermediate, c.mlp_bias),
        )

    def _fused(self, prefix: str, parts: list[tuple[str, int]], width: int, bias: bool) -> Linear:
        """One linear for several that read the same input. parts: name and output width of each."""
        weight = torch.cat([self._take(f"{prefix}{name}.weight", out, width) for name, out in parts])
        if not bias:
            return Linear(weight)
        return Linear(weight, torch.cat([self._take(f"{prefix}{name}.bias", out) for name, out in parts]))

    def forward(
        self, tokens: Tensor, positions: Tensor, wanted: Tensor, attention: AttentionBackend, plan: object
    ) -> Tensor:
        """tokens, positions: [tokens]. wanted: [n] packed offsets. Returns float32 logits [n, vocabulary] of those."""
        c = self._config
        cos, sin = self._rope.at(positions)
        x = F.embedding(tokens, self._embedding)
        for number, layer in enumerate(self._layers):
            qkv = layer.qkv(rms_norm(x, layer.input_norm, c.norm_eps)).view(len(tokens), -1, c.head_dim)
            queries, keys, values = qkv.split((c.heads, c.kv_heads, c.kv_heads), 1)
            attention.write(number, rotate(keys, cos, sin), values, plan)
            mixed = attention.attend(number, rotate(queries, cos, sin), plan)
            x = x + layer.output(mixed.flatten(1))
            x = x + layer.down(silu_mul(layer.gate_up(rms_norm(x, layer.post_norm, c.norm_eps))))
        return self._head(rms_norm(x[wanted], self._norm, c.norm_eps)).float()
