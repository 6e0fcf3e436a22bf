"""What calls of kernels say of a model's norms."""

from model.blocks import OwnNorms, SelfAttention, Together
from model.cpu.kernels.heads import HeadNorm
from model.cpu.kernels.product import NotCompiled
from model.cpu.kernels.program import Argument
from model.cpu.kernels.rows import Norm
from model.layers import LayerNorm, RMSNorm
from model.parallel.norms import TogetherOnRanks


def kind_of(norm: RMSNorm | LayerNorm) -> Norm:
    return Norm(isinstance(norm, LayerNorm), isinstance(norm, LayerNorm) and norm.bias is not None)


def bias_of(norm: RMSNorm | LayerNorm) -> Argument:
    return norm.bias.float() if isinstance(norm, LayerNorm) and norm.bias is not None else 0


def head_norms(a: SelfAttention) -> tuple[HeadNorm | None, float, Argument, Argument, Argument, Argument, Argument]:
    """Returns the head norms' kind, epsilon, weights of queries, keys and values, and biases of queries and keys."""
    queries, keys = a.query_norm, a.key_norm if a.kv_heads else a.query_norm
    if queries is None and keys is None and a.value_norm is None:
        return None, 0.0, 0, 0, 0, 0, 0
    if a.value_norm is not None:
        return _with_values(a)
    if isinstance(queries, OwnNorms) and isinstance(keys, OwnNorms) and not a.rotated_first:
        own = HeadNorm(Norm(centred=True), own=True)
        return own, queries.eps, queries.weight.float(), keys.weight.float(), 0, 0, 0
    together, ranks = isinstance(queries, Together | TogetherOnRanks), isinstance(queries, TogetherOnRanks)
    alike = type(queries) is type(keys)
    queries, keys = (norm.norm if isinstance(norm, Together | TogetherOnRanks) else norm for norm in (queries, keys))
    if not isinstance(queries, RMSNorm | LayerNorm) or type(queries) is not type(keys) or queries.eps != keys.eps:
        raise NotCompiled("there is no kernel for its norms of queries and keys")
    if not alike or kind_of(queries) != kind_of(keys):
        raise NotCompiled("its norms of queries and of keys are not alike")
    if together and a.rotated_first:
        raise NotCompiled("its norms over all queries and keys come after the rotation")
    kind = HeadNorm(kind_of(queries), together, after=a.rotated_first, ranks=ranks)
    return kind, queries.eps, queries.weight.float(), keys.weight.float(), 0, bias_of(queries), bias_of(keys)


def _with_values(a: SelfAttention) -> tuple[HeadNorm, float, Argument, Argument, Argument, Argument, Argument]:
    norms = [norm for norm in (a.query_norm, a.key_norm, a.value_norm) if isinstance(norm, RMSNorm)]
    if len(norms) < 3 or len({norm.eps for norm in norms}) > 1 or a.rotated_first:
        raise NotCompiled("there is no kernel for its norms of queries, keys and values")
    queries, keys, values = (norm.weight.float() for norm in norms)
    return HeadNorm(Norm(), values=True), norms[0].eps, queries, keys, values, 0, 0
