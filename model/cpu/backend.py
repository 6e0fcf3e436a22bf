"""The CPU back end."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cache_manager.layout import KVLayout
from model.attention.backend import AttentionBackend
from model.backend import NoKernels, StepSizes
from model.config import ModelConfig
from model.cpu.attention_backend import CpuAttention, why_not
from model.cpu.decoder import CompiledDecoder, check_compiled
from model.cpu.kernels.element import ELEMENTS
from model.cpu.kernels.logits import KernelOps
from model.cpu.kernels.machine import open_machine
from model.cpu.kernels.product import KernelLinear, NotCompiled
from model.cpu.kernels.program import Machine
from model.cpu.weight_formats import KERNEL_WEIGHTS, group_weights, rounded_weights
from model.decoder import Decoder
from model.footprint import shape_of
from model.forward import Model
from model.kv_pool import EIGHT_BIT
from model.parallel.collective import Ranks
from model.sampling.sampler import LogitOps
from model.settings import ModelSettings
from model.weight_formats.activations import RoundedFormat
from model.weight_formats.format import WeightFormat
from model.weight_formats.groups import GroupFormat
from model.weight_formats.stored import StoredWeight


@dataclass(frozen=True, slots=True)
class CpuBackend:
    """`Backend` of the CPU's kernels.

    Attributes:
        dtype: Dtype of the weights. kv_dtype: The same dtype, or one of 8 bits.
    """

    machine: Machine
    dtype: str
    kv_dtype: str

    @property
    def last_compiled(self) -> Callable[[], float]:
        compiler = self.machine.compiler
        return lambda: compiler.last_compiled

    @property
    def starter(self) -> None:
        return None

    @property
    def numerics(self) -> str:
        return f"cpu {self.machine.compiler.made_from}"

    @property
    def logit_ops(self) -> LogitOps:
        return KernelOps(self.machine)

    def maker(
        self,
        weight_format: WeightFormat,
        weights: Sequence[StoredWeight],
        bias: Tensor | None,
        dtype: torch.dtype,
        gated: bool,
    ) -> KernelLinear:
        """Raises NotCompiled for a format that there are no kernels for."""
        if prepare := KERNEL_WEIGHTS.get(weight_format.name):
            return KernelLinear(self.machine, [prepare(weights, ELEMENTS[dtype])], bias, gated)
        if isinstance(weight_format, GroupFormat):
            made = group_weights(weights, ELEMENTS[dtype], weight_format, self.machine.compiler.has_pairs)
            return KernelLinear(self.machine, made, bias, gated)
        if isinstance(weight_format, RoundedFormat):
            rounded = rounded_weights(weights, ELEMENTS[dtype], weight_format, self.machine.compiler)
            return KernelLinear(self.machine, rounded, bias, gated)
        raise NotCompiled(f"there are none for weights in the format {weight_format.name}")

    def attention(self, config: ModelConfig, layout: KVLayout, pages: int) -> CpuAttention:
        eight_bit = None if self.kv_dtype == self.dtype else self.kv_dtype
        return CpuAttention(
            self.machine, layout, pages, config.heads, self.dtype, config.scale, config.soft_cap,
            eight_bit, config.slopes,
        )  # fmt: skip

    def working_memory(
        self, decoder: Decoder, config: ModelConfig, layout: KVLayout, sizes: StepSizes  # noqa: ARG002
    ) -> int:  # fmt: skip
        return 0

    def model(self, decoder: Decoder, attention: AttentionBackend, sizes: StepSizes) -> Model:  # noqa: ARG002
        return CompiledDecoder(self.machine, decoder)


def open_cpu_backend(
    config: ModelConfig, settings: ModelSettings, dtype: str, kv_dtype: str, ranks: Ranks
) -> CpuBackend:
    """Opens the CPU back end for a model.

    Args:
        config: Configuration of the model, undivided.
        settings: Page size, quantization and where compiled kernels are kept.
        dtype: Dtype of the weights.
        kv_dtype: Dtype of the KV cache.
        ranks: Ranks that the model is divided among.

    Raises:
        NoKernels: The machine, the model or a setting has no kernels.
    """
    if kv_dtype not in (dtype, *EIGHT_BIT):
        raise NoKernels(f"there are none for a KV cache in {kv_dtype} beside weights in {dtype}")
    own = ranks.shard.of(config)
    layout = own.kv_layout(settings.page_size, kv_dtype)
    if reason := why_not(layout, dtype, own.heads):
        raise NoKernels(reason)
    try:
        machine = open_machine(settings.kernel_directory)
    except OSError as error:
        raise NoKernels(str(error)) from None
    backend = CpuBackend(machine, dtype, kv_dtype)
    try:
        shape = shape_of(config, getattr(torch, dtype), settings.quantization, backend.maker, ranks)
        check_compiled(shape, backend.attention(own, layout, 1))
    except NotCompiled as error:
        raise NoKernels(str(error)) from None
    return backend
