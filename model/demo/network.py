"""The demo model's network as training needs it: a dense Llama over rectangular batches, with dropout and gradients.

Serving never runs this: it loads the checkpoint into `model.architectures.llama`. Parameter names are those of Hugging
Face's LlamaForCausalLM, so that a state dict is a checkpoint. Llama: Touvron et al., 2023; grouped-query attention:
Ainslie et al., 2023; rotary positions: Su et al., 2021.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class DemoAttention(nn.Module):
    def __init__(self, hidden: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, hidden // heads
        self.q_proj = nn.Linear(hidden, heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(hidden, kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(hidden, kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(heads * self.head_dim, hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q = self.q_proj(x).view(batch, length, self.heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(batch, length, self.kv_heads, self.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(batch, length, self.kv_heads, self.head_dim).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        group = self.heads // self.kv_heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # dropout in here would cost half the speed
        return self.o_proj(y.transpose(1, 2).reshape(batch, length, -1))


class Mlp(nn.Module):
    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, config: dict[str, Any], dropout: float) -> None:
        super().__init__()
        hidden, eps = config["hidden_size"], config["rms_norm_eps"]
        self.input_layernorm = nn.RMSNorm(hidden, eps)
        self.self_attn = DemoAttention(hidden, config["num_attention_heads"], config["num_key_value_heads"])
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps)
        self.mlp = Mlp(hidden, config["intermediate_size"])
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.dropout(self.self_attn(self.input_layernorm(x), cos, sin))
        return x + self.dropout(self.mlp(self.post_attention_layernorm(x)))


class DemoLlama(nn.Module):
    """A dense Llama with tied embeddings."""

    def __init__(self, config: dict[str, Any], dropout: float) -> None:
        """Makes the network.

        Args:
            config: Fields of config.json.
            dropout: Probability of dropping an activation.
        """
        super().__init__()
        self.embed_tokens = nn.Embedding(config["vocab_size"], config["hidden_size"])
        self.layers = nn.ModuleList(Layer(config, dropout) for _ in range(config["num_hidden_layers"]))
        self.norm = nn.RMSNorm(config["hidden_size"], config["rms_norm_eps"])
        self.dropout = nn.Dropout(dropout)
        head_dim = config["hidden_size"] // config["num_attention_heads"]
        inverse = config["rope_theta"] ** -(torch.arange(0, head_dim, 2) / head_dim)
        angles = torch.outer(torch.arange(config["max_position_embeddings"]), inverse)
        self.cos, self.sin = (f(torch.cat((angles, angles), -1)) for f in (torch.cos, torch.sin))
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:  # GPT-2's scheme: residual writers start smaller
                residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=0.02 / ((2 * len(self.layers)) ** 0.5 if residual else 1.0))

    def forward(self, tokens: Tensor) -> Tensor:
        """Maps tokens [batch, length] to logits [batch, length, vocabulary]."""
        x = self.dropout(self.embed_tokens(tokens))
        cos, sin = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x, cos, sin)
        return F.linear(self.norm(x), self.embed_tokens.weight)

    def checkpoint(self) -> dict[str, Tensor]:
        """Returns the tensors in bfloat16 under Hugging Face's names."""
        return {f"model.{name}": p.detach().to(torch.bfloat16).contiguous() for name, p in self.named_parameters()}


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat((-high, low), -1) * sin
