"""Converts codes to floats without conversion instructions, which have a low throughput.

The bits of a code are inserted into those of a power of two: 128 + q has the bits of 128 with q in the upper bits of
its fraction. The constant stays in the number and is subtracted later.

Codes are read as words of four bytes, because the compiler would split and reassemble bytes. With ASM one instruction
(prmt) extracts a code from its word. The interpreter has no assembler and uses shifts and masks.
"""

import triton
import triton.language as tl

EXCESS = tl.constexpr(128)
"""The constant in the results of `codes_to_floats` and `code_to_float`."""


@triton.jit
def half_codes(words, high, HALF: tl.constexpr, HIGH_BITS: tl.constexpr):
    """Codes of the first or second half of a group, one in each byte.

    words [n, g, w] int32 hold a code's lower four bits in the halves of their bytes. `high` holds the others (see
    device_matrix.py): [n, g] int32 if HIGH_BITS is 1, [n, g, 2] if it is 2. Result [n, g, w] int32.
    """
    codes = (words >> (4 * HALF)) & 0x0F0F0F0F
    if HIGH_BITS > 0:
        lanes = tl.arange(0, words.shape[2])[None, None, :]
        if HIGH_BITS == 1:
            codes |= ((high[:, :, None] >> (lanes + 4 * HALF)) & 0x01010101) << 4
        else:
            first, second = tl.split(high)
            bits = second if HALF == 1 else first
            codes |= ((bits[:, :, None] >> (2 * lanes)) & 0x03030303) << 4
    return codes


@triton.jit
def codes_to_floats(words, ASM: tl.constexpr):
    """words [n, g, w] int32 → their bytes, which are below 128, [n, g, 4w] float32, plus EXCESS."""
    if ASM:
        b0, b1, b2, b3 = tl.inline_asm_elementwise(
            asm="""
            {
            .reg .b32 codes;
            mov.b32 codes, $4;
            prmt.b32 $0, codes, 0x43000000, 0x7044;
            prmt.b32 $1, codes, 0x43000000, 0x7144;
            prmt.b32 $2, codes, 0x43000000, 0x7244;
            prmt.b32 $3, codes, 0x43000000, 0x7344;
            }
            """,
            constraints="=r,=r,=r,=r,r",
            args=[words],
            dtype=(tl.float32,) * 4,
            is_pure=True,
            pack=1,
        )
    else:
        b0 = code_to_float(words & 127)
        b1 = code_to_float((words >> 8) & 127)
        b2 = code_to_float((words >> 16) & 127)
        b3 = code_to_float((words >> 24) & 127)
    return _in_order(b0, b1, b2, b3)


@triton.jit
def bytes_to_floats(words, ASM: tl.constexpr):
    """words [n, g, w] int32 → their bytes as int8, [n, g, 4w] float32."""
    if ASM:
        b0, b1, b2, b3 = tl.inline_asm_elementwise(
            asm="""
            {
            .reg .b32 biased;
            xor.b32 biased, $4, 0x80808080;
            prmt.b32 $0, biased, 0x47000000, 0x7404;
            prmt.b32 $1, biased, 0x47000000, 0x7414;
            prmt.b32 $2, biased, 0x47000000, 0x7424;
            prmt.b32 $3, biased, 0x47000000, 0x7434;
            }
            """,
            constraints="=r,=r,=r,=r,r",
            args=[words],
            dtype=(tl.float32,) * 4,
            is_pure=True,
            pack=1,
        )
        # Subtract 2^15 + 128 at once: it would cost precision in the sums.
        codes = _in_order(b0, b1, b2, b3) - 32896.0
    else:
        codes = _in_order(words << 24, words << 16, words << 8, words)
        codes = (codes >> 24).to(tl.float32)
    return codes


@triton.jit
def fp8_bytes_to_floats(words):
    """words [n, g, w] int32 → their bytes as float8_e4m3fn, [n, g, 4w] float32."""
    return _in_order(
        fp8_to_float(words), fp8_to_float(words >> 8), fp8_to_float(words >> 16), fp8_to_float(words >> 24)
    )


@triton.jit
def fp8_to_float(byte):
    """The float8_e4m3fn in the lowest byte of an int32 → float32, exact. NaN becomes 480 or -480.

    The exponents of e4m3 have bias 7, those of float32 127.
    """
    bits = ((byte << 24) & (-0x80000000)) | ((byte << 20) & 0x07F00000)
    return bits.to(tl.int32).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120


@triton.jit
def code_to_float(code):
    """code int32 from 0 to 127 → float32, plus EXCESS."""
    return ((code << 16) | 0x43000000).to(tl.float32, bitcast=True)


@triton.jit
def _in_order(a, b, c, d):
    """Interleave four tensors [n, g, w] → [n, g, 4w]. Elements stay in their threads."""
    joined = tl.join(tl.join(a, c), tl.join(b, d))
    n: tl.constexpr = a.shape[0]
    g: tl.constexpr = a.shape[1]
    w: tl.constexpr = a.shape[2]
    return tl.reshape(joined, [n, g, 4 * w])
