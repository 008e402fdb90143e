"""Checks paged attention and the kernels that write the KV cache: decode, drafts, prefill chunks and mixed steps, with
the heads of three models.

Shapes: T tokens, Q query heads, K key-value heads, D head_dim.
"""

import random
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pipeline.kernels.triton.launch import INTERPRETED
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.stages.execute.layers.rope import rope_frequencies, rope_table
from tools.gpu_check import gpu
from tools.gpu_check.child import Context, Item
from tools.gpu_check.kernels import random_steps
from tools.gpu_check.kernels.checking import MANY_REPEATS, REPEATS, ROUNDED, check_exact, check_output
from tools.gpu_check.kernels.random_steps import Entry, RandomStep
from tools.gpu_check.readings import Reading
from tools.gpu_check.shapes import LLAMA_1B, LLAMA_8B, SMOLLM2_135M, TINY

MODELS = {"8B": LLAMA_8B, "1B": LLAMA_1B, "135M": SMOLLM2_135M}
DTYPE = torch.bfloat16
KINDS = ("chunk", "decode", "drafts")
ANGLES = 8192
"""Number of positions in the rotary tables."""


def items(context: Context) -> list[Item]:
    names = ["135M"] if context.interpreted else list(MODELS)
    # One item for each kind, so that a kernel that doesn't compile fails only its own cases.
    made = [
        Item(f"attention, {name}: {kind}", partial(_attention, name=name, kind=kind), 5, 120)
        for kind in KINDS
        for name in names
    ]
    made += [Item(f"rotation, {name}", partial(_rotation, name=name)) for name in names]
    made += [Item(f"attention of few rows, {name}", partial(_few, name=name)) for name in names]
    return made


def _config(context: Context, name: str) -> ModelConfig:
    return TINY if context.interpreted else MODELS[name]


def cases(context: Context) -> dict[str, tuple[list[Entry], int | None]]:
    """Entries and window, by case name. Each name begins with one of KINDS."""
    if context.interpreted:
        return {"decode 3, window 7": ([(5, 1), (20, 1), (0, 0)], 7), "chunk and decode": ([(3, 9), (11, 1)], None)}
    draw = random.Random(1)

    def decode(num: int, most: int) -> list[Entry]:
        return [(draw.randrange(most), 1) for _ in range(num)]

    return {
        "decode 1 at 1,000": ([(1000, 1)], None),
        "decode 1 at 8,000": ([(8000, 1)], None),
        "decode 12": (decode(12, 2000), None),
        "decode 128, some ended": ([*decode(120, 1500), *[(100, 0)] * 8], None),
        "decode 40, window 512": (decode(40, 2000), 512),
        "drafts of 4 for 24 rows": ([(draw.randrange(1500), 4) for _ in range(24)], None),
        "drafts of 8 for 3 rows": ([(draw.randrange(3000), 8) for _ in range(3)], None),
        "chunk of 2,048": ([(0, 2048)], None),
        "chunks and 40 rows": ([(300, 700), (0, 129), (1024, 33), *decode(40, 1000), (77, 0)], None),
        "chunk of 500, window 100": ([(700, 500), *decode(3, 900)], 100),
    }


def _attention(context: Context, name: str, kind: str) -> Iterator[Reading]:
    from pipeline.kernels.triton.attention.prefill import attend

    config = _config(context, name)
    heads, head_dim = config.num_heads, config.head_dim
    for case, (entries, window) in cases(context).items():
        if not case.startswith(kind):
            continue
        made = random_steps.make(entries, config.num_kv_heads, head_dim, DTYPE, padding=3)
        tasks = _tasks(config, made, window)
        num = len(made.live)
        queries = gpu.random(7, num, heads * head_dim, dtype=DTYPE)
        out = torch.empty_like(queries)
        right = random_steps.attention(queries, made, heads, window).view(num, -1)

        def run(made: RandomStep = made, tasks: Any = tasks, out: Tensor = out, queries: Tensor = queries) -> None:
            tasks.plan(made.arrays, one_each=max(count for _, count in made.entries) <= 1)
            attend(out, queries, made.keys, made.values, made.arrays, tasks)

        yield _only_live(f"attention, {name}: {case}", run, out, right, made)


def _only_live(case: str, run: Any, out: Tensor, right: Tensor, made: RandomStep) -> Reading:
    """Compare the live tokens. The others must not be written."""
    live = made.live
    found = torch.empty(int(live.sum()), out.shape[1], dtype=out.dtype, device=out.device)
    untouched = True

    def gathered() -> None:
        nonlocal untouched
        gpu.poison(out)
        run()
        found.copy_(out[live])
        untouched &= bool(out[~live].isnan().all())

    repeats = REPEATS if INTERPRETED else MANY_REPEATS
    beside = _beside()

    def delayed() -> None:
        next(beside)
        gathered()

    reading = check_output(case, delayed, found, right[live], ROUNDED, repeats=repeats)
    return reading if untouched else check_exact(case, False, "padding tokens were written")


def _beside() -> Iterator[None]:
    """Start a copy on another stream at each iteration, so that programs are delayed differently from run to run."""
    if INTERPRETED:
        while True:
            yield
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    source = torch.empty(1 << 24, dtype=torch.int32, device=gpu.device())
    target = torch.empty_like(source)
    while True:
        with torch.cuda.stream(stream):
            target.copy_(source)
        yield


def _tasks(config: ModelConfig, made: RandomStep, window: int | None) -> Any:
    from pipeline.kernels.triton.attention.tasks import AttentionTasks

    return AttentionTasks(
        made.arrays.num_entries,
        made.arrays.num_tokens,
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        DTYPE,
        gpu.device(),
        window,
    )


# ---------------------------------------------------------------------------------------------------------- rotation


def _angles(config: ModelConfig) -> tuple[Tensor, Tensor]:
    frequencies = rope_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
    cos, sin = (torch.from_numpy(table).to(gpu.device()) for table in rope_table(frequencies, ANGLES))
    return cos, sin


def turned(heads: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """heads [T, n, D] float64 by the tables' angles at positions [T]."""
    half = heads.shape[-1] // 2
    first, second = heads[..., :half], heads[..., half:]
    c, s = (table[positions.long()].double()[:, None] for table in (cos, sin))
    return torch.cat([first * c - second * s, second * c + first * s], -1)


def _normed(heads: Tensor, weight: Tensor, eps: float) -> Tensor:
    return heads / torch.sqrt((heads * heads).mean(-1, keepdim=True) + eps) * weight.double()


HeadNorms = tuple[Tensor, Tensor, float]


def split_heads(
    partials: Tensor,
    config: ModelConfig,
    step: RandomStep,
    angles: tuple[Tensor, Tensor],
    norms: HeadNorms | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [T, Q, D], keys and values [T, K, D] of parts [P, T, (Q + 2K) * D], float64, turned."""
    num_heads, num_kv_heads = config.num_heads, config.num_kv_heads
    heads = partials.double().sum(0).view(partials.shape[1], -1, config.head_dim)
    queries, keys, values = torch.split(heads, [num_heads, num_kv_heads, num_kv_heads], 1)
    if norms is not None:
        queries, keys = _normed(queries, norms[0], norms[2]), _normed(keys, norms[1], norms[2])
    positions = step.arrays.positions
    return turned(queries, positions, *angles), turned(keys, positions, *angles), values


def _split_k_partials(config: ModelConfig, num: int, num_split_k_partials: int) -> Tensor:
    width = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    return gpu.random(21, num_split_k_partials, num, width, dtype=DTYPE if num_split_k_partials == 1 else torch.float32)


def _rotation(context: Context, name: str) -> Iterator[Reading]:
    from pipeline.kernels.triton.rotary import rotary_write

    config = _config(context, name)
    cos, sin = _angles(config)
    entries: Sequence[Entry] = [(3, 2), (0, 1)] if context.interpreted else [(500, 33), (77, 1), (9, 0), (4000, 1)]
    for num_split_k_partials, norms in ((3, None), (1, _head_norms(config))):
        made = random_steps.make(entries, config.num_kv_heads, config.head_dim, DTYPE, padding=2)
        num = len(made.live)
        partials = _split_k_partials(config, num, num_split_k_partials)
        queries = torch.empty(num, config.num_heads * config.head_dim, dtype=DTYPE, device=gpu.device())
        right = split_heads(partials, config, made, (cos, sin), norms)

        def run(queries=queries, partials=partials, made=made, norms=norms) -> None:  # type: ignore[no-untyped-def]
            rotary_write(queries, partials, cos, sin, made.arrays, made.keys, made.values, norms)

        case = f"rotation, {name}, {num_split_k_partials} parts{', norms of heads' if norms else ''}"
        live = made.live
        found = torch.empty(int(live.sum()), queries.shape[1], dtype=DTYPE, device=gpu.device())

        def gathered(run=run, found=found, queries=queries, live=live) -> None:  # type: ignore[no-untyped-def]
            run()
            found.copy_(queries[live])

        yield check_output(f"{case}: queries", gathered, found, right[0].view(num, -1)[live], ROUNDED)
        for what, cache, wanted in (("keys", made.keys, right[1]), ("values", made.values, right[2])):
            yield _written(f"{case}: {what}", run, cache, made, wanted)


def _written(case: str, run: Any, cache: Tensor, made: RandomStep, right: Tensor) -> Reading:
    """The step's own slots of a cache [num_blocks, K, BLOCK_SIZE, D] hold `right` [T, K, D]; others what they did."""
    slots = made.arrays.slots[made.live]
    flat = cache.transpose(1, 2).flatten(0, 1)  # a copy where it has to be
    before = flat.clone()
    found = torch.empty(len(slots), *cache.shape[1::2], dtype=cache.dtype, device=cache.device)
    others = torch.ones(len(flat), dtype=torch.bool, device=cache.device)
    others[slots] = False
    untouched = True

    def gathered() -> None:
        nonlocal untouched
        run()
        after = cache.transpose(1, 2).flatten(0, 1)
        found.copy_(after[slots])
        same = after[others].nan_to_num(12345.0) == before[others].nan_to_num(12345.0)
        untouched &= bool(same.all())

    reading = check_output(case, gathered, found, right[made.live], ROUNDED)
    return reading if untouched else check_exact(case, False, "slots of others were written")


def _head_norms(config: ModelConfig) -> HeadNorms:
    query, key = (1 + 0.1 * gpu.random(seed, config.head_dim) for seed in (31, 32))
    return query, key, 1e-6


# ---------------------------------------------------------------------------------------------------- few rows, fused


def _few(context: Context, name: str) -> Iterator[Reading]:
    """Fused rotation, cache write and attention, for decode steps with few rows."""
    from pipeline.kernels.triton.attention.decode import attend_decode

    config = _config(context, name)
    angles = _angles(config)
    draw = random.Random(2)
    nums = (2,) if context.interpreted else (1, 5, 16)
    for num_rows in nums:
        for window in (None, 9) if context.interpreted else (None, 700):
            starts = [(draw.randrange(40 if context.interpreted else 3000), 1) for _ in range(num_rows)]
            entries: list[Entry] = [*starts, (7, 0)]
            made = random_steps.make(entries, config.num_kv_heads, config.head_dim, DTYPE)
            num = len(made.live)
            norms = _head_norms(config) if num_rows == 5 else None
            partials = _split_k_partials(config, num, 2)
            queries, keys, values = split_heads(partials, config, made, angles, norms)
            # The reference reads the cache with the step's own keys and values in it, rounded like the kernel's.
            slots = made.arrays.slots[made.live]
            blocks, offsets = slots // made.keys.shape[2], slots % made.keys.shape[2]
            for cache, mine in ((made.keys, keys), (made.values, values)):
                cache[blocks, :, offsets] = mine[made.live].to(cache.dtype)
            right = random_steps.attention(queries.reshape(num, -1), made, config.num_heads, window).view(num, -1)
            tasks = _tasks(config, made, window)
            out = torch.empty(num, config.num_heads * config.head_dim, dtype=DTYPE, device=gpu.device())

            def run(  # type: ignore[no-untyped-def]
                out=out, partials=partials, made=made, tasks=tasks, norms=norms, slots=(blocks, offsets)
            ) -> None:
                for cache in (made.keys, made.values):
                    cache[slots[0], :, slots[1]] = torch.nan
                tasks.plan(made.arrays, one_each=True)
                attend_decode(out, partials, *angles, made.arrays, made.keys, made.values, tasks, norms)

            case = f"attention of few rows, {name}, {num_rows} rows{'' if window is None else f', window {window}'}"
            yield _only_live(case, run, out, right, made)
            yield _written(f"{case}: keys", run, made.keys, made, keys)
            yield _written(f"{case}: values", run, made.values, made, values)
