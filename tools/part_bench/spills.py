"""Which products keep sums in memory: counts what the inner loops of the compiled CPU kernels store on the stack.

    python -m tools.part_bench.spills
    python -m tools.part_bench.spills --kernels avx2 --functions multiply_code_panels --least 0

An inner loop is one that multiplies vectors and has no smaller one in it that does. Prints those that store at least
`--least` vectors on the stack for each 100 products, most first: (what is loaded from it, instructions). A few are
harmless. GCC gives an array of vectors no registers if a loop over it is unrolled too late, which `IN_REGISTERS` in
kernels/cpu/vec.h prevents. Needs `objdump`.
"""

import argparse
import re
import subprocess
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from pipeline.kernels.cpu.build import build
from pipeline.kernels.cpu.isa import NEEDED, Isa, available

FUNCTION = re.compile(r"^[0-9a-f]+ <(.*)>:$")
INSTRUCTION = re.compile(r"^\s*([0-9a-f]+):\s+(.*)$")
JUMP = re.compile(r"j\w+\s+([0-9a-f]+)")
PRODUCT = re.compile(r"vpdp|vfn?m(add|sub)|vpmadd|vdpbf|vmulps|vpmull")
STORE = re.compile(r"vmov\w+\s+%[xyz]mm\d+,[^,]*\(%r[sb]p")
LOAD = re.compile(r"\(%r[sb]p[^)]*\).*,%[xyz]mm")


class Loop(NamedTuple):
    function: str
    products: int
    stores: int
    """Vectors that it stores on the stack; the next: that it loads from there."""
    loads: int
    instructions: int


def inner_loops(disassembly: Iterable[str]) -> Iterator[Loop]:
    """The inner loops of what `objdump -d -C --no-show-raw-insn` prints."""
    name, body = "", list[tuple[int, str]]()
    for line in disassembly:
        if found := FUNCTION.match(line):
            yield from _loops_of(name, body)
            name, body = found[1], []
        elif found := INSTRUCTION.match(line):
            body.append((int(found[1], 16), found[2]))
    yield from _loops_of(name, body)


def _loops_of(name: str, body: list[tuple[int, str]]) -> Iterator[Loop]:
    indices = {address: index for index, (address, _) in enumerate(body)}
    text = [instruction for _, instruction in body]
    loops = set()
    for end, instruction in enumerate(text):
        begin = indices.get(int(found[1], 16)) if (found := JUMP.match(instruction)) else None
        if begin is not None and begin <= end and any(map(PRODUCT.match, text[begin : end + 1])):
            loops.add((begin, end))
    for begin, end in sorted(loops):
        if any(begin <= first and last <= end and (first, last) != (begin, end) for first, last in loops):
            continue
        part = text[begin : end + 1]
        products, stores, loads = (sum(1 for one in part if pattern.search(one)) for pattern in (PRODUCT, STORE, LOAD))
        yield Loop(name, products, stores, loads, len(part))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", choices=list(NEEDED), default=available()[0])
    parser.add_argument("--functions", default="multiply", help="a part of their names, as a regular expression")
    parser.add_argument("--least", type=float, default=10.0, help="stores for each 100 products")
    args = parser.parse_args()
    isa: Isa = args.kernels
    command = ("objdump", "-d", "-C", "--no-show-raw-insn", str(build(isa, print)))
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    loops = [loop for loop in inner_loops(text.splitlines()) if re.search(args.functions, loop.function)]
    for loop in sorted(loops, key=lambda loop: -loop.stores / loop.products):
        if 100 * loop.stores >= args.least * loop.products:
            name = loop.function.split("(Rows const&")[0].split("(AttentionPart")[0]
            print(f"{loop.stores:4} for {loop.products:4} ({loop.loads}, {loop.instructions})  {name}")


if __name__ == "__main__":
    main()
