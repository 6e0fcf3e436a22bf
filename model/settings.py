"""Settings of the model and its KV pool."""

from dataclasses import dataclass

DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """model: a directory, or a name on the Hugging Face hub. kv_cache_memory: bytes; None takes a part of what is free.

    poison_freed_pages: fill freed pages with NaN, so that a stale read shows (slow; for debugging).
    """

    model: str
    dtype: str = "auto"
    device: str = "auto"
    page_size: int = 16
    kv_cache_memory: int | None = None
    poison_freed_pages: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"--dtype is {self.dtype!r}, must be one of {', '.join(DTYPES)}")
        if self.page_size < 1:
            raise ValueError(f"--page-size is {self.page_size}, must be at least 1 token")
        if self.kv_cache_memory is not None and self.kv_cache_memory < 1:
            raise ValueError(f"--kv-cache-memory is {self.kv_cache_memory}, must be at least 1 byte")
