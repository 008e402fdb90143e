"""Measures the ops of a gated delta layer in the CPU library: microseconds per token.

python -m tools.part_bench.delta                          16 heads of 128 x 128, prompts of 512 tokens, one core
python -m tools.part_bench.delta --rows 32 --tokens 1     a step of 32 sequences
"""

import argparse
import ctypes

import numpy as np

from pipeline.kernels.cpu import native, native_library
from pipeline.kernels.cpu.build import build
from pipeline.kernels.cpu.isa import available
from pipeline.kernels.cpu.native import ActivationForm
from pipeline.kernels.recurrent.delta_shape import TAPS, DeltaShape
from pipeline.kernels.step_inputs import StepInputs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--key-heads", type=int, default=16)
    parser.add_argument("--value-heads", type=int, default=16)
    parser.add_argument("--key-dim", type=int, default=128)
    parser.add_argument("--value-dim", type=int, default=128)
    parser.add_argument("--rows", type=int, default=1, help="sequences in the step")
    parser.add_argument("--tokens", type=int, default=512, help="tokens of each")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--isa", choices=available(), default=available()[0])
    args = parser.parse_args()
    library = native_library.load(build(args.isa, print))
    shape = DeltaShape(args.key_heads, args.value_heads, args.key_dim, args.value_dim)
    num = args.rows * args.tokens
    inputs = StepInputs(num, args.rows, -(-args.tokens // 16))
    starts, counts = np.zeros(args.rows, np.int32), np.full(args.rows, args.tokens, np.int32)
    tables = np.zeros((args.rows, inputs.block_tables.shape[1]), np.int32)
    inputs.fill(np.zeros(num, np.int32), starts, counts, tables, counts > 0)
    inputs.state_reads[:] = inputs.state_writes[:] = np.arange(args.rows)
    pool = native_library.ThreadPool(library, args.threads)
    names = "ids", "positions", "slots", "sampled", "starts", "counts", "offsets", "block_tables"
    arrays = native.NativeStepArrays(**{name: getattr(inputs, name).ctypes.data for name in names})
    program = library.program_new(pool.handle, ctypes.byref(arrays))
    random = np.random.default_rng(0)
    widths = TAPS * shape.channels, shape.value_heads, shape.value_heads, shape.value_dim
    vectors = [random.standard_normal(width).astype(np.float32) for width in widths]
    vectors[1] = -np.abs(vectors[1])
    x = random.standard_normal((num, shape.inputs)).astype(np.float32)
    slots, conv, gates, values = (
        pool.allocate(4 * size)
        for size in (args.rows * shape.slot, num * shape.channels, num * 2 * shape.value_heads, num * shape.values)
    )
    stride = library.activation_bytes(ActivationForm.PLAIN, shape.values)
    out = pool.allocate(library.activation_rows(num) * stride)
    sizes = shape.key_heads, shape.value_heads, shape.key_dim, shape.value_dim, shape.tiled
    layer = native.NativeDeltaLayer(
        *sizes, 1.0, 1e-6, *(vector.ctypes.data for vector in vectors), None, shape.value_heads
    )
    state = native.NativeRowStates(
        slots.ctypes.data, shape.slot, 0, inputs.state_reads.ctypes.data, inputs.state_writes.ctypes.data
    )
    library.program_delta(
        *(program, ctypes.byref(layer), ctypes.byref(state), x.ctypes.data, conv.ctypes.data, gates.ctypes.data),
        *(values.ctypes.data, native.NativeRows(out.ctypes.data, stride), ActivationForm.PLAIN, None),
    )
    rounds = np.zeros((args.rounds, library.program_size(program)))
    for seconds in rounds:
        library.program_profile(program, num, args.rows, args.rows, seconds.ctypes.data)
    print(f"{args.isa}, {args.threads} thread(s), {args.rows} x {args.tokens} tokens, µs per token, fastest round")
    for i, of_op in enumerate(rounds.T):
        print(f"  {library.program_name(program, i).decode():12s} {min(of_op) / num * 1e6:8.2f}")
    total = min(rounds.sum(1)) / num
    moved = 8 * shape.state * args.rows / num
    print(f"  {'all':12s} {total * 1e6:8.2f}   {moved / total / 1e9:.1f} GB/s of states")
    library.program_delete(program)
    pool.close()


if __name__ == "__main__":
    main()
