"""Compiled kernels are kept for the next start, where no other user can put any."""

import logging
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from llvmlite.binding import FeatureMap

from model.cpu.kernels.attention import write_attention
from model.cpu.kernels.choice import Choice, write_choice, write_sparse_mixer
from model.cpu.kernels.code import Code
from model.cpu.kernels.eight_bit import EIGHT_BITS
from model.cpu.kernels.element import BFLOAT
from model.cpu.kernels.experts import write_experts, write_jobs, write_mixed
from model.cpu.kernels.heads import HeadNorm, write_head_squares, write_heads
from model.cpu.kernels.kv import Heads
from model.cpu.kernels.linear import Epilogue, write_linear
from model.cpu.kernels.logits import write_draw, write_summary
from model.cpu.kernels.mixing import Shape, write_join
from model.cpu.kernels.native import Compiler
from model.cpu.kernels.panels import Int8Panels, PlainPanels
from model.cpu.kernels.program import Call, Machine
from model.cpu.kernels.rows import Norm, write_norm
from model.cpu.kernels.sums import write_sums
from model.cpu.kernels.team import Team
from tests.support.processes import wait_until


def write_number(number: int):  # type: ignore[no-untyped-def]
    """Each thread writes it to its own place."""

    def write(code: Code) -> None:
        (place,) = code.arguments(1)
        code.store(code.integer(number), place + code.thread * 8)

    return write


def run(machine: Machine, name: str, number: int, threads: int) -> list[int]:
    out = torch.zeros(threads, dtype=torch.int64)
    machine.program([Call(name, write_number(number), (out,))]).run(threads)
    return out.tolist()


def test_what_was_compiled_is_found_by_the_next(tmp_path: Path) -> None:
    first = Machine(Compiler(tmp_path / "kernels"), Team())
    assert run(first, "seven", 7, 3) == [7, 7, 7]
    assert first.compiler.compiled == 2  # and what runs programs
    second = Machine(Compiler(tmp_path / "kernels"), Team())
    assert run(second, "seven", 7, 2) == [7, 7]
    assert second.compiler.compiled == 0
    assert all(file.stat().st_mode & 0o777 == 0o600 for file in (tmp_path / "kernels").iterdir())


def test_what_two_need_at_once_is_compiled_by_one(tmp_path: Path) -> None:
    first, second = Compiler(tmp_path), Compiler(tmp_path)
    begun, go_on = threading.Event(), threading.Event()

    def write_slowly(code: Code) -> None:
        begun.set()
        assert go_on.wait(60)
        write_number(7)(code)

    with ThreadPoolExecutor(2) as pool:
        one = pool.submit(first.kernel, "seven", write_slowly)
        assert begun.wait(60)
        other = pool.submit(second.kernel, "seven", write_number(7))
        wait_until(lambda: second.last_compiled > 0, "the other waits")
        go_on.set()
        assert one.result()
        assert other.result()
    assert (first.compiled, second.compiled) == (1, 0)


def test_another_source_or_cpu_is_compiled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Machine(Compiler(tmp_path), Team())
    monkeypatch.setattr("model.cpu.kernels.native._source", lambda: "another")
    assert Machine(Compiler(tmp_path), Team()).compiler.compiled == 1
    monkeypatch.setattr("llvmlite.binding.get_host_cpu_name", lambda: "x86-64-v3")
    assert Machine(Compiler(tmp_path), Team()).compiler.compiled == 1


def test_a_directory_of_others_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tmp_path.chmod(0o777)
    with caplog.at_level(logging.WARNING):
        machine = Machine(Compiler(tmp_path), Team())
    assert "others than you can write to" in caplog.text
    assert list(tmp_path.iterdir()) == []
    assert run(machine, "eight", 8, 2) == [8, 8]


def test_without_a_place_to_keep_them(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        machine = Machine(Compiler(tmp_path / "file" / "kernels"), Team())
    assert "are not kept" in caplog.text
    assert run(machine, "nine", 9, 1) == [9]


def test_all_threads_wait_for_each_other() -> None:
    """Each call adds up what all threads wrote in the one before."""

    def write(code: Code) -> None:
        source, target = code.arguments(2)
        total = code.variable(code.integer(1))
        with code.loop(0, code.threads) as other:
            total.set(total.value + code.held(source + other * 8))
        code.store(total.value, target + code.thread * 8)

    threads, rounds = 4, 20
    buffers = [torch.zeros(threads, dtype=torch.int64) for _ in range(2)]
    calls = [Call("adding", write, (buffers[i % 2], buffers[1 - i % 2])) for i in range(rounds)]
    program = Machine(Compiler(None), Team()).program(calls)
    for _ in range(50):
        buffers[0].zero_()
        program.run(threads)
        assert buffers[0].tolist() == [sum(threads**i for i in range(rounds))] * threads


@pytest.mark.parametrize(
    "damage", [lambda c: b"", lambda c: c[:100], lambda c: c[:-1], lambda c: c[:64] + bytes(len(c))]
)
def test_a_damaged_file_is_compiled_anew(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    Machine(Compiler(tmp_path), Team())
    (file,) = tmp_path.iterdir()
    file.write_bytes(damage(whole := file.read_bytes()))
    again = Machine(Compiler(tmp_path), Team())
    assert again.compiler.compiled == 1
    assert run(again, "ten", 10, 2) == [10, 10]
    assert file.read_bytes() == whole


def test_fewer_threads_than_asked_for_do_not_wait_for_the_others() -> None:
    program = """
import torch
torch.set_num_threads(4)
from tests.support.kernels import the_machine
from tests.model.cpu.kernels.test_native import run
print(run(the_machine(), "eleven", 11, 4))
"""
    limits = os.environ | {"OMP_THREAD_LIMIT": "2", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, env=limits)
    assert done.stdout == "[11, 11, 0, 0]\n", done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("cpu", ["x86-64", "haswell", "skylake-avx512", "znver3"])
def test_no_cpu_needs_a_function_that_is_not_there(cpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """LLVM calls a library for what a CPU cannot do; Python has libm, and no more."""
    monkeypatch.setattr("llvmlite.binding.get_host_cpu_name", lambda: cpu)
    monkeypatch.setattr("llvmlite.binding.get_host_cpu_features", lambda: FeatureMap({}))
    heads = Heads(6, 2, 32, BFLOAT)
    kernels = {
        "attention": write_attention(Shape(heads, 8, listed=True, capped=True)),
        "attention in 8 bits": write_attention(
            Shape(Heads(6, 2, 32, BFLOAT, True, EIGHT_BITS["fp8"]), 1, listed=False, capped=False)
        ),
        "linear": write_linear(PlainPanels(BFLOAT), Epilogue(BFLOAT, bias=True, gated=True, activation="gelu")),
        "int8": write_linear(Int8Panels(BFLOAT), Epilogue(BFLOAT, scaled=True)),
        "sums": write_sums(PlainPanels(BFLOAT)),
        "int8 sums": write_sums(Int8Panels(BFLOAT)),
        "experts": write_experts(
            Int8Panels(BFLOAT), Epilogue(BFLOAT, gated=True, activation="silu", scaled=True), gather=True
        ),
        "choice": write_choice(Choice(True, True, True, 2, True)),
        "sparse mixer": write_sparse_mixer,
        "jobs": write_jobs,
        "mixed": write_mixed(add=True),
        "heads": write_heads(BFLOAT, HeadNorm(Norm()), rows=True),
        "squares of heads": write_head_squares(),
        "int8 heads": write_heads(BFLOAT, None, rows=False, eight_bit=EIGHT_BITS["int8"]),
        "fp8 heads": write_heads(BFLOAT, None, rows=True, eight_bit=EIGHT_BITS["fp8"]),
        "norm": write_norm(Norm(centred=True, bias=True), BFLOAT),
        "draw": write_draw,
        "summary": write_summary,
        "join": write_join(Shape(heads, 1, listed=False, capped=False)),
    }
    compiler = Compiler(None)
    for name, write in kernels.items():
        code = Code(name, compiler.has_pairs)
        write(code)
        needed = set(re.findall(rb"__\w+|fmaf?\b|rintf?\b", compiler.compile(code.finished())))
        assert not {word for word in needed if word.startswith(b"__")}, (name, needed)
