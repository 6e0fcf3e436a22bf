"""Compiles kernels for GPUs that are not here, and says what came out."""

import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

Device = int | str
"""90: NVIDIA's of compute capability 9.0. gfx942: AMD's of this name."""
DISASSEMBLER = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


@dataclass(frozen=True)
class Compiled:
    """Code of a kernel, as the device runs it.

    Attributes:
        assembly: PTX, or AMD's assembly.
        registers: Registers of a thread.
        spilled: Bytes of a thread that lie in memory because no register is left for them.
        spilled_in_loops: Instructions of innermost loops that load or store such bytes.
        shared: Bytes of shared memory of a program.
    """

    assembly: str
    registers: int
    spilled: int
    spilled_in_loops: int
    shared: int


def compile_for(
    device: Device,
    kernel: Any,
    types: Mapping[str, str],
    constants: Mapping[str, Any],
    aligned: tuple[str, ...] = (),
    warps: int = 4,
    stages: int = 3,
    registers: int | None = None,
) -> Compiled:
    """Compiles a kernel.

    Args:
        device: Kind of GPU.
        kernel: The kernel.
        types: Types of arguments that are no constants, "*fp16" for an array.
        constants: The other arguments.
        aligned: Integers that are multiples of 16, as all arrays are whose alignment the kernel's compiler is told.
        warps: Triton's num_warps.
        stages: Triton's num_stages.
        registers: Most registers of a thread, on NVIDIA's devices. None: as many as there are.
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
    options = {"num_warps": warps, "num_stages": stages}
    if isinstance(device, str):
        made = triton.compile(source, target=GPUTarget("hip", device, 64), options=options)
        return Compiled(made.asm["amdgcn"], *_of_amd(made.asm["amdgcn"]), made.metadata.shared)
    made = triton.compile(source, target=GPUTarget("cuda", device, 32), options=options | {"maxnreg": registers})
    return Compiled(made.asm["ptx"], *_of_nvidia(made.asm["cubin"]), made.metadata.shared)


def _of_nvidia(cubin: bytes) -> tuple[int, int, int]:
    """Returns registers, bytes spilled, and instructions of innermost loops that spill."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        registers, stack = re.findall(r"REG:(\d+) STACK:(\d+)", _disassembled(file.name, "-res-usage"))[-1]
        spilled_in_loops = _spilled_in_loops(_disassembled(file.name, "-sass")) if int(stack) else 0
    return int(registers), int(stack), spilled_in_loops


def _disassembled(file: str, option: str) -> str:
    command = [str(DISASSEMBLER), option, file]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout


def _spilled_in_loops(code: str) -> int:
    lines = [(int(at, 16), text) for at, text in re.findall(r"^\s*/\*([0-9a-f]{4,})\*/\s+(.*?);", code, re.MULTILINE)]
    jumps = [(at, int(to[1], 16)) for at, text in lines if (to := re.search(r"\bBRA\b.*?0x([0-9a-f]+)", text))]
    return _in_innermost_loops([at for at, text in lines if re.search(r"\b(LDL|STL)\b", text)], jumps)


def _of_amd(assembly: str) -> tuple[int, int, int]:
    """Returns registers, bytes spilled, and instructions of innermost loops that spill."""
    registers, spilled = (
        int(re.findall(rf"^\s*\.{name}:\s+(\d+)$", assembly, re.MULTILINE)[-1])
        for name in ("vgpr_count", "private_segment_fixed_size")
    )
    lines = assembly.splitlines()
    labels = {line.split(":")[0]: at for at, line in enumerate(lines) if line.startswith(".LBB")}
    jumps = [(at, labels[to[1]]) for at, line in enumerate(lines) if (to := re.search(r"branch\w*\s+(\.LBB\w+)", line))]
    spills = [at for at, line in enumerate(lines) if re.match(r"\s+scratch_(load|store)", line)]
    return registers, spilled, _in_innermost_loops(spills, jumps)


def _in_innermost_loops(places: Sequence[int], jumps: Sequence[tuple[int, int]]) -> int:
    """Returns how many of the places lie in a loop that has no loop in it.

    Args:
        places: Places in the code.
        jumps: Place of each branch, and the place that it goes to. A branch back ends a loop.
    """
    loops = {(to, at) for at, to in jumps if to < at}
    innermost = [
        (start, end)
        for start, end in loops
        if not any((start, end) != other and start <= other[0] and other[1] <= end for other in loops)
    ]
    return sum(any(start <= place <= end for start, end in innermost) for place in places)
