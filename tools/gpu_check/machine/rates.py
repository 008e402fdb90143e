"""Rates and latencies of the machine: the hardware limits, and the cost of each way to learn that a result is ready."""

import platform
import subprocess
import time
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from statistics import median

import torch
import triton
from torch import Tensor

from pipeline.kernels.triton.launch import INTERPRETED, num_multiprocessors
from tools.gpu_check import gpu
from tools.gpu_check.child import Context, Item
from tools.gpu_check.machine.kernels import fill, read_all, stamp, tick, tick_of_many
from tools.gpu_check.readings import Reading

COPY = "copy, read + written"
READ = "read only"
MATMUL = "product of 8192³, bf16"

GIB = 1 << 30
RESULT_WORDS = 512
"""The result of a step of 256 rows: ids and stop flags."""
SLEEP_CYCLES = 2_000_000
"""About a millisecond: long enough for a waiting host to sleep."""


def items(context: Context) -> list[Item]:
    return [
        Item("device", _device),
        Item("copy", _copy_rate),
        Item("read", _read_rate),
        Item("product", _product),
        Item("graphs", _graphs),
        Item("launches", _launches),
        Item("results", _results),
    ]


def bandwidth(context: Context) -> float:
    """Bytes per second that limit a step: measured by an earlier section, or now by torch's copy. It does not use this
    section's kernels, so that their failure affects no other figure."""
    rates = context.task.rates
    if COPY not in rates:
        reading = measure_copy(context)
        assert reading.value is not None
        rates[COPY] = reading.value
    return max(rates[COPY], rates.get(READ, 0.0)) * 1e9


# ------------------------------------------------------------------------------------------------------------- rates


def _device(context: Context) -> Iterator[Reading]:
    facts = {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "triton": triton.__version__,
        "cuda": str(torch.version.cuda),
    }
    if context.interpreted:
        yield Reading("device", note="none: interpreted", numbers=facts)
        return
    properties = torch.cuda.get_device_properties(0)
    facts |= {
        "name": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "capability": f"{properties.major}.{properties.minor}",
        "memory_bytes": properties.total_memory,
        "l2_bytes": properties.L2_cache_size,
        "driver": _driver(),
    }
    note = (
        f"{properties.name}, {properties.multi_processor_count} multiprocessors, "
        f"{properties.L2_cache_size / 2**20:.0f} MiB L2, driver {facts['driver']}, torch {facts['torch']}, "
        f"triton {facts['triton']}, Python {facts['python']}"
    )
    yield Reading("device memory", properties.total_memory / GIB, "GiB", note=note, numbers=facts)


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return f"unknown ({type(error).__name__})"
    return said.stdout.split("\n")[0].strip()


def _copy_rate(context: Context) -> Iterator[Reading]:
    yield measure_copy(context)


def _read_rate(context: Context) -> Iterator[Reading]:
    yield measure_read(context)


def measure_copy(context: Context) -> Reading:
    """Device memory to device memory; counts bytes read and bytes written."""
    num = GIB // 4 if not context.interpreted else 1 << 12
    memory = [_words(num, seed) for seed in range(3)]
    runs = [_copy(target, source) for target, source in (*pairwise(memory), (memory[0], memory[-1]))]
    found = gpu.time_runs(runs)
    num_bytes = 2 * num * 4
    return Reading(COPY, num_bytes / found.median_ms / 1e6, "GB/s", numbers={"bytes": num_bytes, "turns": found.num})


def measure_read(context: Context) -> Reading:
    """Device memory reads, by a kernel that sums what it reads."""
    block = 8192 if not context.interpreted else 256
    num_programs = 4 * num_multiprocessors(gpu.device())
    rounds = GIB // 2 // (block * num_programs) if not context.interpreted else 2
    num = rounds * num_programs * block
    memory = [_words(num, seed) for seed in range(2)]
    sums = torch.empty(num_programs, dtype=torch.int64, device=gpu.device())

    def read(words: Tensor) -> gpu.Run:
        return lambda: read_all[(num_programs,)](sums, words, rounds, num_programs, block, num_warps=8)

    found = gpu.time_runs([read(words) for words in memory])
    gpu.poison(sums)
    read(memory[0])()
    # Wrapping sums don't depend on the order.
    right = int(memory[0].sum(dtype=torch.int64).item()) & 0xFFFFFFFF
    assert int(sums.sum().item()) & 0xFFFFFFFF == right, "the read kernel returned a wrong sum"
    return Reading(READ, num * 4 / found.median_ms / 1e6, "GB/s", numbers={"bytes": num * 4, "turns": found.num})


def _product(context: Context) -> Iterator[Reading]:
    size = 8192 if not context.interpreted else 16
    sides = [gpu.random(seed, size, size, dtype=torch.bfloat16) for seed in range(4)]
    out = torch.empty_like(sides[0])
    found = gpu.time_runs([_multiply(out, a, b) for a, b in pairwise(sides)], 500)
    yield Reading(MATMUL, 2 * size**3 / found.median_ms / 1e9, "TFLOP/s", numbers={"turns": found.num})


def _words(num: int, seed: int) -> Tensor:
    generator = torch.Generator(gpu.device()).manual_seed(seed)
    return torch.randint(-(2**31), 2**31, (num,), generator=generator, device=gpu.device(), dtype=torch.int32)


def _copy(target: Tensor, source: Tensor) -> gpu.Run:
    return lambda: target.copy_(source)


def _multiply(out: Tensor, a: Tensor, b: Tensor) -> gpu.Run:
    return lambda: torch.mm(a, b, out=out)


# ---------------------------------------------------------------------------------------------------------- launches


def _graphs(context: Context) -> Iterator[Reading]:
    """GPU time of one more kernel in a graph, and host time of a graph launch. Each kernel increments the same counter,
    so none can start before its predecessor ends."""
    for early in (False, True):
        nodes: dict[int, float] = {}
        replays: dict[int, float] = {}
        counter = torch.zeros(1, dtype=torch.int32, device=gpu.device())
        for num in (50, 200) if not context.interpreted else (2, 4):
            replay = gpu.graph(partial(_ticks, counter, early, num))
            counter.zero_()
            nodes[num] = gpu.time_runs([replay], 100).median_ms * 1e3
            replays[num] = _host_us(replay, 100 if not context.interpreted else 2)
            counter.zero_()
            for _ in range(10):
                replay()
            assert int(counter.item()) == 10 * num, f"{int(counter.item())} ticks of {10 * num}"
        (few, few_us), (many, many_us) = nodes.items()
        how = ", launched early (PDL)" if early else ""
        yield Reading(
            f"kernel of a graph{how}",
            (many_us - few_us) / (many - few),
            "µs",
            less_is_better=True,
            numbers={f"{num}_us": value for num, value in nodes.items()},
        )
        yield Reading(
            f"host: launch of a graph of {many}{how}",
            replays[many],
            "µs",
            less_is_better=True,
            note=f"{replays[few]:.1f} µs for one of {few}",
        )


def _ticks(counter: Tensor, early: bool, num: int) -> None:
    for _ in range(num):
        _tick(counter, early)


def _tick(counter: Tensor, early: bool) -> None:
    if early and not INTERPRETED:
        tick[(1,)](counter, True, num_warps=1, launch_pdl=True)
    else:
        tick[(1,)](counter, False, num_warps=1)


def _launches(context: Context) -> Iterator[Reading]:
    counter = torch.zeros(1, dtype=torch.int32, device=gpu.device())
    num = 300 if not context.interpreted else 2

    def many() -> None:
        tick_of_many[(1,)](*[counter] * 12, num, 7, 9, 11, 128, num_warps=1)

    cases: list[tuple[str, gpu.Run]] = [
        ("a Triton kernel of 1 argument", lambda: _tick(counter, False)),
        ("a Triton kernel of 17 arguments", many),
        ("torch's add_", lambda: counter.add_(1)),
    ]
    for case, run in cases:
        yield Reading(f"host: launch of {case}", _host_us(run, num), "µs", less_is_better=True)


def _host_us(run: gpu.Run, num: int) -> float:
    """Host time of one of `num` launches that don't wait for the GPU."""
    run()
    gpu.synchronize()
    began_s = time.perf_counter()
    for _ in range(num):
        run()
    took_s = time.perf_counter() - began_s
    gpu.synchronize()
    return took_s / num * 1e6


# ----------------------------------------------------------------------------------------------------------- results


def _results(context: Context) -> Iterator[Reading]:
    """Median time from a launch to the result on the host. The result is copied to pinned memory after the kernel, or
    written there by the kernel. The host waits for an event (asleep or spinning) or polls the memory."""
    step = torch.zeros(1, dtype=torch.int32, device=gpu.device())
    inside = torch.zeros(RESULT_WORDS, dtype=torch.int32, device=gpu.device())
    outside = gpu.pinned(RESULT_WORDS, torch.int32)
    mapped = gpu.pinned(RESULT_WORDS, torch.int32)
    word = gpu.pinned(1, torch.int64)

    def copied() -> None:
        fill[(1,)](inside, step, RESULT_WORDS, num_warps=4)
        outside.copy_(inside, non_blocking=True)

    def written() -> None:
        fill[(1,)](mapped, step, RESULT_WORDS, num_warps=4)
        stamp[(1,)](word, 1, not INTERPRETED, num_warps=1)

    ways: list[tuple[str, gpu.Run, Tensor, str]] = [
        ("copied to pinned memory, event, asleep", copied, outside, "asleep"),
        ("copied to pinned memory, event, spinning", copied, outside, "spinning"),
        ("written to mapped memory, event, asleep", written, mapped, "asleep"),
        ("written to mapped memory, polled", written, mapped, "looking"),
    ]
    for way, run, result, how in ways:
        replay = gpu.graph(run)
        event = gpu.TimedEvent(blocking=how == "asleep")
        times_us, late = [], 0
        for i in range(200 if not context.interpreted else 2):
            gpu.synchronize()
            number, before = int(step.item()), int(word[0])
            began_s = time.perf_counter()
            replay()
            if how == "looking":
                _look(word, before)
            else:
                event.record()
                event.wait()
            times_us.append((time.perf_counter() - began_s) * 1e6)
            late += int(result[0]) != number or int(result[-1]) != number + RESULT_WORDS - 1
            if i % 20 == 19:
                time.sleep(0.001)  # a host that has slept resumes more slowly
        yield Reading(
            f"result {way}",
            median(times_us),
            "µs",
            less_is_better=True,
            result="FAIL" if late else "",
            note=f"{late} of {len(times_us)} were incomplete when the host saw them" if late else "",
            numbers={"p90_us": sorted(times_us)[len(times_us) * 9 // 10]},
        )
    yield from _wakes(context, word)


def _wakes(context: Context, word: Tensor) -> Iterator[Reading]:
    """Time from the GPU's last kernel until a host that slept for a millisecond is awake. The clocks are aligned first:
    polling memory is the fastest way to see the GPU's time, so its shortest delay counts as 0."""
    if context.interpreted:
        yield Reading("host awake after an event, asleep", 0.0, "µs", less_is_better=True)
        return
    offset_ns = min(time.perf_counter_ns() - seen for seen in (_seen(word) for _ in range(300)))
    for how in ("asleep", "spinning"):
        event = gpu.TimedEvent(blocking=how == "asleep")
        late_us = []
        for _ in range(50):
            torch.cuda._sleep(SLEEP_CYCLES)  # type: ignore[no-untyped-call]
            stamp[(1,)](word, 1, True, num_warps=1)
            event.record()
            event.wait()
            late_us.append((time.perf_counter_ns() - offset_ns - int(word[0])) / 1e3)
        yield Reading(
            f"host awake after an event, {how}",
            median(late_us),
            "µs",
            less_is_better=True,
            note="relative to the GPU's own timestamp",
            numbers={"p90_us": sorted(late_us)[45]},
        )


def _seen(word: Tensor) -> int:
    """The host's view of the GPU's clock, by polling."""
    before = int(word[0])
    stamp[(1,)](word, 1, True, num_warps=1)
    return _look(word, before)


def _look(word: Tensor, before: int) -> int:
    """Poll a word of mapped memory until it changes. Raises TimeoutError after a second."""
    numbers = word.numpy()
    end_s = time.perf_counter() + 1.0
    while (now := int(numbers[0])) == before:
        if time.perf_counter() > end_s:
            raise TimeoutError("the GPU wrote nothing to mapped memory within a second")
    return now
