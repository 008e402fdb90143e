"""Kernels that only measure the machine."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait, globaltimer


@triton.jit
def read_all(sums, words, ROUNDS: tl.constexpr, NUM_PROGRAMS: tl.constexpr, BLOCK: tl.constexpr):
    """Read ROUNDS x NUM_PROGRAMS x BLOCK int32 words, and write each program's sum (wrapping) as int64."""
    indices = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.int32)
    for _ in range(ROUNDS):
        total += tl.load(words + indices)
        indices += NUM_PROGRAMS * BLOCK
    tl.store(sums + tl.program_id(0), tl.sum(total.to(tl.int64), 0))


@triton.jit
def tick(counter, EARLY: tl.constexpr):
    """Add one to the counter. With EARLY, the kernel is launched before its predecessor ends, and waits for it
    itself."""
    if EARLY:
        gdc_wait()
    tl.store(counter, tl.load(counter) + 1)
    if EARLY:
        gdc_launch_dependents()


@triton.jit
def tick_of_many(a, b, c, d, e, f, g, h, i, j, k, m, num_1, num_2, num_3, num_4, BLOCK: tl.constexpr):
    """Like `tick`, with as many arguments as a step's kernels have."""
    tl.store(a, tl.load(a) + 1)


@triton.jit
def fill(numbers, step, BLOCK: tl.constexpr):
    """Write a step's result: the first number is the step's, and the others count up from it."""
    indices = tl.arange(0, BLOCK)
    number = tl.load(step)
    tl.store(numbers + indices, number + indices)
    tl.debug_barrier()
    tl.store(step, number + 1)


@triton.jit
def stamp(word, number, HAS_CLOCK: tl.constexpr):
    """Write the GPU's clock to `word` (int64), or `number` if there is no clock."""
    if HAS_CLOCK:
        tl.store(word, globaltimer())
    else:
        tl.store(word, tl.load(word) + number)
