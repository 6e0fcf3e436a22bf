"""`quire estimate`: computes the size of a model's KV cache and weights from config.json alone."""

import json
from pathlib import Path

from rich.console import Console
from rich.table import Table

from model.config import read_config
from model.footprint import weight_bytes
from model.memory import HOST_FRACTION, free_host_bytes
from model.settings import ModelSettings
from rpc.cli.options import UNITS
from rpc.paths import model_name


def estimate(directory: Path, settings: ModelSettings, length: int | None = None) -> dict[str, int | str | None]:
    """Returns the sizes that `show` prints.

    Args:
        directory: Folder of the model.
        settings: Types, page size and memory.
        length: Tokens of a sequence; None takes the model's context.

    Raises:
        CheckpointError: config.json cannot be read, or the model cannot be served.
        ValueError: `length` is outside the model's context.
    """
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
    a_sequence = layout.pages_for(length, ahead=1)  # while it decodes, one token at a time
    return {
        "model": model_name(settings.model, directory),
        "architecture": config.architecture,
        "quantization": settings.quantization or config.stored_format or None,
        "weight_bytes": weights,
        "dtype": dtype,
        "page_size": page_size,
        "bytes_a_token": layout.token_bytes,
        "bytes_a_page": layout.page_bytes,
        "state_bytes": layout.states.pages * layout.page_bytes,
        "checkpoint_tokens": layout.interval,
        "memory_bytes": memory,
        "pages": pages,
        "tokens": layout.tokens_in(pages),
        "sequence_tokens": length,
        "sequence_pages": a_sequence,
        "sequence_bytes": a_sequence * layout.page_bytes,
        "sequences": pages // a_sequence,
    }


LABELS = {
    "model": "Model",
    "architecture": "Architecture",
    "quantization": "Quantization",
    "weight_bytes": "Weights",
    "dtype": "KV dtype",
    "page_size": "Page size (tokens)",
    "bytes_a_token": "KV of a token",
    "bytes_a_page": "KV of a page",
    "state_bytes": "Recurrent state of a sequence",
    "checkpoint_tokens": "Tokens between checkpoints of it",
    "memory_bytes": "Memory for KV",
    "pages": "Pages",
    "tokens": "Tokens in all",
    "sequence_tokens": "Sequence length (tokens)",
    "sequence_pages": "Pages a sequence",
    "sequence_bytes": "KV of a sequence",
    "sequences": "Such sequences that fit",
}


def show(directory: Path, settings: ModelSettings, length: int | None, as_json: bool) -> None:
    """Prints the sizes as a table or as JSON. Raises as `estimate`."""
    values = estimate(directory, settings, length)
    if as_json:
        print(json.dumps(values))
        return
    table = Table(title=f"Memory of {values['model']}", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for key, label in LABELS.items():
        if key in ("state_bytes", "checkpoint_tokens") and not values[key]:
            continue
        table.add_row(label, _shown(key, values[key]))
    Console().print(table)


def _shown(key: str, value: int | str | None) -> str:
    if not isinstance(value, int):
        return value or "none"
    return f"{value:,} bytes, {binary(value)}" if "bytes" in key else f"{value:,}"


def binary(size: int) -> str:
    """Returns a number of bytes in the largest unit that it fills: "16.0 GiB"."""
    unit = next((unit for unit in ("TiB", "GiB", "MiB", "KiB") if size >= UNITS[unit[0]]), None)
    return f"{size} B" if unit is None else f"{size / UNITS[unit[0]]:.1f} {unit}"
