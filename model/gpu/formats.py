"""Reads and writes elements of KV pages in kernels, for each dtype of `model.kv_pool`.

8-bit floats are converted by their bits on devices without an instruction for it (below compute capability 8.9), and in
Triton's interpreter.
"""

import torch
import triton
import triton.language as tl

PLAIN, INT8, FP8, FP8_BITS, FP8_PACKED = (tl.constexpr(i) for i in range(5))
"""Formats: floats unchanged; int8; e4m3 converted by the device; converted here; and four at once, by `shifted`."""

NATIVE_FP8 = (8, 9)  # compute capability that converts e4m3
PACKED = (9, 0)  # least compute capability whose shared memory suffices for what `shifted` converts in place
NO_ASSEMBLY = (10, 0)  # from this capability on Triton refuses to pipeline a loop that has inline assembly
HALF_SHIFT = tl.constexpr(2.0**60)
"""e4m3 whose bits stand in those of bfloat16 is too small by the square of it: exponents have a bias larger by 120."""


def capability_of(device: torch.device) -> tuple[int, int]:
    """Returns the compute capability. For a CPU, where Triton interprets kernels, it is (0, 0)."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def format_of(kind: torch.dtype | None, capability: tuple[int, int]) -> int:
    """Returns the format of elements.

    Args:
        kind: Type of 8-bit elements, None for others.
        capability: Compute capability of the device.
    """
    if kind is None:
        return PLAIN.value
    if kind is torch.int8:
        return INT8.value
    return (FP8 if capability >= NATIVE_FP8 else FP8_BITS).value


def page_format_of(kind: torch.dtype | None, capability: tuple[int, int]) -> int:
    """Returns the format of elements of pages, see `format_of`."""
    found = format_of(kind, capability)
    return FP8_PACKED.value if found == FP8.value and PACKED <= capability < NO_ASSEMBLY else found


@triton.jit
def decoded(x, FORMAT: tl.constexpr, TO: tl.constexpr):
    """Converts elements of a page to TO, exactly in 16 bits and more.

    8-bit elements are bytes. Their scales are not applied.
    """
    if FORMAT == FP8_BITS:
        # The bits of e4m3 stand in those of float16 with an exponent that is 8 too small.
        bits = x.to(tl.uint16)
        bits = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        return (bits.to(tl.float16, bitcast=True) * 256.0).to(TO)
    if FORMAT == FP8 or FORMAT == FP8_PACKED:  # noqa: SIM109 - constants of Triton are in no tuple
        return x.to(tl.float8e4nv, bitcast=True).to(tl.float16).to(TO)
    if FORMAT == INT8:
        return x.to(tl.int8, bitcast=True).to(TO)
    return x.to(TO)


@triton.jit
def shifted(x, FORMAT: tl.constexpr, TO: tl.constexpr, IN_PLACE: tl.constexpr):
    """Converts elements of a page to TO. 8-bit floats become too small, which takes fewer instructions.

    The caller multiplies products of such elements by the square of `half_shift`: once before the product and once
    after it. Each factor is exact in bfloat16 and float32, and sums of float32 stay far from their limits.

    Args:
        x: Elements. 8-bit elements are bytes; their scales are not applied.
        FORMAT: Their format.
        TO: A float type.
        IN_PLACE: Whether threads convert the elements that they loaded, 16 bytes at once. If not, the compiler may let
            them convert those that they multiply, which for the values of a decode are single bytes.
    """
    if FORMAT == FP8_PACKED and TO.is_bf16():
        # Of two bytes: each with its sign extended to 16 bits, then its exponent and mantissa in their places.
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $2, 0, 0x9180; shl.b32 $0, $0, 4; and.b32 $0, $0, 0x87f087f0;"
            "prmt.b32 $1, $2, 0, 0xb3a2; shl.b32 $1, $1, 4; and.b32 $1, $1, 0x87f087f0;",
            "=&r,=r,r", [x], dtype=tl.bfloat16, is_pure=not IN_PLACE, pack=4,
        )  # fmt: skip
    if FORMAT == FP8_BITS and not TO.is_fp16():
        bits = x.to(tl.uint32)
        return (((bits & 0x80) << 24) | ((bits & 0x7F) << 20)).to(tl.float32, bitcast=True).to(TO)
    return decoded(x, FORMAT, TO)


@triton.jit
def half_shift(FORMAT: tl.constexpr, TO: tl.constexpr):
    """Returns the square root of what elements are to be multiplied with that `shifted` has converted."""
    if (FORMAT == FP8_PACKED and TO.is_bf16()) or (FORMAT == FP8_BITS and not TO.is_fp16()):
        return HALF_SHIFT
    return 1.0


@triton.jit
def quantised(x, FORMAT: tl.constexpr):
    """Quantises float32 rows [rows, dims] by the rule of `model.kv_pool`, bit by bit where all numbers are finite.

    A number that is not finite is not finite either when it is read back.

    Returns:
        The elements as bytes, [rows, dims], and float32 scales, [rows].
    """
    LARGEST: tl.constexpr = 127.0 if FORMAT == INT8 else 448.0
    scale = tl.math.div_rn(tl.max(tl.abs(x), 1), tl.full((x.shape[0],), LARGEST, tl.float32))
    return quantised_by(x, tl.where(scale == 0, 1.0, scale), FORMAT)


@triton.jit
def quantised_by(x, scale, FORMAT: tl.constexpr):
    """Quantises float32 rows [rows, dims] by these scales, [rows] float32, as `quantised`, whose results it returns.

    What is too large becomes the largest element. The scale of a row with NaN is NaN.
    """
    LARGEST: tl.constexpr = 127.0 if FORMAT == INT8 else 448.0
    # A maximum leaves NaN out.
    scale = tl.where(tl.max((x != x).to(tl.int32), 1) > 0, float("nan"), scale)
    scaled = tl.math.div_rn(x, tl.broadcast_to(scale[:, None], x.shape))
    scaled = tl.minimum(tl.maximum(scaled, -LARGEST), LARGEST)
    if FORMAT == INT8:
        # Rounded half to even by adding what leaves no bits for a fraction; NaN is 0, its scale says enough.
        rounded = (scaled + 12582912.0) - 12582912.0
        return tl.where(rounded == rounded, rounded, 0.0).to(tl.int8).to(tl.uint8, bitcast=True), scale
    return _e4m3(scaled), scale


@triton.jit
def _e4m3(x):
    """Returns the bits of e4m3 nearest to float32 numbers within -448 to 448, half to even."""
    bits = x.to(tl.uint32, bitcast=True)
    sign = (bits >> 24) & 0x80
    size = bits & 0x7FFFFFFF
    # Below 2^-6 elements are multiples of 2^-9, the last bit of 2^14: the sum rounds to them.
    small = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.uint32, bitcast=True) & 0xFF
    # Else: an exponent that is 120 less, and 20 bits rounded off.
    large = (size - 0x3C000000 + 0x7FFFF + ((size >> 20) & 1)) >> 20
    return (sign | tl.where(size < 0x3C800000, small, large)).to(tl.uint8)
