"""Writes latent attention as calls of kernels for the CPU."""

from model.cpu.attention_backend import CpuAttention
from model.cpu.call_list import CallList
from model.cpu.kernels.buffer import Buffer
from model.cpu.kernels.by_head import by_head_call
from model.cpu.kernels.element import FLOAT
from model.cpu.kernels.latent import TURN, LatentsKind, latents_call
from model.cpu.kernels.product import KernelLinear, NotCompiled
from model.cpu.kernels.values import LANES
from model.cpu.known_parts import kernel_of
from model.cpu.step_values import Rotations
from model.latent_attention import HeadProducts, LatentAttention, LowRankProduct


def latent_calls(a: LatentAttention, attention: CpuAttention, to: CallList, rotations: Rotations, x: Buffer) -> Buffer:
    """Writes the calls of a layer up to its last product. Returns the buffer with the inputs of that.

    Args:
        a: The layer.
        attention: Attention over the pages.
        to: Gets the calls.
        rotations: Tables of rotary angles.
        x: Normalised inputs, of the products' element.

    Raises:
        NotCompiled: A size is none of the kernels'.
    """
    s, rows = a.shape, to.cells.at("rows")
    for what, size, unit in (("plain", s.plain, LANES), ("rotated", s.rotated, TURN), ("latent", s.rank, LANES)):
        if size % unit:
            raise NotCompiled(f"the {what} part of its attention has {size} elements, no multiple of {unit}")
    raw, latents = _queries(a, to, x), to.buffer("latents", s.key_dim, FLOAT)
    to.linear(a.latents, x, latents)
    plain = to.buffer("plain parts of queries", a.heads * s.plain)
    queries, mixed = to.buffer("queries", a.heads * s.key_dim), to.buffer("mixed latents", a.heads * s.rank)
    values = to.buffer("values of heads", a.heads * s.value_dim)
    turns, _, _, cosines, sines = rotations.of(a.rope)
    arguments = (
        rows, attention.slots(a.number), to.cells.at(turns), latents.tensor, latents.stride, raw.tensor, raw.stride,
        plain.tensor, plain.stride, queries.tensor, attention.pool_of(a.number), a.heads, s.plain, s.rank,
        s.rotated // 2, cosines, sines, a.latent_norm.weight.float(), 0 if a.query_scales is None else a.query_scales,
        a.latent_norm.eps,
    )  # fmt: skip
    how = LatentsKind(neighbours=a.neighbours, scaled=a.query_scales is not None, rotated=a.rope is not None)
    to.calls.append(latents_call(attention.heads_of(a.number), arguments, how))
    to.calls.append(by_head_call(_of(a.to_latent), rows, plain, queries, s.key_dim))
    to.calls += attention.calls(a.number, queries.tensor, mixed.tensor)
    to.calls.append(by_head_call(_of(a.from_latent), rows, mixed, values, s.value_dim))
    return values


def _queries(a: LatentAttention, to: CallList, x: Buffer) -> Buffer:
    """Writes the product that makes queries."""
    product = a.queries
    if isinstance(product, LowRankProduct):
        low = to.buffer("latents of queries", kernel_of(product.down).columns, FLOAT)
        to.linear(product.down, x, low)
        x = to.buffer("normed latents of queries", len(product.norm.weight))
        to.norm(product.norm, low, x)
        product = product.up
    raw = to.buffer("raw queries", kernel_of(product).columns, FLOAT)
    to.linear(product, x, raw)
    return raw


def _of(products: HeadProducts) -> list[KernelLinear]:
    return [kernel_of(product) for product in products.heads]
