"""Opens the GPU back end."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import cast

import torch
import triton
from torch import Tensor

from cache_manager.layout import KVLayout
from model.attention.backend import AttentionBackend
from model.backend import NoKernels, StepSizes
from model.config import ModelConfig
from model.decoder import Decoder
from model.forward import Model
from model.gpu.attention_backend import TritonAttention, why_not
from model.gpu.compilations import Compilations
from model.gpu.draws import GpuOps, prepare_draws, start_draws
from model.gpu.flashinfer import FlashInferPrompts, open_flashinfer
from model.gpu.float8_product import Float8Product, ScaledFloat8Weights, can_multiply
from model.gpu.graphs import CudaRecorder, GraphDecoder, graph_tokens
from model.gpu.graphs import why_not as why_no_graphs
from model.gpu.group_linear import GroupProduct
from model.gpu.mixtures import run_all_tiles
from model.gpu.parts import with_kernels
from model.gpu.states import why_not as why_no_states
from model.gpu.working_memory import CudaMemory, exchange_first, measure_steps
from model.parallel.collective import ONE_RANK, Ranks
from model.parallel.unconnected import unconnected
from model.sampling.sampler import LogitOps, Starter
from model.settings import ModelSettings
from model.weight_formats.activations import RoundedFormat, RoundedProduct, RowRounding
from model.weight_formats.format import MadeProduct, WeightFormat
from model.weight_formats.groups import GroupFormat, NotGrouped
from model.weight_formats.scratch import Scratch
from model.weight_formats.stored import StoredWeight

log = logging.getLogger("quire.model")

LEAST_CAPABILITY = 8  # compute capability with asynchronous copies and bfloat16


@dataclass(frozen=True, slots=True)
class TritonBackend:
    """`Backend` of Triton's kernels: attention, mixtures, small operations by kernels, other large products by torch.

    Products of few rows with weights in groups are a kernel's.

    Attributes:
        dtype: Type of the weights.
        kv_dtype: Type of the KV cache, as in `model.gpu.kv_pool.KVPool`.
        device: Device of the model.
        scratch: Room that the products of the model share.
        compilations: What Triton compiles.
        prompts: FlashInfer, which computes the attention of long prompts; None where Triton's kernels do.
        ranks: Ranks that the model is divided among.
    """

    dtype: str
    kv_dtype: str
    device: torch.device
    scratch: Scratch
    compilations: Compilations = field(default_factory=Compilations)
    prompts: FlashInferPrompts | None = None
    ranks: Ranks = ONE_RANK
    _products: dict[object, GroupProduct] = field(default_factory=dict)

    @property
    def last_compiled(self) -> Callable[[], float]:
        compilations = self.compilations
        return lambda: compilations.last

    @property
    def numerics(self) -> str:
        prompts = "" if self.prompts is None else f" flashinfer {self.prompts.version}"
        return f"triton {triton.__version__}{prompts} {torch.cuda.get_device_name(self.device)}"

    @property
    def logit_ops(self) -> LogitOps:
        return GpuOps()

    @property
    def starter(self) -> Starter:
        return start_draws

    def maker(
        self,
        weight_format: WeightFormat,
        weights: Sequence[StoredWeight],
        bias: Tensor | None,
        dtype: torch.dtype,
        gated: bool,  # noqa: ARG002
    ) -> MadeProduct | None:
        try:
            if isinstance(weight_format, GroupFormat):
                return self._product(weight_format, weights, bias, dtype)
            if isinstance(weight_format, RoundedFormat) and isinstance(weight_format.weights, GroupFormat):
                return weight_format.joined(weights, bias, partial(self._rounded, weight_format.weights, dtype))
        except NotGrouped:  # as parts of a GGUF file may be: torch multiplies
            return None
        return None

    def _rounded(
        self,
        form: GroupFormat,
        dtype: torch.dtype,
        rounding: RowRounding,
        weights: Sequence[StoredWeight],
        bias: Tensor | None,
    ) -> Float8Product | RoundedProduct:
        """Makes a product whose rows are rounded."""
        if can_multiply(rounding, dtype, self.device):
            made = ScaledFloat8Weights.of(form, weights, self.device)
            if made is not None:
                return Float8Product(rounding, made, None if bias is None else bias.to(dtype))
        return RoundedProduct(rounding, self._product(form, weights, bias, dtype))

    def _product(
        self, form: GroupFormat, weights: Sequence[StoredWeight], bias: Tensor | None, dtype: torch.dtype
    ) -> GroupProduct:
        """Makes a product, and remembers one of each kind until its kernels have run."""
        made = GroupProduct(form, weights, bias, dtype, self.scratch, self.device)
        self._products.setdefault(made.kind, made)
        return made

    def attention(self, config: ModelConfig, layout: KVLayout, pages: int) -> TritonAttention:
        made = TritonAttention(
            layout, pages, config.heads, self.kv_dtype, self.device, self.dtype, config.scale, config.soft_cap,
            prompts=self.prompts,
        )  # fmt: skip
        made.prepare(config.recurrent)
        return made

    def working_memory(self, decoder: Decoder, config: ModelConfig, layout: KVLayout, sizes: StepSizes) -> int:
        # Without the other ranks: one whose memory does not suffice raises, and no rank waits for it.
        made, memory = unconnected(with_kernels(decoder)), CudaMemory()
        found = measure_steps(
            made, lambda: self.attention(config, layout, 1), layout, config.rotary_axes, memory, sizes,
            graph_tokens(made, layout, sizes),
        )  # fmt: skip
        log.info(
            "a step of %d tokens takes %.0f MiB, graphs %.0f MiB, the sampler %.0f MiB",
            sizes.tokens, found.step / 2**20, found.graphs / 2**20, found.sampler / 2**20,
        )  # fmt: skip
        if self.ranks.collective is None:
            return found.total
        self.ranks.exchange({})  # a rank that has failed is met now: an exchange would wait for it for long
        dtype: torch.dtype = getattr(torch, self.dtype)
        exchanges = partial(exchange_first, self.ranks.collective, sizes.tokens, config.hidden, dtype, self.device)
        buffers = memory.lasting(exchanges)
        log.info("buffers of the exchanges of ranks take %.0f MiB", buffers / 2**20)
        return found.total + buffers

    def model(self, decoder: Decoder, attention: AttentionBackend, sizes: StepSizes) -> Model:
        made, tokens = with_kernels(decoder), decoder.embedding.tokens
        prepare_draws(tokens.vocabulary, tokens.device)
        while self._products:
            self._products.popitem()[1].run_all_rows(sizes.tokens)
        run_all_tiles(made, getattr(torch, self.dtype), tokens.device, sizes.tokens)
        model: Model = made
        if reason := why_no_graphs(made):
            log.info("steps are run launch by launch, not as CUDA graphs: %s", reason)
        else:
            self.ranks.exchange({})  # a rank that has failed is met now: graphs would wait for it for long
            model = GraphDecoder(made, cast(TritonAttention, attention), sizes, CudaRecorder())
        log.info("%d kernels were compiled", self.compilations.count)
        # By now the kernels of measured steps, graphs, mixtures and draws have run.
        self.compilations.expect_none()
        return model


def why_no_kernels(config: ModelConfig, layout: KVLayout) -> str | None:
    """Returns why there are no kernels for a model, or a rank's part of it, with this layout; None if there are."""
    slopes = "scores have a bias by distance (ALiBi)" if config.slopes else None
    return why_not(layout) or why_no_states(config.recurrent) or slopes


def open_gpu_backend(
    config: ModelConfig, settings: ModelSettings, dtype: str, kv_dtype: str, device: str, ranks: Ranks = ONE_RANK
) -> TritonBackend:
    """Opens the GPU back end for a model, on a CUDA device.

    Args:
        config: The model, undivided.
        settings: Settings with the page size.
        dtype: Type of the weights.
        kv_dtype: Type of the KV cache.
        device: Name of the device.
        ranks: Ranks that the model is divided among.

    Raises:
        NoKernels: The device, the model or a setting has no kernels.
    """
    major, minor = torch.cuda.get_device_capability()
    if major < LEAST_CAPABILITY:
        raise NoKernels(f"the device has compute capability {major}.{minor}, below {LEAST_CAPABILITY}.0")
    own = ranks.shard.of(config)
    layout = own.kv_layout(settings.page_size, kv_dtype)
    if reason := why_no_kernels(own, layout):
        raise NoKernels(reason)
    on, prompts = torch.device(device), None
    if settings.backend == "flashinfer":
        prompts = open_flashinfer(own, layout, dtype, kv_dtype, on)
    backend = TritonBackend(dtype, kv_dtype, on, Scratch(getattr(torch, dtype), on), prompts=prompts, ranks=ranks)
    backend.compilations.watch()
    try:
        backend.attention(own, layout, 1)
    except NoKernels:
        raise
    except Exception as error:  # Triton needs a C compiler, a cache directory, an assembler for the device
        raise NoKernels(f"Triton cannot compile them: {type(error).__name__}: {error}") from error
    of_prompts = "" if prompts is None else f", of long prompts FlashInfer {prompts.version}"
    name = torch.cuda.get_device_name()
    log.info("attention: Triton's kernels on %s, compute capability %d.%d%s", name, major, minor, of_prompts)
    return backend
