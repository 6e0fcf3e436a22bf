"""Which code computes a model: torch, anywhere, or the kernels of the CPU or of a GPU, where they can.

Kernels are imported when they are asked for: without their compilers, llvmlite and Triton, everything else works.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

import torch
from torch import Tensor

from cache_manager.layout import KVLayout
from model.architectures.registry import Model
from model.attention.backend import AttentionBackend
from model.attention.reference import ReferenceAttention
from model.config import ModelConfig
from model.decoder import Decoder
from model.footprint import shape_of
from model.kv_pool import EIGHT_BIT
from model.parallel.collective import ALONE, Ranks
from model.sampling.sampler import TORCH_OPS, LogitOps, Starter
from model.settings import ModelSettings
from model.tensors import ProductMaker

if TYPE_CHECKING:
    from model.attention.cpu import CpuAttention
    from model.attention.triton import TritonAttention
    from model.kernels.product import KernelLinear
    from model.kernels.program import Machine

log = logging.getLogger("quire.model")

LEAST_CAPABILITY = 8  # of a GPU: asynchronous copies, bfloat16


class Backend(Protocol):
    """maker: of the products of a model while it is loaded, None for the plain ones. numerics: what the bits of its
    results depend on.
    """

    @property
    def numerics(self) -> str: ...

    @property
    def maker(self) -> ProductMaker | None: ...

    def last_compiled(self) -> float:
        """When, on the monotonic clock, a kernel was compiled: now, where one is being; 0 where none ever was."""

    def attention(self, config: ModelConfig, layout: KVLayout, pages: int) -> AttentionBackend: ...

    def model(self, decoder: Decoder, attention: AttentionBackend, rows: int, context: int) -> Model:
        """What runs the decoder over this attention, for up to `rows` sequences of up to `context` tokens."""

    @property
    def logit_ops(self) -> LogitOps:
        """For the sampler."""

    @property
    def starter(self) -> Starter | None:
        """What draws while the host goes on; None where the host does."""


@dataclass(frozen=True, slots=True)
class TorchBackend:
    """Layer by layer. kv_dtype: as in `KVPool`."""

    kv_dtype: str
    device: torch.device
    maker: None = None
    numerics: str = "reference"

    def last_compiled(self) -> float:
        return 0.0

    @property
    def starter(self) -> None:
        return None

    @property
    def logit_ops(self) -> LogitOps:
        return TORCH_OPS

    def attention(self, config: ModelConfig, layout: KVLayout, pages: int) -> AttentionBackend:
        return ReferenceAttention(
            layout, pages, config.heads, self.kv_dtype, self.device, config.scale, config.soft_cap
        )

    def model(self, decoder: Decoder, attention: AttentionBackend, rows: int, context: int) -> Model:  # noqa: ARG002
        return decoder


@dataclass(frozen=True, slots=True)
class CpuBackend:
    """All layers in one program of kernels. kv_dtype: the dtype, or 8 bits."""

    machine: "Machine"
    dtype: str
    kv_dtype: str

    def last_compiled(self) -> float:
        return self.machine.compiler.last_compiled

    @property
    def starter(self) -> None:
        return None

    @property
    def numerics(self) -> str:
        return f"cpu {self.machine.compiler.made_from}"

    @property
    def logit_ops(self) -> LogitOps:
        from model.kernels.logits import KernelOps

        return KernelOps(self.machine)

    def maker(
        self, weights: Sequence[Tensor], bias: Tensor | None, dtype: torch.dtype, gated: bool, quantized: bool
    ) -> "KernelLinear":
        from model.kernels.product import KernelLinear

        return KernelLinear(self.machine, weights, bias, dtype, gated, quantized)

    def attention(self, config: ModelConfig, layout: KVLayout, pages: int) -> "CpuAttention":
        from model.attention.cpu import CpuAttention

        eight_bit = None if self.kv_dtype == self.dtype else self.kv_dtype
        return CpuAttention(
            self.machine, layout, pages, config.heads, self.dtype, config.scale, config.soft_cap,
            eight_bit,
        )  # fmt: skip

    def model(self, decoder: Decoder, attention: AttentionBackend, rows: int, context: int) -> Model:  # noqa: ARG002
        from model.compiled import CompiledDecoder

        return CompiledDecoder(self.machine, decoder)


@dataclass(frozen=True, slots=True)
class TritonBackend:
    """Layer by layer on a GPU: attention and what is small by kernels, large products by torch. dtype: of the weights.
    kv_dtype: as in `KVPool`.
    """

    dtype: str
    kv_dtype: str
    device: torch.device
    maker: None = None

    def last_compiled(self) -> float:
        return 0.0

    @property
    def numerics(self) -> str:
        import triton

        return f"triton {triton.__version__} {torch.cuda.get_device_name(self.device)}"

    @property
    def logit_ops(self) -> LogitOps:
        from model.gpu.sampler import GpuOps

        return GpuOps()

    @property
    def starter(self) -> Starter:
        from model.gpu.draws import start_draws

        return start_draws

    def attention(self, config: ModelConfig, layout: KVLayout, pages: int) -> "TritonAttention":
        from model.attention.triton import TritonAttention

        made = TritonAttention(
            layout, pages, config.heads, self.kv_dtype, self.device, self.dtype, config.scale, config.soft_cap
        )
        made.prepare()
        return made

    def model(self, decoder: Decoder, attention: AttentionBackend, rows: int, context: int) -> Model:
        from model.attention.triton import TritonAttention
        from model.gpu.draws import prepare_draws
        from model.gpu.graphs import CudaRecorder, GraphDecoder, why_not
        from model.gpu.parts import with_kernels

        made, tokens = with_kernels(decoder), decoder.embedding.tokens
        prepare_draws(len(tokens), tokens.device)
        if reason := why_not(made):
            log.info("decodes are run launch by launch, not as CUDA graphs: %s", reason)
            return made
        return GraphDecoder(made, cast(TritonAttention, attention), rows, context, CudaRecorder())


def choose_backend(
    config: ModelConfig, settings: ModelSettings, dtype: str, kv_dtype: str, device: str, ranks: Ranks = ALONE
) -> Backend:
    """dtype: of the weights. ranks: among which the model is divided; all of them choose alike. Raises ValueError where
    the settings insist on kernels that there are not.
    """
    plain = TorchBackend(kv_dtype, torch.device(device))
    if settings.backend == "reference":
        return plain
    insisting = settings.backend != "auto"
    gpu = settings.backend == "triton" or (not insisting and device != "cpu")
    try:
        if gpu:
            if ranks.shard.size > 1:
                raise NoKernels("they are for a model that is not divided among ranks")
            return _gpu_kernels(config, settings, dtype, kv_dtype, device)
        return _kernels(config, settings, dtype, kv_dtype, device, ranks)
    except NoKernels as reason:
        if insisting:
            raise ValueError(f"--backend is {settings.backend!r}: {reason}") from None
        log.info("The %s's kernels are not used: %s", "GPU" if gpu else "CPU", reason)
        return plain


class NoKernels(Exception):
    """Why a model cannot be run by the kernels here."""


def _kernels(
    config: ModelConfig, settings: ModelSettings, dtype: str, kv_dtype: str, device: str, ranks: Ranks
) -> CpuBackend:
    """Raises NoKernels."""
    if device != "cpu":
        raise NoKernels(f"the device is {device}")
    if kv_dtype not in (dtype, *EIGHT_BIT):
        raise NoKernels(f"there are none for a KV cache in {kv_dtype} beside weights in {dtype}")
    try:
        from model.attention.cpu import why_not as why_not_attention
        from model.compiled import check_compiled
        from model.kernels.machine import open_machine
        from model.kernels.product import NotCompiled
    except ImportError as error:
        raise NoKernels(f"{error.name} is not installed") from None
    except OSError as error:
        raise NoKernels(f"llvmlite cannot be loaded: {error}") from None
    own = ranks.shard.of(config)
    layout = own.kv_layout(settings.page_size, kv_dtype)
    if reason := why_not_attention(layout, dtype):
        raise NoKernels(reason)
    try:
        machine = open_machine(kernel_directory(settings.kernel_cache))
    except OSError as error:
        raise NoKernels(str(error)) from None
    backend = CpuBackend(machine, dtype, kv_dtype)
    try:
        shape = shape_of(config, getattr(torch, dtype), settings.quantization, backend.maker, ranks)
        check_compiled(shape, backend.attention(own, layout, 1))
    except NotCompiled as error:
        raise NoKernels(str(error)) from None
    return backend


def _gpu_kernels(config: ModelConfig, settings: ModelSettings, dtype: str, kv_dtype: str, device: str) -> TritonBackend:
    """Raises NoKernels."""
    if device != "cuda":
        raise NoKernels("they need --device cuda" if settings.device == "cpu" else "there is no CUDA device")
    if torch.version.hip is not None:
        raise NoKernels("they are for NVIDIA's devices")
    major, minor = torch.cuda.get_device_capability()
    if major < LEAST_CAPABILITY:
        raise NoKernels(f"the device has compute capability {major}.{minor}, below {LEAST_CAPABILITY}.0")
    try:
        from model.attention.triton import why_not
    except ImportError as error:
        raise NoKernels(f"{error.name} is not installed") from None
    layout = config.kv_layout(settings.page_size, kv_dtype)
    if reason := why_not(layout):
        raise NoKernels(reason)
    backend = TritonBackend(dtype, kv_dtype, torch.device(device))
    try:
        backend.attention(config, layout, 1)
    except Exception as error:  # Triton wants a C compiler, a place to write to, an assembler that knows the device
        raise NoKernels(f"Triton cannot compile them: {type(error).__name__}: {error}") from error
    log.info("attention: Triton's kernels on %s, compute capability %d.%d", torch.cuda.get_device_name(), major, minor)
    return backend


def kernel_directory(place: str | None) -> Path | None:
    """Where compiled kernels are kept; None for nowhere."""
    if not place:
        return None
    try:
        return Path(place).expanduser()
    except RuntimeError:  # a user without a home
        log.warning("compiled kernels are not kept: %s is nowhere", place)
        return None
