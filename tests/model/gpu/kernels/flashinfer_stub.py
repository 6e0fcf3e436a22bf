"""What Quire calls of FlashInfer, computed by torch: it refuses all that FlashInfer would refuse, or would misread.

What it checks was read from the package's Python and C++ code, version 0.7.4 of FlashInfer.
"""

import math
from typing import Any, ClassVar

import torch
from torch import Tensor

WORKSPACE = 128 * 2**20
HEAD_DIMS = (64, 128, 256)


class StubPrefill:
    """`BatchPrefillWithPagedKVCacheWrapper`. made: all that were made; runs: those of `run`."""

    made: ClassVar[list["StubPrefill"]] = []

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD", backend: str = "auto") -> None:
        assert float_workspace_buffer.dtype is torch.uint8
        assert float_workspace_buffer.numel() >= WORKSPACE
        assert float_workspace_buffer.data_ptr() % 16 == 0
        assert kv_layout == "HND"
        assert backend in ("fa2", "fa3"), "auto chooses by the batch, so that bits depend on it"
        self.device, self.kernels, self.runs = float_workspace_buffer.device, backend, 0
        self.planned: dict[str, Any] = {}
        StubPrefill.made.append(self)

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: str | torch.dtype = "float16",
        kv_data_type: torch.dtype | None = None,
        disable_split_kv: bool = False,
    ) -> None:
        indices = qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len
        for given in indices:
            assert given.dtype is torch.int32, "they are read as C++ integers"
            assert given.device.type == "cpu", "a copy from the device would wait for it"
            assert given.dim() == 1
            assert given.is_contiguous()
        batch = len(qo_indptr) - 1
        assert len(paged_kv_indptr) == batch + 1
        assert len(paged_kv_last_page_len) == batch
        for bounds, most in ((qo_indptr, None), (paged_kv_indptr, len(paged_kv_indices))):
            assert bounds[0] == 0
            assert (bounds.diff() > 0).all()
            assert most is None or bounds[-1] == most
        assert ((paged_kv_last_page_len >= 1) & (paged_kv_last_page_len <= page_size)).all()
        assert num_qo_heads % num_kv_heads == 0
        assert head_dim_qk in HEAD_DIMS, "no kernel is compiled for it"
        assert q_data_type == kv_data_type
        assert q_data_type in (torch.float16, torch.bfloat16)
        assert disable_split_kv, "it would divide keys by the load"
        assert causal
        assert window_left >= -1
        keys = (paged_kv_indptr.diff() - 1) * page_size + paged_kv_last_page_len
        assert (keys >= qo_indptr.diff()).all(), "the last query sees all keys"
        self.planned = {
            "queries": qo_indptr.tolist(), "pages": paged_kv_indptr.tolist(), "ids": paged_kv_indices.tolist(),
            "keys": keys.tolist(), "heads": num_qo_heads, "kv_heads": num_kv_heads, "dim": head_dim_qk,
            "size": page_size, "scale": sm_scale or head_dim_qk**-0.5, "window": window_left,
            "cap": logits_soft_cap or 0.0, "dtype": q_data_type,
        }  # fmt: skip

    def run(
        self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], *, out: Tensor, return_lse: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        p, (keys, values) = self.planned, paged_kv_cache
        self.runs += 1
        assert q.shape == out.shape == (p["queries"][-1], p["heads"], p["dim"])
        assert q.dtype == out.dtype == keys.dtype == values.dtype == p["dtype"]
        assert keys.shape == values.shape
        assert keys.shape[1:] == (p["kv_heads"], p["size"], p["dim"])
        assert max(p["ids"]) < len(keys)
        assert keys.stride() == values.stride(), "FlashAttention 3 takes one stride for both"
        for given in (q, keys, values, out):
            assert given.stride(-1) == 1
            assert given.device == self.device
            assert given.data_ptr() % 16 == 0
            assert all(stride * given.itemsize % 16 == 0 for stride in given.stride()[:-1])
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        for i, count in enumerate(p["keys"]):
            first, last = p["queries"][i : i + 2]
            ids = p["ids"][p["pages"][i] : p["pages"][i + 1]]
            k, v = (part[ids].transpose(1, 2).flatten(0, 1)[:count].float() for part in (keys, values))
            out[first:last], lse[first:last] = self._attention(q[first:last].float(), k, v)
        return (out, lse) if return_lse else out

    def _attention(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """q: [queries, heads, dim], the last of the sequence. k, v: [keys, kv_heads, dim]."""
        p, group = self.planned, q.shape[1] // k.shape[1]
        k, v = (part.repeat_interleave(group, 1) for part in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * p["scale"]
        if p["cap"]:
            scores = p["cap"] * torch.tanh(scores / p["cap"])
        place = torch.arange(len(k) - len(q), len(k), device=q.device)[:, None]
        key = torch.arange(len(k), device=q.device)
        seen = key <= place
        if p["window"] >= 0:
            seen &= key >= place - p["window"]
        scores = scores.masked_fill(~seen, -torch.inf)
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)
        return mixed.to(self.planned["dtype"]), scores.logsumexp(-1).T / math.log(2)
