"""Kernels that measure the machine and compute nothing."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait, globaltimer


@triton.jit
def read_all(sums, words, ROUNDS: tl.constexpr, NUM_PROGRAMS: tl.constexpr, BLOCK: tl.constexpr):
    """Read ROUNDS x NUM_PROGRAMS x BLOCK words, int32, and leave each program's sum of them as they wrap, int64."""
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.int32)
    for _ in range(ROUNDS):
        total += tl.load(words + places)
        places += NUM_PROGRAMS * BLOCK
    tl.store(sums + tl.program_id(0), tl.sum(total.to(tl.int64), 0))


@triton.jit
def tick(counter, EARLY: tl.constexpr):
    """Add one. With EARLY it is launched before what comes before it has ended, and waits for that itself."""
    if EARLY:
        gdc_wait()
    tl.store(counter, tl.load(counter) + 1)
    if EARLY:
        gdc_launch_dependents()


@triton.jit
def tick_of_many(a, b, c, d, e, f, g, h, i, j, k, m, num_1, num_2, num_3, num_4, BLOCK: tl.constexpr):
    """As `tick`, with as many arguments as a step's kernels have."""
    tl.store(a, tl.load(a) + 1)


@triton.jit
def fill(numbers, step, BLOCK: tl.constexpr):
    """A step's result: the first number is the step's, and the others follow from it."""
    places = tl.arange(0, BLOCK)
    number = tl.load(step)
    tl.store(numbers + places, number + places)
    tl.debug_barrier()
    tl.store(step, number + 1)


@triton.jit
def stamp(word, number, HAS_CLOCK: tl.constexpr):
    """Write the GPU's time to `word`, int64; where it has none, a number."""
    if HAS_CLOCK:
        tl.store(word, globaltimer())
    else:
        tl.store(word, tl.load(word) + number)
