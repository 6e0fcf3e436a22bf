"""Opens mutated GGUF files, each in a process with limits: `python -m tests.model.gguf.hostile BASE FIRST COUNT`.

BASE: a small valid checkpoint. Seeds FIRST to FIRST + COUNT - 1 each change its file in one way. Prints a line of JSON
for each, as `tests.model.hostile` does.
"""

import json
import math
import os
import random
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gguf import GGMLQuantizationType as Kind
from gguf import GGUFValueType as Type
from gguf import GGUFWriter
from gguf.gguf_writer import GGUFValue

from tests.model.gguf.kinds import all_in
from tests.model.gguf.writer import Conversion
from tests.model.hostile import TEMPLATES, open_checkpoint, outcome_of

NUMBERS = [0, 1, 2, 3, 7, 2**8, 2**16, 2**20, 2**22, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**64 - 1]
VALUES: list[tuple[Any, Type]] = [
    *((number, Type.UINT64) for number in NUMBERS), (-1, Type.INT32), (-(2**63), Type.INT64), (True, Type.BOOL),
    (math.nan, Type.FLOAT32), (math.inf, Type.FLOAT64), (-1.0, Type.FLOAT32), (1e-38, Type.FLOAT32),
    ("", Type.STRING), ("x", Type.STRING), ("\x1b[2J\0", Type.STRING), ("x" * 1_000_000, Type.STRING),
    ([1, 2], Type.ARRAY), (["a", "a"], Type.ARRAY), ([0.5] * 320, Type.ARRAY),
    ([1 << 20] * 3, Type.ARRAY), (["x" * 100_000], Type.ARRAY), ([str(i) for i in range(100_000)], Type.ARRAY),
    ([math.nan] * 320, Type.ARRAY), ([-1] * 320, Type.ARRAY), (["\ud7ff x"] * 9, Type.ARRAY),
]  # fmt: skip
NAMES: dict[str, list[str]] = {
    "general.architecture": ["qwen3moe", "gpt2", "falcon", "gemma3", "phi3", "bert", "", "llama\0", "x" * 10_000],
    "tokenizer.ggml.model": ["llama", "bert", "t5", ""],
    "tokenizer.ggml.pre": ["default", "llama-bpe", "qwen2", "deepseek-llm", "\0"],
    "tokenizer.chat_template": TEMPLATES,
    "llama.rope.scaling.type": ["yarn", "linear", "longrope", "x"],
}

Change = Callable[[random.Random, Conversion, Path], str]


def change_value(chance: random.Random, base: Conversion, path: Path) -> str:
    """Puts an extreme under a key, or leaves it out."""
    said = ""

    def more(writer: GGUFWriter) -> None:
        nonlocal said
        key = chance.choice(
            [*writer.kv_data[0], "general.alignment", "llama.expert_count", "llama.rope.scaling.factor"]
        )
        if chance.random() < 0.1:
            writer.kv_data[0].pop(key, None)
            said = f"without {key}"
            return
        value, kind = chance.choice(VALUES)
        writer.kv_data[0][key] = GGUFValue(value, kind)
        said = f"{key} = {str(value)[:40]} of {kind.name}"

    base.write(path, more)
    return said


def change_name(chance: random.Random, base: Conversion, path: Path) -> str:
    key = chance.choice(list(NAMES))
    value = chance.choice(NAMES[key])
    base.write(path, lambda writer: writer.kv_data[0].update({key: GGUFValue(value, Type.STRING)}))
    return f"{key} = {value[:40]!r}"


def header_of(data: bytes) -> int:
    """The place behind the last name of a tensor."""
    return data.rfind(b"output_norm.weight") + 60


def change_bytes(chance: random.Random, base: Conversion, path: Path) -> str:
    base.write(path)
    data = bytearray(path.read_bytes())
    for _ in range(chance.randint(1, 8)):
        data[chance.randrange(chance.choice([24, 600, header_of(data)]))] = chance.randrange(256)
    path.write_bytes(data)
    return "bytes"


def change_number(chance: random.Random, base: Conversion, path: Path) -> str:
    """Puts an extreme number behind a name: in a length, a type, a dimension, an offset."""
    base.write(path)
    data = bytearray(path.read_bytes())
    name = chance.choice(list(base.stored)) if chance.random() < 0.7 else chance.choice(["llama.block_count", "tokens"])
    size, ahead = chance.choice([4, 8]), chance.choice([-8, 0, 4, 8, 12, 16, 20, 24, 28, 32])
    place, number = data.rfind(name.encode()) + (len(name) if ahead >= 0 else 0) + ahead, chance.choice(NUMBERS)
    data[place : place + size] = (number % 2 ** (8 * size)).to_bytes(size, "little")
    path.write_bytes(data)
    return f"{number} in {size} bytes, {ahead} behind {name}"


def change_length(chance: random.Random, base: Conversion, path: Path) -> str:
    """Cuts the file, or takes out, doubles or adds some bytes."""
    base.write(path)
    data = path.read_bytes()
    start = chance.randrange(chance.choice([40, header_of(data), len(data)]))
    stop = start + chance.choice([1, 4, 8, 100])
    kind = chance.choice(["cut", "out", "twice", "sparse", "empty"])
    made = {
        "cut": data[:start], "out": data[:start] + data[stop:], "twice": data[:stop] + data[start:], "sparse": data,
        "empty": b"",
    }[kind]  # fmt: skip
    path.write_bytes(made)
    if kind == "sparse":
        os.truncate(path, 2**31)
    return f"{kind} at {start}"


def change_tensors(chance: random.Random, base: Conversion, path: Path) -> str:
    """Names a tensor as another one, or leaves one out, or gives it another type or shape."""
    one, other = chance.sample(list(base.stored), 2)
    kind = chance.choice(["renamed", "out", "swapped", "type"])
    stored = dict(base.stored)
    if kind == "renamed":
        stored[chance.choice(["x", "blk.9999.attn_q.weight", "blk.00.attn_q.weight", "\x1b", "a" * 60])] = stored.pop(
            one
        )
    elif kind == "out":
        del stored[one]
    elif kind == "swapped":
        stored[one], stored[other] = stored[other], stored[one]
    else:
        stored[one] = stored[one][0], chance.choice([Kind.I8, Kind.IQ2_XXS, Kind.F64, Kind.F16, Kind.Q8_0, Kind.MXFP4])
    whole, base.stored = base.stored, stored
    try:
        base.write(path)
    except ValueError:  # the writer's own check
        path.write_bytes(b"GGUF")
    base.stored = whole
    return f"{kind} {one}"


def change_parts(chance: random.Random, base: Conversion, path: Path) -> str:
    """A model in several files that do not belong together."""
    base.write(path, parts=chance.choice([4, 9]))
    parts = sorted(path.parent.glob("model-*.gguf"))
    one, other = chance.sample(parts, 2)
    kind = chance.choice(["gone", "linked", "swapped", "renamed", "cut", "whole", "sound"])
    match kind:
        case "gone":
            one.unlink()
        case "linked":
            one.unlink()
            one.symlink_to(other.name)
        case "swapped":
            content = one.read_bytes()
            one.write_bytes(other.read_bytes())
            other.write_bytes(content)
        case "renamed":
            one.rename(one.with_name("model-00001-of-00002.gguf"))
        case "cut":
            one.write_bytes(one.read_bytes()[: chance.randrange(2000)])
        case "whole":
            base.write(path)
            one.write_bytes(path.read_bytes())
            path.unlink()
    return f"{kind} {one.name} {other.name}"


CHANGES: list[Change] = [
    change_value, change_value, change_value, change_name, change_bytes, change_number, change_number, change_length,
    change_tensors, change_parts,
]  # fmt: skip


def main() -> None:
    import torch

    torch.set_num_threads(1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    source, first, count = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    base = Conversion(source, all_in(Kind.Q8_0))
    sound = source / "sound.gguf"
    base.write(sound)
    open_checkpoint(sound, tries_tokenizer=False)  # which imports all, so that forks need not
    for seed in range(first, first + count):
        with tempfile.TemporaryDirectory() as place:
            path, change = Path(place) / "model.gguf", CHANGES[seed % len(CHANGES)]
            changes = change(random.Random(seed), base, path)
            parts = sorted(Path(place).glob("model-00001-*.gguf"))
            outcome, message = outcome_of(parts[0] if parts else path, tries_tokenizer=change is change_value)
        said = {"seed": seed, "changes": f"{change.__name__}: {changes}", "outcome": outcome, "message": message}
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
