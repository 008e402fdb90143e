"""tools/part_bench/spills.py counts the vectors that inner loops store on the stack."""

from tools.part_bench.spills import Loop, inner_loops

DISASSEMBLY = """
0000000000001000 <void multiply<2>(Rows const&)>:
    1000:	vpxor  %xmm0,%xmm0,%xmm0
    1004:	vmovaps %zmm0,0x40(%rsp)
    1008:	vpdpbusd %zmm1,%zmm2,%zmm0
    100c:	vpdpbusd (%rax){1to16},%zmm2,%zmm3
    1010:	vmovdqa64 %zmm0,-0x80(%rbp)
    1014:	vmovups %zmm0,0x80(%rdi)
    1018:	vpaddd 0x40(%rsp),%zmm3,%zmm3
    101c:	jne    1008 <void multiply<2>(Rows const&)+0x8>
    1020:	vmovaps %zmm3,0x40(%rsp)
    1024:	jl     1000 <void multiply<2>(Rows const&)>
    1028:	ret

0000000000002000 <copy>:
    2000:	vmovaps %zmm3,0x40(%rsp)
    2004:	jl     2000 <copy>
"""


def test_inner_loops_with_products_are_counted() -> None:
    assert list(inner_loops(DISASSEMBLY.splitlines())) == [Loop("void multiply<2>(Rows const&)", 2, 1, 1, 6)]
