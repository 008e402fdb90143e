"""Codes to floats without conversions, of which a multiprocessor does few in a cycle.

The bits of a code are put into those of a float that is a power of two large enough to hold it: 128 + q has the bits of
128 with q in the upper bits of its fraction. The constant is left in, and taken off sums. With ASM four codes are
taken out of their word by one instruction each (prmt); the interpreter has no assembler and takes the long way.
"""

import triton
import triton.language as tl


@triton.jit
def halves_to_floats(tile, ASM: tl.constexpr):
    """uint8 → low halves, high halves, float32, both too large by the constant that comes third."""
    if ASM:
        low, high = tl.inline_asm_elementwise(
            asm="""
            {
            .reg .b32 low, high;
            and.b32 low, $8, 0x0F0F0F0F;
            shr.u32 high, $8, 4;
            and.b32 high, high, 0x0F0F0F0F;
            prmt.b32 $0, low, 0x43000000, 0x7044;
            prmt.b32 $1, low, 0x43000000, 0x7144;
            prmt.b32 $2, low, 0x43000000, 0x7244;
            prmt.b32 $3, low, 0x43000000, 0x7344;
            prmt.b32 $4, high, 0x43000000, 0x7044;
            prmt.b32 $5, high, 0x43000000, 0x7144;
            prmt.b32 $6, high, 0x43000000, 0x7244;
            prmt.b32 $7, high, 0x43000000, 0x7344;
            }
            """,
            constraints="=r,=r,=r,=r,=r,=r,=r,=r,r",
            args=[tile],
            dtype=(tl.float32, tl.float32),
            is_pure=True,
            pack=4,
        )
    else:
        wide = tile.to(tl.int32)
        low = (((wide & 15) << 16) | 0x43000000).to(tl.float32, bitcast=True)
        high = (((wide >> 4) << 16) | 0x43000000).to(tl.float32, bitcast=True)
    return low, high, 128


@triton.jit
def bytes_to_floats(tile, ASM: tl.constexpr):
    """int8 → float32, too large by the constant that comes second."""
    if ASM:
        codes = tl.inline_asm_elementwise(
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
            args=[tile],
            dtype=tl.float32,
            is_pure=True,
            pack=4,
        )
    else:
        biased = (tile.to(tl.int32) + 128) << 8
        codes = (biased | 0x47000000).to(tl.float32, bitcast=True)
    # 2^15 is so large that it would cost digits of the sums: it goes at once.
    return codes - 32896.0, 0
