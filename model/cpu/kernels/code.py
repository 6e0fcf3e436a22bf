"""A small language for CPU kernels: Python that runs once and leaves LLVM IR behind.

A Python number, as a shape or the count of a loop that Python unrolls, is a constant of the kernel. A `Value` is known
when the kernel runs. A kernel is a function of three: the address of its arguments, its thread's number, the number of
threads. Addresses and integers have 64 bits.

Invariant: floating-point operations are done as they are written, in their order. LLVM gets no leave to change them.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from llvmlite import ir

from model.cpu.kernels.values import (
    BFLOAT16,
    FLOAT32,
    FLOATS,
    INT8,
    INT32,
    INT64,
    INTS,
    LANES,
    PAIRS,
    POINTER,
    Operand,
    Value,
    Variable,
)


class Code:
    """A kernel while it is written.

    Attributes:
        has_pairs: Whether the CPU has a product of bfloat16 pairs (AVX512-BF16).
    """

    def __init__(self, name: str, has_pairs: bool) -> None:
        self.name, self.has_pairs = name, has_pairs
        self.module = ir.Module(name=name)
        function = ir.Function(self.module, ir.FunctionType(ir.VoidType(), [INT64] * 3), name)
        self.builder = ir.IRBuilder(function.append_basic_block("entry"))
        self._arguments, self.thread, self.threads = (Value(self, value) for value in function.args)

    def finished(self) -> str:
        """Returns the IR of the module."""
        self.builder.ret_void()
        return str(self.module)

    # Numbers

    def integer(self, number: int) -> Value:
        return Value(self, ir.Constant(INT64, number))

    def number(self, number: float) -> Value:
        return Value(self, ir.Constant(FLOAT32, number))

    def floats(self, number: float) -> Value:
        """Returns a number in all lanes."""
        return self.splat(self.number(number))

    def lane_numbers(self) -> Value:
        """Returns 0, 1, 2 ... in 32 bits."""
        return Value(self, ir.Constant(INTS, list(range(LANES))))

    def like(self, value: Value, other: Operand) -> Value:
        """Returns the operand as a value of the other's type."""
        if isinstance(other, Value):
            return other
        kind = value.ir.type
        return Value(self, ir.Constant(kind, [other] * kind.count if isinstance(kind, ir.VectorType) else other))

    def variable(self, first: Value) -> Variable:
        return Variable(self, first)

    # Flow

    @contextmanager
    def loop(self, start: Operand, stop: Operand, step: Operand = 1) -> Iterator[Value]:
        """Loops over numbers from `start` to before `stop`."""
        zero = self.integer(0)
        number, stop = self.variable(self.like(zero, start)), self.like(zero, stop)
        head, body, end = (self.builder.append_basic_block(part) for part in ("head", "body", "end"))
        self.builder.branch(head)
        self.builder.position_at_end(head)
        self.builder.cbranch((number.value < stop).ir, body, end)
        self.builder.position_at_end(body)
        yield number.value
        number.set(number.value + step)
        self.builder.branch(head)
        self.builder.position_at_end(end)

    @contextmanager
    def when(self, condition: Value) -> Iterator[None]:
        with self.builder.if_then(condition.ir):
            yield

    @contextmanager
    def repeat(self, condition: Callable[[], Value]) -> Iterator[None]:
        """Loops while the condition holds, which is computed before each turn."""
        head, body, end = (self.builder.append_basic_block(part) for part in ("head", "body", "end"))
        self.builder.branch(head)
        self.builder.position_at_end(head)
        self.builder.cbranch(condition().ir, body, end)
        self.builder.position_at_end(body)
        yield
        self.builder.branch(head)
        self.builder.position_at_end(end)

    @contextmanager
    def until(self, address: Value, least: Value) -> Iterator[None]:
        """Loops while the number at an address, which other threads may change, is smaller than `least`."""
        head, body, end = (self.builder.append_basic_block(part) for part in ("head", "body", "end"))
        self.builder.branch(head)
        self.builder.position_at_end(head)
        self.builder.cbranch((self.seen(address) < least).ir, body, end)
        self.builder.position_at_end(body)
        yield
        self.builder.branch(head)
        self.builder.position_at_end(end)

    def call(self, address: Value, *values: Value) -> None:
        """Calls a kernel or another function of integers that returns nothing."""
        kind = ir.FunctionType(ir.VoidType(), [value.ir.type for value in values])
        function = self.builder.inttoptr(address.ir, kind.as_pointer())
        self.builder.call(function, [value.ir for value in values])

    def instruct(
        self, name: str, numbers: Sequence[int], address: Value | None = None, stride: Value | None = None
    ) -> None:
        """Issues an instruction of the CPU that returns nothing.

        Args:
            name: LLVM's name of it, after `llvm.x86.`.
            numbers: Its first operands, constants of 8 bits.
            address: The operand after these, an address. None for none.
            stride: The operand after that, an integer. None for none.
        """
        operands = [ir.Constant(INT8, number) for number in numbers]
        if address is not None:
            operands.append(self._pointer(address, 0))
        if stride is not None:
            operands.append(stride.ir)
        function = self._external(f"llvm.x86.{name}", ir.VoidType(), [operand.type for operand in operands])
        self.builder.call(function, operands)

    def external(self, name: str) -> Value:
        """Calls a function of the process without arguments, and returns its result in 32 bits."""
        return Value(self, self.builder.call(self._external(name, INT32, []), []))

    def pause(self) -> None:
        """Hints to the CPU that this thread waits."""
        self.builder.asm(ir.FunctionType(ir.VoidType(), []), "pause", "~{memory}", [], side_effect=True)

    def seen(self, address: Value) -> Value:
        """Loads a number that other threads and processes may change.

        Acquires: everything that they wrote before can be read then.
        """
        return Value(self, self.builder.load_atomic(self._pointer(address, 0), "acquire", 8, typ=INT64))

    def add_atomic(self, address: Value, number: int) -> None:
        """Adds to a number, so that other threads see everything that this one wrote before."""
        self.builder.atomic_rmw("add", self._pointer(address, 0), INT64(number), "seq_cst")

    def claimed(self, counter: Value) -> Value:
        """Increments a counter, and returns its earlier value: the index of the next item of work for this thread."""
        number = self.builder.atomic_rmw("add", self._pointer(counter, 0), INT64(1), "monotonic")
        return Value(self, number)

    def larger(self, a: Value, b: Value) -> Value:
        """Returns the larger of two integers."""
        return self.select(a > b, a, b)

    def smaller(self, a: Value, b: Value) -> Value:
        """Returns the smaller of two integers."""
        return self.select(a < b, a, b)

    def share(self, count: Operand) -> tuple[Value, Value]:
        """Returns this thread's share of `count` items: the first, and the one after the last."""
        count = self.like(self.thread, count)
        return count * self.thread // self.threads, count * (self.thread + 1) // self.threads

    # Memory

    def arguments(self, count: int) -> list[Value]:
        """Returns the first `count` arguments of the kernel."""
        return [self.load(self._arguments, INT64, 8 * i) for i in range(count)]

    def argument_place(self, number: int) -> Value:
        """Returns the address of an argument."""
        return self._arguments + 8 * number

    def load(self, address: Value, kind: ir.Type, offset: int = 0) -> Value:
        """Loads from an address, `offset` bytes on."""
        return Value(self, self.builder.load(self._pointer(address, offset), typ=kind, align=_alignment(kind)))

    def real(self, number: int) -> Value:
        """Returns an argument that is a float."""
        return self.load(self._arguments, FLOAT32, 8 * number)

    def held(self, cell: Value) -> Value:
        """Loads the integer in a cell."""
        return self.load(cell, INT64)

    def store(self, value: Value, address: Value, offset: int = 0) -> None:
        self.builder.store(value.ir, self._pointer(address, offset), align=_alignment(value.ir.type))

    def _pointer(self, address: Value, offset: int) -> ir.Value:
        return self.builder.inttoptr((address + offset if offset else address).ir, POINTER)

    def room(self, size: int) -> Value:
        """Allocates bytes for this thread on the stack, until the kernel ends, and returns their address."""
        with self.builder.goto_entry_block():
            place = self.builder.alloca(ir.ArrayType(INT8, size))
            place.align = 64
            return Value(self, self.builder.ptrtoint(place, INT64))

    def prefetch(self, address: Value, offset: int = 0, cache: int = 1) -> None:
        """Prefetches a cache line, into the first or the second cache of a core.

        By inline assembly: LLVM moves its own prefetches to the front of a block, all at once, where they are useless.
        """
        kind = ir.FunctionType(ir.VoidType(), [POINTER])
        assembly = ir.InlineAsm(kind, f"prefetcht{cache - 1} ($0)", "r", side_effect=True)
        self.builder.call(assembly, [self._pointer(address, offset)])

    # Vectors

    def splat(self, scalar: Value, lanes: int = LANES) -> Value:
        one = ir.Constant(ir.VectorType(scalar.ir.type, lanes), ir.Undefined)
        first = self.builder.insert_element(one, scalar.ir, ir.Constant(INT32, 0))
        return Value(self, self.builder.shuffle_vector(first, one, ir.Constant(ir.VectorType(INT32, lanes), None)))

    def lane(self, vector: Value, number: int) -> Value:
        return Value(self, self.builder.extract_element(vector.ir, ir.Constant(INT32, number)))

    def shuffled(self, vector: Value, lanes: Sequence[int], other: Value | None = None) -> Value:
        """Chooses lanes by number; those of `other` follow those of `vector`."""
        mask = ir.Constant(ir.VectorType(INT32, len(lanes)), list(lanes))
        return Value(self, self.builder.shuffle_vector(vector.ir, (other or vector).ir, mask))

    def select(self, condition: Value, yes: Value, no: Value) -> Value:
        return Value(self, self.builder.select(condition.ir, yes.ir, no.ir))

    def cast(self, value: Value, kind: ir.Type) -> Value:
        """Returns the same bits as another type."""
        return Value(self, self.builder.bitcast(value.ir, kind))

    def widened(self, value: Value, kind: ir.Type) -> Value:
        """Extends an integer to more bits, with its sign."""
        return Value(self, self.builder.sext(value.ir, kind))

    def narrowed(self, value: Value, kind: ir.Type) -> Value:
        """Truncates an integer to fewer bits."""
        return Value(self, self.builder.trunc(value.ir, kind))

    def to_float(self, value: Value) -> Value:
        vector = isinstance(value.ir.type, ir.VectorType)
        return Value(self, self.builder.sitofp(value.ir, FLOATS if vector else FLOAT32))

    def to_float_unsigned(self, value: Value) -> Value:
        return Value(self, self.builder.uitofp(value.ir, FLOATS))

    def to_int(self, value: Value) -> Value:
        """Converts whole numbers in float32 to 32-bit integers."""
        vector = isinstance(value.ir.type, ir.VectorType)
        return Value(self, self.builder.fptosi(value.ir, INTS if vector else INT32))

    def any(self, condition: Value) -> Value:
        """Returns whether the condition holds in a lane."""
        bits = ir.IntType(LANES)
        return Value(self, self.builder.icmp_unsigned("!=", self.builder.bitcast(condition.ir, bits), bits(0)))

    def count(self, condition: Value) -> Value:
        """Returns the number of lanes in which the condition holds."""
        bits = self.builder.zext(self.builder.bitcast(condition.ir, ir.IntType(LANES)), INT64)
        return Value(self, self.builder.ctpop(bits))

    def store_some(self, vector: Value, condition: Value, address: Value) -> None:
        """Stores the lanes in which the condition holds, one after the other."""
        kind = vector.ir.type
        suffix = "f32" if vector.is_float else "i32"
        mask = ir.VectorType(ir.IntType(1), LANES)
        function = self._external(f"llvm.masked.compressstore.v{LANES}{suffix}", ir.VoidType(), [kind, POINTER, mask])
        self.builder.call(function, [vector.ir, self._pointer(address, 0), condition.ir])

    # Arithmetic

    def fma(self, a: Value, b: Value, c: Value) -> Value:
        """Returns a b + c, rounded once."""
        return self._intrinsic("fma", a, b, c)

    def maximum(self, a: Value, b: Operand) -> Value:
        return self._intrinsic("maxnum", a, self.like(a, b))

    def minimum(self, a: Value, b: Operand) -> Value:
        return self._intrinsic("minnum", a, self.like(a, b))

    def absolute(self, a: Value) -> Value:
        return self._intrinsic("fabs", a)

    def root(self, a: Value) -> Value:
        return self._intrinsic("sqrt", a)

    def rounded(self, a: Value) -> Value:
        """Rounds to a whole number, half to even."""
        return self._intrinsic("rint", a)

    def looked_up(self, table: Value, places: Value) -> Value:
        """Returns lanes of a table of 512 bits by number; the higher bits of a number do not count (AVX512-BW)."""
        kind = table.ir.type
        name = "sf" if table.is_float else "hi"
        function = self._external(f"llvm.x86.avx512.permvar.{name}.512", kind, [kind, places.ir.type])
        return Value(self, self.builder.call(function, [table.ir, places.ir]))

    def looked_up_in_two(self, first: Value, second: Value, places: Value) -> Value:
        """Returns 16-bit lanes of a table of two registers by number, as `looked_up`."""
        kind = first.ir.type
        function = self._external("llvm.x86.avx512.vpermi2var.hi.512", kind, [kind, places.ir.type, kind])
        return Value(self, self.builder.call(function, [first.ir, places.ir, second.ir]))

    def _intrinsic(self, name: str, *values: Value) -> Value:
        kind = values[0].ir.type
        suffix = f"v{kind.count}f32" if isinstance(kind, ir.VectorType) else "f32"
        function = self._external(f"llvm.{name}.{suffix}", kind, [value.ir.type for value in values])
        return Value(self, self.builder.call(function, [value.ir for value in values]))

    def _external(self, name: str, result: ir.Type, arguments: list[ir.Type]) -> ir.Function:
        found = self.module.globals.get(name)
        return found or ir.Function(self.module, ir.FunctionType(result, arguments), name)

    def summed(self, vector: Value) -> Value:
        """Returns the sum of all lanes: halves, then halves of these, so that the order is the same on every CPU."""
        return self._folded(vector, lambda a, b: a + b)

    def largest(self, vector: Value) -> Value:
        """Returns the largest of all lanes."""
        return self._folded(vector, self.maximum)

    def _folded(self, vector: Value, fold) -> Value:  # type: ignore[no-untyped-def]
        width = LANES // 2
        while width:
            vector = fold(vector, self.shuffled(vector, [(i + width) % LANES for i in range(LANES)]))
            width //= 2
        return self.lane(vector, 0)

    def dot_octets(self, total: Value, a: Value, b: Value) -> Value:
        """Returns total + a0 b0 + ... + a3 b3 of the bytes in each lane, unsigned ones of a and signed ones of b."""
        function = self._external("llvm.x86.avx512.vpdpbusd.512", INTS, [INTS] * 3)
        return Value(self, self.builder.call(function, [total.ir, a.ir, b.ir]))

    def dot_pairs(self, total: Value, a: Value, b: Value) -> Value:
        """Returns total + a0 b0 + a1 b1 of the bfloat16 pairs in each lane, in float32."""
        if self.has_pairs:
            function = self._external("llvm.x86.avx512bf16.dpbf16ps.512", FLOATS, [FLOATS, PAIRS, PAIRS])
            arguments = [total.ir, self.cast(a, PAIRS).ir, self.cast(b, PAIRS).ir]
            return Value(self, self.builder.call(function, arguments))
        a, b = self.cast(a, INTS), self.cast(b, INTS)
        for low in (True, False):
            x, y = (self.cast(v << 16 if low else v & -65536, FLOATS) for v in (a, b))
            total = self.fma(x, y, total)
        return total


def _alignment(kind: ir.Type) -> int:
    """Returns the alignment that any address has: that of an element."""
    element = kind.element if isinstance(kind, ir.VectorType) else kind
    if isinstance(element, ir.IntType):
        return max(1, element.width // 8)
    return 2 if element == BFLOAT16 else 4
