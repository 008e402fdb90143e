"""Sums over ranks: the parts of a result that several GPUs have computed, each from its part of a matrix's columns.

`sum_partials` adds a rank's own split-K partials, so that only their sum travels. `one_shot_all_reduce` does the rest
too: every rank stores its sum in memory that all ranks map (symmetric memory), tells the others, waits for them, and
adds the sums of all ranks in the order of the ranks. So all ranks have the same bits, for the price of one exchange of
signals:

    partials ──► own half ──► signal to all ──► wait for all ──► the sum over ranks 0, 1, …

Program p of a launch talks only to the programs p of the other ranks. It counts its own launches, and uses the two
halves of the memory in turn. The third launch writes where the first one wrote; its program has waited for the signals
of the second one by then, which a rank sends only when the first launch is over there. So one signal a launch is
enough, and a launch in a CUDA graph needs no argument from the host.

Shapes: R ranks, P split-K partials, N numbers.
"""

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048
"""Numbers of one program."""
MAX_PROGRAMS = 128
"""Programs wait for those of other ranks, so all of a launch should run at once: an H100 has 132 multiprocessors."""
MAX_NUMBERS = BLOCK * MAX_PROGRAMS
"""Longest sum of `one_shot_all_reduce`."""

_BLOCK = tl.constexpr(BLOCK)
_SIGNALS_AT, _HALF = tl.constexpr(2 * MAX_NUMBERS), tl.constexpr(MAX_NUMBERS)
_PROGRAMS = tl.constexpr(MAX_PROGRAMS)


def symmetric_words(num_ranks: int) -> int:
    """32-bit words of each rank's symmetric memory: two halves of float32, then a signal of each rank and program.
    Zeros at first."""
    return 2 * MAX_NUMBERS + num_ranks * MAX_PROGRAMS


def sum_partials(out: Tensor, partials: Tensor) -> None:
    """`out = partials.sum(0)`, in the order of the partials, in float32. out [T, H], partials [P, T, H], contiguous."""
    num = out.numel()
    assert partials.is_contiguous() and out.is_contiguous() and partials[0].numel() == num
    _sum[(triton.cdiv(num, BLOCK),)](out, partials, num, NUM_PARTIALS=len(partials), num_warps=4)


def one_shot_all_reduce(out: Tensor, partials: Tensor, addresses: Tensor, counts: Tensor, rank: int) -> None:
    """`out` = the sum of `partials.sum(0)` over the ranks, in their order. All ranks make the same launches.

    out [T, H] float32, which may be the only partial, partials [P, T, H] of any dtype, contiguous, of at most
    `MAX_NUMBERS` numbers each; addresses [R] int64 of the ranks' symmetric memory in this process; counts
    [MAX_PROGRAMS] int32 of this rank, zeros at first."""
    num = out.numel()
    assert num <= MAX_NUMBERS and partials.is_contiguous() and out.is_contiguous() and partials[0].numel() == num
    _one_shot[(triton.cdiv(num, BLOCK),)](
        *(out, partials, addresses, counts, num),
        RANK=rank,
        NUM_RANKS=len(addresses),
        NUM_PARTIALS=len(partials),
        num_warps=8,
    )


@triton.jit
def _own_sum(partials, at, inside, num, NUM_PARTIALS: tl.constexpr):
    total = tl.load(partials + at, mask=inside, other=0.0).to(tl.float32)
    for part in tl.static_range(1, NUM_PARTIALS):
        total += tl.load(partials + part * num.to(tl.int64) + at, mask=inside, other=0.0).to(tl.float32)
    return total


@triton.jit(do_not_specialize=["num"])
def _sum(out, partials, num, NUM_PARTIALS: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * _BLOCK + tl.arange(0, _BLOCK)
    inside = at < num
    total = _own_sum(partials, at, inside, num, NUM_PARTIALS)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num"])
def _one_shot(
    out,
    partials,
    addresses,
    counts,
    num,
    RANK: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    NUM_PARTIALS: tl.constexpr,
):
    program = tl.program_id(0)
    at = program * _BLOCK + tl.arange(0, _BLOCK)
    inside = at < num
    count = tl.load(counts + program) + 1
    half = (count & 1) * _HALF + at
    own = tl.load(addresses + RANK)
    total = _own_sum(partials, at, inside, num, NUM_PARTIALS)
    tl.store(own.to(tl.pointer_type(tl.float32)) + half, total, mask=inside)
    # All threads have stored before one of them releases.
    tl.debug_barrier()
    for rank in tl.static_range(NUM_RANKS):
        if rank != RANK:
            signals = tl.load(addresses + rank).to(tl.pointer_type(tl.int32)) + _SIGNALS_AT
            tl.atomic_xchg(signals + RANK * _PROGRAMS + program, count, sem="release", scope="sys")
    signals = own.to(tl.pointer_type(tl.int32)) + _SIGNALS_AT
    for rank in tl.static_range(NUM_RANKS):
        if rank != RANK:
            signal = signals + rank * _PROGRAMS + program
            seen = tl.atomic_add(signal, 0, sem="acquire", scope="sys")
            while seen - count < 0:  # the counts may wrap
                seen = tl.atomic_add(signal, 0, sem="acquire", scope="sys")
    tl.debug_barrier()
    total = tl.zeros((_BLOCK,), tl.float32)
    for rank in tl.static_range(NUM_RANKS):
        source = tl.load(addresses + rank).to(tl.pointer_type(tl.float32))
        # Volatile: a cache of this multiprocessor may hold what was there two launches ago.
        total += tl.load(source + half, mask=inside, other=0.0, volatile=True)
    tl.store(out + at, total, mask=inside)
    tl.store(counts + program, count)
