"""torch's flex_attention, compiled. It needs a C compiler, and seconds for each shape."""

from collections.abc import Callable, Sequence
from itertools import cycle

from torch import Tensor

from bench.on_gpu.timing import Work

SHAPES = 64  # shapes that may be compiled: by default torch stops at 8, and goes on without compiling


def _compiled() -> Callable[..., Tensor]:
    import torch._dynamo
    import torch._inductor.config
    from torch.nn.attention.flex_attention import flex_attention

    torch._dynamo.config.recompile_limit = SHAPES
    torch._inductor.config.compile_threads = 1  # a pool of processes would outlive what is compiled
    return torch.compile(flex_attention, dynamic=False)


def flex_decode(queries: Tensor, stores: Sequence[Tensor]) -> Work:
    """Returns a function that computes one layer a call, compiled by its first call.

    Args:
        queries: [batch, heads, 1, head_dim].
        stores: Keys and values of each layer, [2, batch, KV heads, keys, head_dim].
    """
    attend, turn = _compiled(), cycle(stores)
    return lambda: attend(queries, *next(turn), enable_gqa=True)


def flex_prefill(queries: Tensor, stores: Sequence[Tensor]) -> Work:
    """Does the same as `flex_decode` with a causal mask, for equal numbers of queries and keys."""
    from torch.nn.attention.flex_attention import create_block_mask

    attend, turn, tokens = _compiled(), cycle(stores), queries.shape[2]

    def causal(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:  # noqa: ARG001 - as torch calls it
        return query >= key

    mask = create_block_mask(causal, None, None, tokens, tokens, device=queries.device)
    return lambda: attend(queries, *next(turn), block_mask=mask, enable_gqa=True)
