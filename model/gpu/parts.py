"""Replaces parts of layers by kernels that pass over memory once, where torch takes several passes."""

from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
import triton
from torch import Tensor

from model.blocks import Experts, GatedMLP, PreNorm, SelfAttention
from model.decoder import Decoder
from model.forward import ForwardBatch
from model.gpu.mixtures import KernelExperts, silu_gated
from model.gpu.rows import add_ranks, norm_rows, rotate_rows
from model.layers import RMSNorm, silu
from model.parallel.collective import Summed

Part = TypeVar("Part")

BLOCK = 1024
"""Elements of a sum of ranks that a program makes."""


@dataclass(frozen=True, slots=True, eq=False)
class KernelNorm:
    """`RMSNorm` by a kernel."""

    weight: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        """Normalises [tokens, width] or [tokens, heads, width]."""
        return self._run(x, None)[0]

    def of_sum(self, x: Tensor, added: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the norm of the sum of two tensors [tokens, width], and the sum."""
        return self._run(x, added)

    def _run(self, x: Tensor, added: Tensor | None) -> tuple[Tensor, Tensor]:
        x = x if x.stride(-1) == 1 else x.contiguous()
        inner, width = (x.shape[1] if x.dim() == 3 else 1), x.shape[-1]
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        summed = out if added is None else torch.empty_like(out)
        wide = triton.next_power_of_2(width)
        norm_rows[(len(x) * inner,)](
            x, x if added is None else added.contiguous(), self.weight, out, summed, inner, x.stride(0),
            x.stride(1) if x.dim() == 3 else 0, self.eps, WIDTH=width, PADDED_WIDTH=wide, ADDED=added is not None,
            num_warps=min(max(wide // 512, 1), 16),
        )  # fmt: skip
        return out, summed


@dataclass(frozen=True, slots=True, eq=False)
class KernelGatedMLP(GatedMLP):
    """`GatedMLP` with silu, whose gate is a kernel."""

    def __call__(self, x: Tensor, batch: ForwardBatch | None = None) -> Tensor:
        return self.down(silu_gated(self.gate_up(x, batch)), batch)


@dataclass(frozen=True, slots=True, eq=False)
class KernelSelfAttention(SelfAttention):
    """`SelfAttention` that normalises and rotates queries and keys in place."""

    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        qkv = self.qkv(x, batch).view(len(x), -1, self.head_dim)
        queries, keys, values = qkv.split((self.heads, self.kv_heads, self.kv_heads), 1)
        norms, both = self._norms_of_heads(), qkv[:, : self.heads + self.kv_heads]  # neighbours: one launch
        if norms is not None:
            self.rotate(both, batch, norms)
        elif self.query_norm is None or self.key_norm is None or self.rotated_first:
            self.rotate(both, batch)
            if self.query_norm is not None and self.key_norm is not None:
                queries, keys = self.query_norm(queries), self.key_norm(keys)
        else:
            queries, keys = self.query_norm(queries), self.key_norm(keys)
            self.rotate(queries, batch)
            self.rotate(keys, batch)
        batch.attention.write(self.number, keys, values, batch.plan)
        mixed = batch.attention.attend(self.number, queries, batch.plan, self.sinks)
        return self.output(mixed.flatten(1), batch)

    def _norms_of_heads(self) -> tuple[KernelNorm, KernelNorm] | None:
        """Returns the norms of queries and keys, if the kernel of the rotation computes them too."""
        queries, keys = self.query_norm, self.key_norm
        if not isinstance(queries, KernelNorm) or not isinstance(keys, KernelNorm) or self.rope is None:
            return None
        widths = {len(queries.weight), len(keys.weight), self.head_dim}
        alike = queries.eps == keys.eps and queries.weight.dtype == keys.weight.dtype and len(widths) == 1
        return (queries, keys) if alike and not self.rotated_first else None

    def rotate(self, x: Tensor, batch: ForwardBatch, norms: tuple[KernelNorm, KernelNorm] | None = None) -> None:
        """Rotates [tokens, heads, head_dim] in place, with norms behind those of queries and of keys."""
        if self.rope is None:
            return
        cos, sin = self.rope.tables
        heads, pairs = x.shape[1], cos.shape[1]
        rest = self.head_dim - 2 * pairs
        weights, eps = (x, x), 0.0
        if norms is not None:
            weights, eps = (norms[0].weight, norms[1].weight), norms[0].eps
        rotate_rows[(len(x),)](
            x, *weights, batch.positions[0], cos, sin, x.stride(0), x.stride(1), eps, QUERIES=self.heads, HEADS=heads,
            PADDED_HEADS=triton.next_power_of_2(heads), PAIRS=pairs, PADDED_PAIRS=triton.next_power_of_2(pairs),
            REST=rest, PADDED_REST=triton.next_power_of_2(max(rest, 1)), NORMED=norms is not None,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class KernelPreNorm(PreNorm):
    """`PreNorm` that adds and normalises attention's output in one kernel."""

    mlp_norm: KernelNorm

    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        normal, x = self.mlp_norm.of_sum(x, self.attention(self.attention_norm(x), batch))
        return x + self.mlp(normal, batch)


@dataclass(frozen=True, slots=True, eq=False)
class KernelSummed(Summed):
    """`Summed` whose parts are added by a kernel, with the bits of torch's operations."""

    def __call__(self, x: Tensor, batch: ForwardBatch | None = None) -> Tensor:
        return self.collective.sum(self.part(x, batch), add_by_kernel)


def add_by_kernel(parts: Tensor) -> Tensor:
    """`model.parallel.sums.Adder` of a kernel."""
    out = torch.empty(parts.shape[1:], dtype=parts.dtype, device=parts.device)
    add_ranks[(triton.cdiv(out.numel(), BLOCK),)](parts, out, out.numel(), RANKS=len(parts), BLOCK=BLOCK)
    return out


def with_kernels(decoder: Decoder) -> Decoder:
    """Returns the decoder with kernels for the parts that have some."""
    return replace(decoder, layers=[_changed(layer) for layer in decoder.layers], norm=_changed(decoder.norm))


def _changed(part: Any) -> Any:
    if isinstance(part, list | tuple):
        return [_changed(one) for one in part]
    if type(part) is RMSNorm:
        return KernelNorm(part.weight, part.eps)
    if not is_dataclass(part) or isinstance(part, type):
        return part
    if type(part) is Summed:
        return KernelSummed(_changed(part.part), part.collective)
    if type(part) is Experts and (mixture := KernelExperts.of(part)) is not None:
        return replace(mixture, router_norm=_changed(mixture.router_norm), norm=_changed(mixture.norm))
    inner = {field.name: _changed(getattr(part, field.name)) for field in fields(part)}
    if type(part) is GatedMLP and part.activation is silu:
        return KernelGatedMLP(**inner)
    if type(part) is SelfAttention and _rotates_in_place(part):
        return KernelSelfAttention(**inner)
    if type(part) is PreNorm and isinstance(inner["mlp_norm"], KernelNorm):
        return KernelPreNorm(**inner)
    return type(part)(**inner)


def _rotates_in_place(part: SelfAttention) -> bool:
    """Whether `KernelSelfAttention` knows all of a part. Its kernel reads the table by position alone."""
    plain = part.kv_heads > 0 and part.value_norm is None and not part.values_are_keys and part.gates is None
    plain = plain and part.query_scales is None
    return plain and (part.rope is None or (not part.rope.axes and 2 * part.rope.apart == part.rope.rotated))
