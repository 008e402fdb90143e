"""Attention of prompts alone: how much of the CPU's peak its useful products reach.

    python -m tools.part_bench.attention
    python -m tools.part_bench.attention --against OTHER --prompts 64,128,256,512 --threads 2 --rounds 15

One program for each model shape has a few layers of attention, each with queries, keys, values and outputs of its own.
Useful are the products of a query with the keys that it attends to, and of their weights with the values. The peak is
that of bfloat16 products at the level: of their own instruction, else of float32 FMA. It is measured in every round.

With --against, the kernels of another working tree take turns with these, round by round, so that a busy machine slows
both. Their interface must be the same. Prints medians over the rounds: milliseconds for one layer, the share of the
peak, and the ratio of the times.
"""

import argparse
import ctypes
from pathlib import Path
from statistics import median

import numpy as np

from pipeline.kernels.cpu import native, native_library, peaks
from pipeline.kernels.cpu.build import PROGRAM, build
from pipeline.kernels.cpu.isa import NEEDED, Isa, available
from pipeline.kernels.cpu.native import ActivationForm, KVType
from pipeline.kernels.step_inputs import BLOCK_SIZE, StepInputs, block_bytes

SHAPES = {"SmolLM2-135M": (9, 3, 64), "Qwen2.5-1.5B": (12, 2, 128)}
"""Query heads, key-value heads, head_dim."""
PEAK_S = 0.03
"""How long the peak is measured before each round."""


class Layers:
    """A program of a few layers of attention, in random memory."""

    def __init__(
        self, library: ctypes.CDLL, heads: int, kv_heads: int, dim: int, tokens: int, layers: int, threads: int
    ) -> None:
        self.library = library
        self.inputs = inputs = StepInputs(tokens, 1, tokens // BLOCK_SIZE + 1)
        self.pool = native_library.ThreadPool(library, threads)
        arrays = native.NativeStepArrays(
            **{name: getattr(inputs, name).ctypes.data for name in ("starts", "counts", "offsets", "block_tables")},
            **{name: getattr(inputs, name).ctypes.data for name in ("ids", "positions", "slots", "sampled")},
            max_blocks=inputs.block_tables.shape[1],
        )
        self._kept: list[object] = [arrays]
        self.program = library.program_new(self.pool.handle, ctypes.byref(arrays))
        plan = library.program_attention_plan(self.program, heads, kv_heads, 0, -1)
        rng = np.random.default_rng(1)
        stride = library.activation_bytes(ActivationForm.PLAIN, heads * dim)
        for _ in range(layers):
            num = inputs.block_tables.shape[1] * BLOCK_SIZE * kv_heads * dim * 2
            keys = self.memory(num * 2)
            keys.view(np.uint16)[:num] = rng.standard_normal(num, np.float32).view(np.uint32) >> 16
            queries, out = (self.memory(library.activation_rows(tokens) * stride) for _ in range(2))
            values = rng.standard_normal((tokens, heads * dim), np.float32) * np.float32(2.5 / dim**0.5)
            wide = library.act_bytes() == 4
            words = values if wide else (values.view(np.uint32) >> 16).astype(np.uint16)
            rows = queries[: tokens * stride].reshape(tokens, stride)
            rows[:, : words.itemsize * heads * dim] = words.view(np.uint8)
            stride = block_bytes(1, kv_heads, dim, 2)
            layer = native.NativeLayerMemory(keys.ctypes.data, kv_heads, dim, KVType.BF16, stride=stride)
            self._kept.append(layer)
            made = (native.NativeRows(memory.ctypes.data, stride) for memory in (out, queries))
            library.program_attention(self.program, next(made), 0, next(made), ctypes.byref(layer), plan, None)
        table = rng.permutation(inputs.block_tables.shape[1]).astype(np.int32)[None]
        one = np.ones(1, np.int32)
        inputs.fill(np.zeros(tokens, np.int32), 0 * one, tokens * one, table, one.astype(np.uint8))
        self.seconds = np.zeros(library.program_size(self.program))
        cost = (ctypes.c_double * 3)()
        library.program_cost(self.program, len(self.seconds) - 1, tokens, 1, 1, cost)
        self.flop = cost[1]

    def memory(self, num_bytes: int) -> native.ByteArray:
        made = self.pool.allocate(-(-num_bytes // native.HUGE_PAGE) * native.HUGE_PAGE)
        self._kept.append(made)
        return made

    def run(self) -> float:
        """Seconds of one layer, on average."""
        inputs = self.inputs
        status = self.library.program_profile(
            self.program, inputs.num_tokens, inputs.num_rows, inputs.num_samples, self.seconds.ctypes.data
        )
        assert status == 0
        return float(self.seconds[1:].mean())

    def close(self) -> None:
        self.library.program_delete(self.program)
        self.pool.close()


def count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError
    return number


def counts(text: str) -> list[int]:
    return [count(part) for part in text.split(",")]


def libraries_of(isa: Isa, against: Path | None) -> dict[str, ctypes.CDLL]:
    """The CPU library of this working tree, and before it that of the tree `against`, if there is one."""
    sources = {"this": PROGRAM}
    if against:
        sources = {"other": against / "kernels/cpu" / PROGRAM.name, **sources}
    return {name: native_library.load(build(isa, print, source)) for name, source in sources.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, metavar="OTHER", help="another working tree")
    parser.add_argument("--prompts", type=counts, default=[64, 128, 256, 512], metavar="N,N…", help="their tokens")
    parser.add_argument("--threads", type=count, default=2)
    parser.add_argument("--rounds", type=count, default=15)
    parser.add_argument("--layers", type=count, default=8, help="so that they do not fit into the L2 cache")
    parser.add_argument("--kernels", choices=list(NEEDED), default=available()[0])
    args = parser.parse_args()
    isa: Isa = args.kernels
    libraries = libraries_of(isa, args.against)
    print(f"{isa}, {args.threads} threads, {args.rounds} rounds")
    for shape, sizes in SHAPES.items():
        for tokens in args.prompts:
            made = {
                name: Layers(library, *sizes, tokens, args.layers, args.threads) for name, library in libraries.items()
            }
            times: dict[str, list[float]] = {name: [] for name in made}
            rates = []
            for _ in range(args.rounds):
                rates.append(peaks.bf16_rate(isa, args.threads, PEAK_S, print))
                for name, layers in made.items():
                    layers.run()  # warms up, as after `rates` the threads have slept
                    times[name].append(layers.run())
            line = f"{shape:13} {tokens:5} tokens  peak {median(rates) / 1e9:6.1f} GFLOP/s"
            for name, layers in made.items():
                shares = [layers.flop / time / rate for time, rate in zip(times[name], rates, strict=True)]
                line += f"  {name} {1e3 * median(times[name]):.3f} ms {100 * median(shares):.1f} %"
                layers.close()
            if len(made) > 1:
                ratios = [old / new for old, new in zip(times["other"], times["this"], strict=True)]
                line += f"  {median(ratios):.3f} times as fast"
            print(line, flush=True)


if __name__ == "__main__":
    main()
