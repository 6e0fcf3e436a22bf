"""Figures of the compiled code of Quire's own products: attention, and mixtures of experts.

The launches of a decode and of a prompt are compiled for compute capability 9.0, and disassembled. A tile is one round
of the innermost loop that has matrix products.
"""

import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton

from bench.gpu_ledger.cases import CLOCK, ISSUED, LLAMA_8B, MULTIPROCESSORS, QWEN_30B, Device, LedgerModel, Regime
from bench.gpu_ledger.fake_driver import fake_driver
from bench.gpu_ledger.steps import META, LedgerEngine, decoder_of, shape_of_step
from model.gpu.expert_weights import TILES, WIDE, PlainExperts
from model.gpu.mixtures import KernelExperts, mixtures_of

DATA = Path(__file__).parents[1] / "results/gpu_ledger/code.json"
TOOL = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(.*?);", re.MULTILINE)
BRANCH = re.compile(r"\bBRA\b.*?0x([0-9a-f]+)")
MULTIPLIES = re.compile(r"\b(HMMA|HGMMA|IMMA|QGMMA)\b")
STEPS = (Regime(64, 1024, 1), Regime(1, 0, 2048))
MIXTURE_TOKENS = (1, 64, 256, 512, 2048)
"""Tokens of mixtures, of which each takes another size of tiles, the first without an order."""


@dataclass(frozen=True, slots=True)
class Code:
    """Compiled code of a kernel.

    Attributes:
        kernel: Kernel and its tile.
        warps: Warps of a program.
        registers: Registers of a thread.
        stack: Bytes of a thread that do not fit in registers.
        shared: Bytes of shared memory of a program.
        instructions: Instructions of a warp for a tile.
        bytes: Bytes of a tile that are loaded.
        operations: Operations of a tile's products, of empty rows too.
    """

    kernel: str
    warps: int
    registers: int
    stack: int
    shared: int
    instructions: int
    bytes: int
    operations: int

    def reading(self, device: Device) -> float:
        """Seconds that a multiprocessor's part of the memory's rate takes for a tile."""
        return self.bytes / device.memory * MULTIPROCESSORS

    @property
    def issuing(self) -> float:
        """Seconds that a multiprocessor takes to issue a tile's instructions."""
        return self.instructions * self.warps / ISSUED / CLOCK

    def multiplying(self, device: Device) -> float:
        """Seconds that its matrix units take for a tile."""
        return self.operations / device.multiply * MULTIPROCESSORS


def compiled() -> list[Code]:
    """Compiles the kernels."""
    found: dict[str, Code] = {}
    with torch.inference_mode():
        with fake_driver(partial(_see, found, "attend_pieces")):
            for model in (LLAMA_8B, QWEN_30B):
                engine = LedgerEngine.of(model, 1, lambda work: work, None)
                for regime in STEPS:
                    engine.run(regime, shape_of_step(regime))
        with fake_driver(partial(_see, found, "multiply_experts")):
            for mixture in _mixtures(QWEN_30B):
                for tokens in MIXTURE_TOKENS:
                    mixture(torch.empty((tokens, mixture.first.inputs), dtype=torch.bfloat16, device=META))
    return sorted(found.values(), key=lambda one: (one.kernel.split()[0].strip(":,"), one.operations))


def _see(found: dict[str, Code], wanted: str, kernel: Any, made: Any, given: dict[str, Any]) -> None:
    """Reads the code of a launch of the kernel `wanted`, if it has programs."""
    if kernel.__name__ != wanted or 0 in given["grid"]:
        return
    name, size, operations = TILE[wanted](given)
    if name not in found:
        usage, instructions = _read(made.asm["cubin"])
        found[name] = Code(name, made.metadata.num_warps, *usage, made.metadata.shared, instructions, size, operations)


def write(found: list[Code]) -> None:
    DATA.parent.mkdir(exist_ok=True)
    content = {"triton": triton.__version__, "kernels": [asdict(one) for one in found]}
    DATA.write_text(json.dumps(content, indent=1) + "\n")


def read() -> tuple[str, list[Code]]:
    """Returns the version of Triton of the last compilation, and its figures."""
    content = json.loads(DATA.read_text())
    return content["triton"], [Code(**one) for one in content["kernels"]]


def _mixtures(model: LedgerModel) -> Iterator[KernelExperts]:
    """Yields the mixture of a layer, with the sizes of tiles of a device that has the shared memory for them."""
    for mixture in mixtures_of(decoder_of(model, 1)):
        first, down = mixture.first, mixture.down
        if isinstance(first, PlainExperts) and isinstance(down, PlainExperts):
            tiles = (*TILES[:-1], WIDE)
            yield replace(mixture, first=replace(first, tiles=tiles), down=replace(down, tiles=tiles))


def _attention_tile(given: dict[str, Any]) -> tuple[str, int, int]:
    rows, keys, dim = given["TILE_TOKENS"] * given["TILE_HEADS"], given["TILE_KEYS"], given["HEAD_DIM"]
    heads = given["HEADS_PER_KV"]
    tokens = "a token" if given["TILE_TOKENS"] * heads < rows or rows == 16 else "many tokens"
    name = f"attention of {tokens}, {heads} heads a KV head: {rows} rows, {keys} keys"
    return name, 2 * keys * dim * given["keys"].itemsize, 4 * rows * keys * dim


def _expert_tile(given: dict[str, Any]) -> tuple[str, int, int]:
    rows, outputs, inputs = given["ROWS"], given["OUTS"], given["INNER"]
    name = f"experts{', a place a tile' if given['DIRECT'] else ''}: {rows} rows, {outputs} outputs, {inputs} inputs"
    loaded = (outputs + (1 if given["DIRECT"] else rows)) * inputs * given["x"].itemsize
    return name, loaded, 2 * rows * outputs * inputs


TILE = {"attend_pieces": _attention_tile, "multiply_experts": _expert_tile}
"""Kernel to a function of its arguments: a tile's name, bytes and operations."""


def _read(cubin: bytes) -> tuple[tuple[int, int], int]:
    """Returns registers and stack of a thread, and the instructions of a tile."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage, code = (
            subprocess.run([TOOL, option, file.name], capture_output=True, text=True, check=True, timeout=120).stdout
            for option in ("-res-usage", "-sass")
        )
    registers, stack = re.findall(r"REG:(\d+) STACK:(\d+)", usage)[-1]
    return (int(registers), int(stack)), loop_length(code)


def loop_length(code: str) -> int:
    """Returns the instructions of the smallest loop with matrix products. Raises ValueError where there is none."""
    lines = [(int(at, 16), text) for at, text in INSTRUCTION.findall(code)]
    loops = []
    for at, text in lines:
        to = BRANCH.search(text)
        if to is None or int(to[1], 16) >= at:
            continue
        body = [text for place, text in lines if int(to[1], 16) <= place <= at]
        if any(MULTIPLIES.search(text) for text in body):
            loops.append(len(body))
    if not loops:
        raise ValueError("the code has no loop with matrix products")
    return min(loops)
