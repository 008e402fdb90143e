"""Products with weights alone: what a step of several rows costs beside one of a single row.

    python -m tools.part_bench.products
    python -m tools.part_bench.products --against OTHER --formats q4_k,q6_k --activations int8 --rows 1,8 --kernels avx2

Each case is a program of matrices that fit into the L2 cache together, or with `--from-memory` of 160 MB of them, as a
model's are read. With --against, the kernels of another working tree take turns with these, run by run, so that a busy
machine slows both. Their interface must be the same. Prints microseconds for one matrix, the least of the rounds, how
many steps of one row that is, and the ratio of the times. With one thread, the least means something also on a busy
machine. Both libraries are optimized ones, which are compiled first if there are none.
"""

import argparse
import ctypes
from pathlib import Path
from typing import get_args

import numpy as np

from pipeline.kernels.cpu import native, native_library
from pipeline.kernels.cpu.isa import NEEDED, Isa, available
from pipeline.kernels.cpu.native import FORMATS, Activations, PackedMatrix, form_for
from pipeline.kernels.step_inputs import StepInputs
from pipeline.kernels.stored_matrix import Format
from tools.part_bench.attention import count, counts, libraries_of

MEMORY_BYTES = 160 * 2**20
"""Of matrices that no cache near a core holds."""


class Products:
    """A program that multiplies the same activations with some matrices of random weights."""

    def __init__(
        self,
        library: ctypes.CDLL,
        format: Format,
        activations: Activations,
        shape: tuple[int, int],
        most_rows: int,
        num_bytes: int,
        threads: int = 1,
    ) -> None:
        columns, depth = shape
        self.library = library
        self.pool = native_library.ThreadPool(library, threads)
        inputs = StepInputs(most_rows, most_rows, 1)
        arrays = native.NativeStepArrays(
            **{name: getattr(inputs, name).ctypes.data for name in ("starts", "counts", "offsets", "block_tables")},
            **{name: getattr(inputs, name).ctypes.data for name in ("ids", "positions", "slots", "sampled")},
            max_blocks=1,
        )
        self._kept: list[object] = [inputs, arrays]
        self.program = library.program_new(self.pool.handle, ctypes.byref(arrays))
        form = form_for(format, activations, in_blocks=bool(library.prefers_blocks()))
        rng = np.random.default_rng(1)
        stride = library.activation_bytes(form, depth)
        rows = native.NativeRows(self._memory(library.activation_rows(most_rows) * stride).ctypes.data, stride)
        values = rng.standard_normal((most_rows, depth), np.float32)
        out = np.zeros((most_rows, columns), np.float32)
        self._kept += [values, out]
        library.program_quantize(self.program, rows, form, values.ctypes.data, depth)
        packed = PackedMatrix(FORMATS[format], form, columns, depth, None, None, None)
        each = library.panel_bytes(ctypes.byref(packed)) * columns // native.PANEL
        for _ in range(max(num_bytes // each, 1)):
            memory = self._memory(each)
            if format == "bf16":
                numbers = rng.standard_normal(memory.size // 2, np.float32).view(np.uint32) >> 16
                memory.view(np.uint16)[:] = numbers
            else:  # as scales, these are finite floats
                memory[:] = rng.integers(0, 256, memory.size, np.uint8) & 0x3B
            matrix = PackedMatrix(FORMATS[format], form, columns, depth, memory.ctypes.data, None, None)
            library.program_linear(self.program, out.ctypes.data, rows, ctypes.byref(matrix), columns)
        self._seconds = np.zeros(library.program_size(self.program))

    def _memory(self, num_bytes: int) -> native.ByteArray:
        made = self.pool.allocate(-(-num_bytes // native.HUGE_PAGE) * native.HUGE_PAGE)
        self._kept.append(made)
        return made

    def run(self, num_rows: int) -> float:
        """Seconds of one matrix, on average."""
        status = self.library.program_profile(self.program, num_rows, num_rows, 0, self._seconds.ctypes.data)
        assert status == 0
        return float(self._seconds[1:].mean())

    def close(self) -> None:
        self.library.program_delete(self.program)
        self.pool.close()


def formats(text: str) -> list[Format]:
    for part in text.split(","):
        if part not in FORMATS:
            raise ValueError
    return [format for part in text.split(",") for format in get_args(Format) if format == part]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, metavar="OTHER", help="another working tree")
    parser.add_argument("--formats", type=formats, default=["q4_k", "q6_k"], metavar="F,F…")
    parser.add_argument("--activations", choices=get_args(Activations), default="int8")
    parser.add_argument("--rows", type=counts, default=[1, 2, 4, 8, 16], metavar="N,N…")
    parser.add_argument("--columns", type=count, default=256, help="outputs of a matrix")
    parser.add_argument("--depth", type=count, default=1536)
    parser.add_argument("--from-memory", action="store_true", help="more matrices than caches hold")
    parser.add_argument("--threads", type=count, default=1)
    parser.add_argument("--rounds", type=count, default=150)
    parser.add_argument("--kernels", choices=list(NEEDED), default=available()[0])
    args = parser.parse_args()
    isa: Isa = args.kernels
    libraries = libraries_of(isa, args.against)
    print(f"{isa}, {args.activations}, {args.columns} x {args.depth}, {args.threads} threads, least of {args.rounds}")
    num_bytes = MEMORY_BYTES if args.from_memory else 0
    for format in args.formats:
        shape = args.columns, args.depth
        made = {
            name: Products(library, format, args.activations, shape, max(args.rows), num_bytes, args.threads)
            for name, library in libraries.items()
        }
        alone: dict[str, float] = {}
        for num_rows in args.rows:
            least = dict.fromkeys(made, float("inf"))
            for _ in range(args.rounds):
                for name, products in made.items():
                    least[name] = min(least[name], products.run(num_rows))
            line = f"{format:5} {num_rows:4} rows"
            for name, seconds in least.items():
                alone.setdefault(name, seconds)
                line += f"  {name} {1e6 * seconds:8.2f} µs ({seconds / alone[name]:5.2f} of {args.rows[0]})"
            if len(least) > 1:
                line += f"  {least['other'] / least['this']:.3f} times as fast"
            print(line, flush=True)
        for products in made.values():
            products.close()


if __name__ == "__main__":
    main()
