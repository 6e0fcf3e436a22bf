"""Settings of the model and its KV pool."""

import logging
from dataclasses import dataclass, field
from pathlib import Path

log = logging.getLogger("quire.model")

DTYPES = ("auto", "float32", "bfloat16", "float16")
QUANTIZATIONS = ("int8", "int4")
KV_DTYPES = (*DTYPES, "int8", "fp8")
BACKENDS = ("auto", "cpu", "triton", "flashinfer", "reference")
DEVICES = ("auto", "cpu", "cuda")


@dataclass(frozen=True, slots=True)
class Sharing:
    """Engines that share memory.

    Attributes:
        host: Engines on the machine.
        gpu: Engines on the GPU.
    """

    host: int
    gpu: int


ALONE = Sharing(1, 1)


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """Settings of the served model: its source, its dtypes, its device and its memory."""

    model: str = field(
        default="demo",
        metadata={
            "help": "Model directory (Hugging Face layout), a GGUF file (of several the first), a name on the hub, "
            "`demo` for the one that ships, or `sim:PROFILE` for engines that compute nothing."
        },
    )
    served_model_name: str | None = field(
        default=None, metadata={"help": "Its name in requests. Unset: the directory's or the file's."}
    )
    dtype: str = field(
        default="auto", metadata={"help": "Weights and KV: auto (the checkpoint's), float32, bfloat16 or float16."}
    )
    device: str = field(default="auto", metadata={"help": "auto, cpu or cuda."})
    page_size: int = field(default=16, metadata={"help": "Tokens in a KV page."})
    kv_cache_memory: int | None = field(
        default=None,
        metadata={
            "size": True,
            "help": "Bytes for the KV pool: 512MiB, 2GiB. Unset: half of the free memory (on a GPU what "
            "--gpu-memory-utilization leaves), but no more than --max-sequences times the model's context needs.",
        },
    )
    poison_freed_pages: bool = field(
        default=False, metadata={"help": "Fill freed KV pages with NaN, so that a stale read shows (debugging; slow)."}
    )

    verify_weights: bool = field(
        default=False,
        metadata={
            "help": "Check all files against the SHA256SUMS of the model directory (made there by `sha256sum *.json "
            "*.safetensors > SHA256SUMS`), if there is one, and every tensor for values that are infinite or NaN."
        },
    )
    kv_cache_dtype: str = field(
        default="auto",
        metadata={
            "help": "KV in: auto (as --dtype), float32, bfloat16, float16, or in 8 bits with a scale for each token "
            "and head: int8, fp8 (e4m3). 8 bits hold nearly twice the tokens of 16, at a small loss."
        },
    )
    host_cache_memory: int | None = field(
        default=None,
        metadata={
            "size": True,
            "help": "Bytes of host memory for copies of cached KV pages whose place in the pool is needed; they come "
            "back where that is quicker than computing them. Unset: none.",
        },
    )

    image_cache_memory: int = field(
        default=256 * 2**20,
        metadata={
            "size": True,
            "help": "Bytes for features of images, kept for prompts that show the same image. Vision-language models "
            "only.",
        },
    )

    quantization: str | None = field(
        default=None,
        metadata={
            "help": "Keep the weights of linear layers in fewer bits, made while the checkpoint is loaded. int8: a "
            "scale for each output; a half or a quarter of the memory, at a small loss. int4: a scale and an offset "
            "for each 32 inputs, output layers in 8 bits; a third of 16 bits, at a larger loss. Unset: none."
        },
    )

    backend: str = field(
        default="auto",
        metadata={
            "help": "Back end: cpu (the CPU's own kernels), triton (kernels for NVIDIA's GPUs), flashinfer (likewise, "
            "but attention of long prompts by FlashInfer, an extra), reference (torch: any model on any device, slow), "
            "or auto: the device's own kernels where they can run the model."
        },
    )
    kernel_cache: str | None = field(
        default="~/.cache/quire/kernels",
        metadata={"help": "Directory for compiled kernels, for the next start; empty keeps none."},
    )
    logits_processors: str | None = field(
        default=None,
        metadata={
            "help": "Logits processors that all requests go through, in this order: entry points "
            "`quire.logits_processors` of installed packages, separated by commas."
        },
    )
    tensor_parallel: int = field(
        default=1,
        metadata={
            "help": "Processes that compute the model together, each with a part of all weights and of the KV cache; "
            "--kv-cache-memory and --host-cache-memory are of each."
        },
    )
    tensor_parallel_timeout: float = field(
        default=10.0,
        metadata={
            "help": "Seconds without a sign of life from one of these processes after which the engine fails; on GPUs "
            "at least 60, as the computing of a step counts."
        },
    )
    gpu_memory_utilization: float = field(
        default=0.9,
        metadata={
            "help": "Part of a GPU's memory that the engines on it may use, in equal parts: for weights, for steps, "
            "which Triton's back end measures when the model is loaded (without images, drafts and logprobs of "
            "prompts), and the rest for the KV pool. Without effect beside --kv-cache-memory, and on CPUs."
        },
    )

    @property
    def kernel_directory(self) -> Path | None:
        """Directory of compiled kernels. None where they are not kept."""
        if not self.kernel_cache:
            return None
        try:
            return Path(self.kernel_cache).expanduser()
        except RuntimeError:  # the user has no home
            log.warning("compiled kernels are not kept: %s is nowhere", self.kernel_cache)
            return None

    def __post_init__(self) -> None:
        if self.tensor_parallel < 1:
            raise ValueError(f"--tensor-parallel is {self.tensor_parallel}, must be at least 1")
        if not self.tensor_parallel_timeout > 0:
            raise ValueError(f"--tensor-parallel-timeout is {self.tensor_parallel_timeout}, must be above 0")
        if self.dtype not in DTYPES:
            raise ValueError(f"--dtype is {self.dtype!r}, must be one of {', '.join(DTYPES)}")
        if self.kv_cache_dtype not in KV_DTYPES:
            raise ValueError(f"--kv-cache-dtype is {self.kv_cache_dtype!r}, must be one of {', '.join(KV_DTYPES)}")
        if self.quantization is not None and self.quantization not in QUANTIZATIONS:
            raise ValueError(f"--quantization is {self.quantization!r}, must be {' or '.join(QUANTIZATIONS)}, or unset")
        if self.backend not in BACKENDS:
            raise ValueError(f"--backend is {self.backend!r}, must be one of {', '.join(BACKENDS)}")
        if self.device not in DEVICES:
            raise ValueError(f"--device is {self.device!r}, must be one of {', '.join(DEVICES)}")
        if self.page_size < 1:
            raise ValueError(f"--page-size is {self.page_size}, must be at least 1 token")
        if self.kv_cache_memory is not None and self.kv_cache_memory < 1:
            raise ValueError(f"--kv-cache-memory is {self.kv_cache_memory}, must be at least 1 byte")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(
                f"--gpu-memory-utilization is {self.gpu_memory_utilization:g}, must be above 0 and at most 1"
            )
        if self.image_cache_memory < 0:
            raise ValueError(f"--image-cache-memory is {self.image_cache_memory}, must be at least 0 bytes")
        if self.host_cache_memory is not None and self.host_cache_memory < 1:
            raise ValueError(f"--host-cache-memory is {self.host_cache_memory}, must be at least 1 byte")


MOST_OUTPUT = 10_000_000.0  # tokens
MOST_SPEED = 1e6


@dataclass(frozen=True, slots=True)
class SimulationSettings:
    """Settings of simulated engines, `--model sim:NAME`."""

    speed: float = field(
        default=1.0,
        metadata={
            "flag": "--sim-speed",
            "help": "How many times faster than the profile says steps are: 10 takes a tenth of the time, 0.5 twice.",
        },
    )
    output_tokens: float = field(
        default=256.0,
        metadata={
            "flag": "--sim-output-tokens",
            "help": "Mean length of outputs that no max_tokens ends before, lognormal. 0: there is no end token, and "
            "each output goes on to its max_tokens.",
        },
    )
    faults: str | None = field(
        default=None,
        metadata={
            "flag": "--sim-faults",
            "help": "JSON file of faults that engines have at given times, as `quire simulate --faults` reads it: "
            '{"at": seconds, "kind": "kill", "slow" or "stall", "engine": number}, of slow ones "seconds" and '
            '"factor", of stalls "seconds". Unset: none.',
        },
    )

    def __post_init__(self) -> None:
        if not 1 / MOST_SPEED <= self.speed <= MOST_SPEED:
            raise ValueError(f"--sim-speed is {self.speed}, must be in [{1 / MOST_SPEED:g}, {MOST_SPEED:g}]")
        if not (self.output_tokens == 0 or 1 <= self.output_tokens <= MOST_OUTPUT):
            raise ValueError(f"--sim-output-tokens is {self.output_tokens}, must be 0 or in [1, {MOST_OUTPUT:g}]")
