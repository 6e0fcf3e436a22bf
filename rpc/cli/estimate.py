"""`quire estimate`: the arithmetic of a model's KV cache and weights, from config.json alone."""

import json
from pathlib import Path

from rich.console import Console
from rich.table import Table

from model.config import read_config
from model.footprint import weight_bytes
from model.memory import HOST_FRACTION, free_host_bytes
from model.settings import ModelSettings


def estimate(directory: Path, settings: ModelSettings, length: int | None = None) -> dict[str, int | str | None]:
    """What `show` prints. Raises CheckpointError, ValueError."""
    config, page_size, memory = read_config(directory), settings.page_size, settings.kv_cache_memory
    weights_dtype = config.dtype if settings.dtype == "auto" else settings.dtype
    dtype = weights_dtype if settings.kv_cache_dtype == "auto" else settings.kv_cache_dtype
    length = config.context if length is None else length
    if not 1 <= length <= config.context:
        raise ValueError(f"--length is {length}, the model's context is {config.context} tokens")
    layout = config.kv_layout(page_size, dtype)
    weights = weight_bytes(config, weights_dtype, settings.quantization)
    memory = max(0, int((free_host_bytes() - weights) * HOST_FRACTION)) if memory is None else memory
    pages = memory // layout.page_bytes
    a_sequence = layout.pages_for(length, ahead=1)  # as it is decoded
    return {
        "architecture": config.architecture,
        "quantization": settings.quantization,
        "weight_bytes": weights,
        "dtype": dtype,
        "page_size": page_size,
        "bytes_a_token": layout.token_bytes,
        "bytes_a_page": layout.page_bytes,
        "memory_bytes": memory,
        "pages": pages,
        "tokens": layout.tokens_in(pages),
        "sequence_tokens": length,
        "sequence_pages": a_sequence,
        "sequence_bytes": a_sequence * layout.page_bytes,
        "sequences": pages // a_sequence,
    }


LABELS = {
    "architecture": "Architecture",
    "quantization": "Quantization",
    "weight_bytes": "Weights (bytes)",
    "dtype": "KV dtype",
    "page_size": "Page size (tokens)",
    "bytes_a_token": "KV bytes a token",
    "bytes_a_page": "KV bytes a page",
    "memory_bytes": "Memory for KV (bytes)",
    "pages": "Pages",
    "tokens": "Tokens in all",
    "sequence_tokens": "Sequence length (tokens)",
    "sequence_pages": "Pages a sequence",
    "sequence_bytes": "Bytes a sequence",
    "sequences": "Such sequences that fit",
}


def show(directory: Path, settings: ModelSettings, length: int | None, as_json: bool) -> None:
    values = estimate(directory, settings, length)
    if as_json:
        print(json.dumps(values))
        return
    table = Table(title=f"KV cache of {directory.name}", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for key, label in LABELS.items():
        value = values[key]
        table.add_row(label, f"{value:,}" if isinstance(value, int) else value or "none")
    Console().print(table)
