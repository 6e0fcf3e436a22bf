"""Multi-head latent attention in the absorbed form, see `model.latent`."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from model.forward import ForwardBatch
from model.latent import LatentShape
from model.layers import Product, RMSNorm
from model.rope import Rope, rotate


@dataclass(frozen=True, slots=True, eq=False)
class HeadProducts:
    """A product for each head.

    Attributes:
        heads: Products of equal shape.
    """

    heads: Sequence[Product]

    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """Maps [tokens, heads, in] to [tokens, heads, out]."""
        return torch.stack([product(x[:, head], batch) for head, product in enumerate(self.heads)], 1)


@dataclass(frozen=True, slots=True, eq=False)
class LowRankProduct:
    """Two products with a norm between them.

    Attributes:
        down: Product with fewer outputs than inputs.
        norm: Norm of what it makes.
        up: Product with more outputs than inputs.
    """

    down: Product
    norm: RMSNorm
    up: Product

    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        return self.up(self.norm(self.down(x, batch)), batch)


@dataclass(frozen=True, slots=True, eq=False)
class LatentAttention:
    """Latent attention of one layer.

    Attributes:
        number: Index of the layer in the model.
        shape: Its shape; `heads` are those of the rank.
        queries: Product that makes queries.
        latents: Product that makes a token's latent and the part of its key that is rotated.
        latent_norm: Norm of the latent.
        to_latent: Product of each head with the part of a query that is not rotated.
        from_latent: Product of each head with its mixed latents.
        output: Product after attention.
        rope: Rotary embedding. None: nothing is rotated.
        neighbours: Whether the elements of a rotated pair are neighbours. If not, they are half the width apart.
        query_scales: [context] float32. Factor of queries by position (Mistral 4, as Llama 4). None without one.
    """

    number: int
    shape: LatentShape
    heads: int
    queries: Product | LowRankProduct
    latents: Product
    latent_norm: RMSNorm
    to_latent: HeadProducts
    from_latent: HeadProducts
    output: Product
    rope: Rope | None
    neighbours: bool
    query_scales: Tensor | None = None

    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """Returns the attention of x [tokens, hidden]. Writes the tokens' latents first."""
        s = self.shape
        made = self.queries(x, batch)
        if self.query_scales is not None:
            made = (made * self.query_scales[batch.positions[0]].unsqueeze(1)).to(made.dtype)
        plain, turned = made.view(len(x), self.heads, s.query_dim).split((s.plain, s.rotated), -1)
        latent, shared = self.latents(x, batch).split((s.rank, s.rotated), -1)
        queries = torch.cat((self.to_latent(plain, batch), self._rotated(turned, batch)), -1)
        keys = torch.cat((self.latent_norm(latent).unsqueeze(1), self._rotated(shared.unsqueeze(1), batch)), -1)
        batch.attention.write(self.number, keys, keys[..., : s.rank], batch.plan)
        mixed = batch.attention.attend(self.number, queries, batch.plan)
        return self.output(self.from_latent(mixed, batch).flatten(1), batch)

    def _rotated(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """Rotates [tokens, heads, rotated]. Pairs of neighbours come out half the width apart, in queries and keys."""
        if self.rope is None:
            return x
        cos, sin = batch.cos_sin(self.rope)
        return rotate(torch.cat((x[..., ::2], x[..., 1::2]), -1) if self.neighbours else x, cos, sin)
