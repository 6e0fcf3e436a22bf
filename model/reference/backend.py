"""Opens the reference back end."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from cache_manager.layout import KVLayout
from model.attention.backend import AttentionBackend
from model.backend import StepSizes
from model.config import ModelConfig
from model.decoder import Decoder
from model.forward import Model
from model.reference.attention_backend import ReferenceAttention
from model.sampling.sampler import TORCH_OPS, LogitOps


@dataclass(frozen=True, slots=True)
class TorchBackend:
    """`Backend` of torch's operations, layer by layer.

    Attributes:
        kv_dtype: Type of the KV cache, as in `model.reference.row_pool.RowPool`.
    """

    kv_dtype: str
    device: torch.device
    maker: None = None
    numerics: str = "reference"

    @property
    def last_compiled(self) -> Callable[[], float]:
        return lambda: 0.0

    @property
    def starter(self) -> None:
        return None

    @property
    def logit_ops(self) -> LogitOps:
        return TORCH_OPS

    def attention(self, config: ModelConfig, layout: KVLayout, pages: int) -> AttentionBackend:
        return ReferenceAttention(
            layout, pages, config.heads, self.kv_dtype, self.device, config.scale, config.soft_cap, config.slopes
        )

    def working_memory(
        self, decoder: Decoder, config: ModelConfig, layout: KVLayout, sizes: StepSizes  # noqa: ARG002
    ) -> int:  # fmt: skip
        return 0

    def model(self, decoder: Decoder, attention: AttentionBackend, sizes: StepSizes) -> Model:  # noqa: ARG002
        return decoder
