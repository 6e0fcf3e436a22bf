"""Compiles kernels for this CPU, and caches object code for the next start.

Object code lies in a directory that only its owner may write to. A file's name covers everything that the code was made
from: the source of this package, the CPU with its features, the LLVM that compiled it.
"""

import fcntl
import hashlib
import logging
import os
import platform
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import llvmlite
import llvmlite.binding as llvm

from model.cpu.kernels.code import Code
from model.cpu.kernels.tiles import may_use_tiles

log = logging.getLogger("quire.kernels")

DIGEST_BYTES = 32  # SHA-256 of the rest, at the beginning of a file

Writer = Callable[[Code], None]


class Compiler:
    """Compiles kernels, and finds their addresses by name.

    Attributes:
        made_from: Digest of everything that object code and its results depend on.
        compiled: The number of kernels that were compiled, not loaded from the cache.
        has_tiles: Whether the CPU has matrix registers with products of bfloat16 (AMX), which Linux lets it use.
    """

    def __init__(self, cache: Path | None) -> None:
        """Opens LLVM's compiler.

        Args:
            cache: Directory for object code. None keeps none.
        """
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        llvm.initialize_native_asmparser()
        self._cpu, self._features = llvm.get_host_cpu_name(), llvm.get_host_cpu_features()
        self._machine = llvm.Target.from_default_triple().create_target_machine(
            cpu=self._cpu, features=self._features.flatten(), opt=3
        )
        self._engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), self._machine)
        self._cache = _private(cache) if cache is not None else None
        has_tiles = all(self._features.get(one, False) for one in ("amx-tile", "amx-bf16"))
        self.has_tiles = has_tiles and may_use_tiles()
        self.made_from = _digest(
            _source(), self._cpu, self._features.flatten(), str(self.has_tiles), llvmlite.__version__
        )
        self._addresses: dict[str, int] = {}
        self.compiled = 0
        self._compiling, self._compiled_at = False, 0.0

    @property
    def last_compiled(self) -> float:
        """Time of the last compilation on the monotonic clock; read from any thread.

        While a kernel is being compiled, here or by a process that is waited for, this is the current time. 0 before
        the first.
        """
        return time.monotonic() if self._compiling else self._compiled_at

    @property
    def has_pairs(self) -> bool:
        """Whether the CPU has a product of bfloat16 pairs."""
        return bool(self._features.get("avx512bf16", False))

    @property
    def has_octets(self) -> bool:
        """Whether the CPU has a product of four bytes (AVX512-VNNI)."""
        return bool(self._features.get("avx512vnni", False))

    def kernel(self, name: str, write: Writer) -> int:
        """Returns the address of a kernel, compiled or loaded. Its name covers everything that `write` depends on."""
        if name not in self._addresses:
            self._addresses[name] = self._load(name, write)
        return self._addresses[name]

    def _load(self, name: str, write: Writer) -> int:
        file = f"{name}-{self.made_from}.o"
        found = self._read(file)
        if found is None:
            self._compiling = True
            try:
                with self._claimed(file):
                    found = self._read(file)  # again: another rank may have compiled it meanwhile
                    if found is None:
                        code = Code(name, self.has_pairs)
                        write(code)
                        found = self.compile(code.finished())
                        self._write(file, found)
            finally:
                self._compiled_at, self._compiling = time.monotonic(), False
        self._engine.add_object_file(llvm.ObjectFileRef.from_data(found))
        self._engine.finalize_object()
        address = int(self._engine.get_function_address(name))
        if not address:
            raise OSError(f"kernel {name} was compiled, but is not there")
        return address

    def compile(self, text: str) -> bytes:
        if not self.compiled:
            kept = f", kept in {self._cache}" if self._cache is not None else ""
            log.info("compiling kernels for this CPU (%s)%s", self._cpu, kept)
        self.compiled += 1
        module = llvm.parse_assembly(text)
        module.verify()
        # Kernels unroll and vectorise explicitly. All passes of level 3 take four times as long and make none faster
        # (bench.roofline's shapes in bfloat16, int8 and int4 on a Zen 4).
        passes = llvm.create_new_module_pass_manager()
        passes.add_sroa_pass()
        passes.add_simplify_cfg_pass()
        passes.add_new_gvn_pass()
        passes.add_loop_rotate_pass()
        passes.add_instruction_combine_pass()
        passes.add_simplify_cfg_pass()
        passes.run(module, llvm.create_pass_builder(self._machine, llvm.create_pipeline_tuning_options()))
        return bytes(self._machine.emit_object(module))

    @contextmanager
    def _claimed(self, file: str) -> Iterator[None]:
        """Locks a file of object code: ranks need the same kernels at the same time, and one compiles for all.

        Locks nothing where kernels are not kept. The end of a process unlocks its files.
        """
        descriptor = None
        if self._cache is not None:
            with suppress(OSError):  # `_write` warns
                descriptor = os.open(self._cache / file, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            if descriptor is not None:
                with suppress(OSError):  # a file system without locks: each rank compiles
                    fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            if descriptor is not None:
                os.close(descriptor)

    def _read(self, file: str) -> bytes | None:
        """Reads object code.

        None too for a file that was cut off or has changed on the disk: LLVM would crash on it.
        """
        if self._cache is None:
            return None
        try:
            content = (self._cache / file).read_bytes()
        except OSError:
            return None
        said, found = content[:DIGEST_BYTES], content[DIGEST_BYTES:]
        return found if hashlib.sha256(found).digest() == said else None

    def _write(self, file: str, content: bytes) -> None:
        """Writes a file atomically, so that other processes may write it at the same time."""
        if self._cache is None:
            return
        try:
            with tempfile.TemporaryDirectory(dir=self._cache) as place:
                temporary = Path(place) / file
                temporary.write_bytes(hashlib.sha256(content).digest() + content)
                temporary.chmod(0o600)
                temporary.rename(self._cache / file)
        except OSError as error:
            log.warning("compiled kernels cannot be kept in %s: %s", self._cache, error)
            self._cache = None


def _source() -> str:
    return "".join(file.read_text(encoding="utf-8") for file in sorted(Path(__file__).parent.glob("*.py")))


def _digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:32]


def _private(directory: Path) -> Path | None:
    """Returns the directory, made if it does not exist.

    None, with a warning, where other users could put code into it.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = directory.stat()
    except OSError as error:
        log.warning("compiled kernels are not kept: %s", error)
        return None
    if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o022:
        log.warning("compiled kernels are not kept: others than you can write to %s", directory)
        return None
    return directory


def why_not() -> str | None:
    """Returns why this machine cannot run kernels, None if it can."""
    if sys.platform != "linux":
        return f"there is no team of threads for {sys.platform}"
    if platform.machine() != "x86_64":
        return f"they have not been tried on {platform.machine()}"
    return None
