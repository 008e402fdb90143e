"""Converts codes to floats without conversion instructions, which have a low throughput.

The bits of a code are inserted into those of a power of two: 128 + q has the bits of 128 with q in the upper bits of
its fraction. The constant stays in the number and is subtracted later.

Codes are read as words of four bytes, because the compiler would split and reassemble bytes. With ASM one instruction
(prmt) extracts a code from its word. The interpreter has no assembler and uses shifts and masks.
"""

import triton
import triton.language as tl

EXCESS = tl.constexpr(128)
"""The constant in the results of `halves_to_floats` and `code_to_float`."""


@triton.jit
def halves_to_floats(words, ASM: tl.constexpr):
    """words [n, g, w] int32 → the low halves of their bytes, [n, g, 4w] float32, plus EXCESS."""
    if ASM:
        h0, h1, h2, h3 = tl.inline_asm_elementwise(
            asm="""
            {
            .reg .b32 halves;
            and.b32 halves, $4, 0x0F0F0F0F;
            prmt.b32 $0, halves, 0x43000000, 0x7044;
            prmt.b32 $1, halves, 0x43000000, 0x7144;
            prmt.b32 $2, halves, 0x43000000, 0x7244;
            prmt.b32 $3, halves, 0x43000000, 0x7344;
            }
            """,
            constraints="=r,=r,=r,=r,r",
            args=[words],
            dtype=(tl.float32,) * 4,
            is_pure=True,
            pack=1,
        )
    else:
        h0 = code_to_float(words & 15)
        h1 = code_to_float((words >> 8) & 15)
        h2 = code_to_float((words >> 16) & 15)
        h3 = code_to_float((words >> 24) & 15)
    return _in_order(h0, h1, h2, h3)


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
