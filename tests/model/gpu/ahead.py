"""Compiles kernels for GPUs that are not here, and says what came out."""

import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

ASSEMBLER = Path(triton.__file__).parent / "backends/nvidia/bin"


@dataclass(frozen=True)
class Compiled:
    """registers: of a thread. spilled: bytes that go through memory instead, loads and stores. shared: bytes."""

    assembly: str
    registers: int
    spilled: int
    shared: int


def compile_for(
    capability: int,
    kernel: Any,
    types: Mapping[str, str],
    constants: Mapping[str, Any],
    aligned: tuple[str, ...] = (),
    warps: int = 4,
    stages: int = 3,
) -> Compiled:
    """types: of arguments that are no constants, "*fp16" for an array. aligned: integers that are multiples of 16, as
    all arrays are whose alignment the kernel's compiler is told. capability: 90 for 9.0.
    """
    names = kernel.arg_names
    assert set(names) == types.keys() | constants.keys(), set(names) ^ (types.keys() | constants.keys())
    signature = {name: types.get(name, "constexpr") for name in names}
    untold = {one.name for one in kernel.params if one.do_not_specialize_on_alignment}
    whole = [name for name in names if (signature[name].startswith("*") and name not in untold) or name in aligned]
    source = ASTSource(
        kernel,
        signature,
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in whole},
    )
    made = triton.compile(
        source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps, "num_stages": stages}
    )
    return Compiled(made.asm["ptx"], *_assembled(made.asm["ptx"]), made.metadata.shared)


def _assembled(assembly: str) -> tuple[int, int]:
    """Registers and bytes spilled. The assembler for the newest devices knows all, and the newest assembly."""
    found = re.search(r"^\.target (\w+)", assembly, re.MULTILINE)
    assert found is not None
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as source:
        source.write(assembly)
        source.flush()
        said = subprocess.run(
            [_newest(), "-v", f"--gpu-name={found[1]}", "-o", "/dev/null", source.name],
            capture_output=True, text=True, check=True, timeout=120,
        ).stderr  # fmt: skip
    spills = re.findall(r"(\d+) bytes spill", said)
    (registers,) = re.findall(r"Used (\d+) registers", said)
    return int(registers), sum(map(int, spills))


def _newest() -> str:
    blackwell = ASSEMBLER / "ptxas-blackwell"
    return str(blackwell if blackwell.exists() else ASSEMBLER / "ptxas")
