"""Divides the attention of one step among a fixed number of programs.

All work of a step forms a line: its entries in order, in each entry the key-value heads, in each head the query blocks
(*units*: some tokens x the heads of a group, one tile of queries), and in each unit its keys. The line is cut at equal
distances, one piece for each program:

    units      |  a  |  b  |       c       | d |         e         |
    programs   |     0     |     1     |     2     |       3       |
                           ^ moved to the end of b, which was near
                                       ^ inside c: programs 1 and 2 share it, each with a partial result

So the same grid serves one row of a hundred thousand keys, where many programs share every unit, and a thousand rows,
where each program has several units: no batch size switches the method. At most two units of a program are shared, so
memory for two partial results per program is enough.

- A cut near the boundary of two units is moved there (`Tile.least_part`): a partial result costs more than a slightly
  longer piece. Units that are much shorter than a piece are never cut.
- A piece has at least `Tile.min_tiles` tiles, because short ones are not worth sharing. But while there are enough
  programs, each unit has its own, so that short units run in parallel.
- A query block costs its keys and one more tile, so many short rows are divided evenly too. Keys outside the window,
  and behind the ends of tokens, cost nothing.

Entries of few tokens, of some and of many are in three lists with different tiles: a wide tile for a single token would
waste nearly all of its rows, and narrow tiles for a chunk would read keys again for every few tokens. The step's shape
decides which lists there are, as a captured graph needs it. The GPU sorts the entries into them.

`plan` makes one launch per list, see plan.py.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pipeline.kernels.attention.paged_attention import ScoreOptions
from pipeline.kernels.triton.attention.plan import ends_kernel, plan_kernel
from pipeline.kernels.triton.kv_cache import shape_of
from pipeline.kernels.triton.launch import next_power_of_2, num_multiprocessors
from pipeline.kernels.triton.rows import StepArrays

CUT_FIELDS = 16
"""int32 of a cut: rank of its entry, head, query block, first tile after the cut, number of the unit, first cut inside
this unit (-1: the cut is at the unit's begin), number of those cuts, unused; row, start, count and offset of the entry,
so that a program need not load its rank first; unused."""
ENTRY_FIELDS = 4
"""int32 of an entry of a list: row, start, count, offset."""
NO_CHUNKS = 512
"""Steps with at most this number of tokens have no list of long chunks, which saves a launch per layer."""
FEW_ENTRIES = 32
"""Decode steps with at most this number of entries have smaller tiles and shorter pieces: their time is that of a
program's loads one after the other, not that of all bytes."""
_ANY_COUNT = 2**30
LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class Tile:
    """Sizes of one variant of the kernel."""

    rows: int
    """Queries: tokens x heads of a group."""
    keys: int
    num_warps: int
    num_stages: int
    programs: int
    """Programs per multiprocessor at a time; registers and shared memory must allow it."""
    min_tiles: int
    """The smallest piece of a program, unless there are more units than such pieces."""
    least_part: int
    """Least number of tiles on both sides of a cut inside a unit; at least a 32nd of a piece too."""
    combined: int
    """Numbers to read at a time when partial results are combined: partial results x rows x dimensions."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """The tiles for one model."""

    few: Tile
    """For decode steps of at most `FEW_ENTRIES` entries."""
    narrow: Tile
    """For entries that fit into one narrow tile, and for other decode steps."""
    middle: Tile
    """For entries that fit into two middle tiles, such as the ends of prompts."""
    wide: Tile
    """For longer chunks, in steps of more than `NO_CHUNKS` tokens."""


def choose_tiles(
    num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, *, quantized: bool = False
) -> Tiles:
    """Sizes for an H100, for queries of `dtype` and keys and values of the same or, `quantized`, in 8 bits. Those of
    few rows were measured (docs/performance.md), the others are reasoned.

    A narrow tile is bound by bytes: 32 KiB of keys and values, two in flight, two programs per multiprocessor. That is
    five times what hides the memory's latency at full speed (24 KiB per multiprocessor at 3.3 TB/s and 1 us). A middle
    tile is the smallest for Hopper's tensor cores (64 rows, one group of four warps). A wide one reads keys half as
    often. Codes take registers while they are converted, so narrow and middle tiles have half as many of them.
    """
    group, padded = num_heads // num_kv_heads, next_power_of_2(head_dim)
    key_bytes = 2 * padded * dtype.itemsize
    least_rows = max(16, next_power_of_2(group))
    share = 2 if quantized else 1
    keys = min(128, max(16, 32768 // key_bytes))
    narrow = Tile(least_rows, max(16, keys // share), 4, 3, 2, 4, 2, 1024)
    if dtype.itemsize > 2:
        # A float32 matmul is three in tf32, which takes registers. float32 is not meant to be fast.
        narrow = Tile(least_rows, min(64, max(16, 16384 // key_bytes)), 4, 2, 2, 4, 1, 512)
        middle = Tile(max(32, least_rows), narrow.keys, 8, 2, 1, 4, 1, 2048)
        return Tiles(narrow, narrow, middle, middle)
    few = narrow
    if least_rows == 16 and head_dim in (64, 128):  # of other sizes, two warps have too few registers
        few = replace(narrow, keys=8192 // key_bytes, num_warps=2, min_tiles=2 if head_dim == 64 else 3, least_part=1)
    if padded > 128:
        few = replace(narrow, keys=16, min_tiles=3, least_part=1)  # a larger tile needs more registers than there are
        middle = Tile(max(64, least_rows), max(16, 32768 // key_bytes // share), 8, 2, 1, 4, 2, 8192)
        return Tiles(few, narrow, middle, middle)
    middle = Tile(max(64, least_rows), 64 // share, 4, 3, 2, 4, 2, 4096)
    wide = Tile(max(128, least_rows), 64, 8, 3, 1, 8, 4, 8192)
    return Tiles(few, narrow, middle, wide)


class Scratch:
    """Memory for the partial results of shared units. All layers and windows of a model use the same, because nothing
    in it outlives a launch."""

    def __init__(self, tiles: Tiles, head_dim: int, device: torch.device) -> None:
        num_rows = (
            2
            * num_multiprocessors(device)
            * max(tile.programs * tile.rows for tile in (tiles.few, tiles.narrow, tiles.middle, tiles.wide))
        )
        self.sums = torch.zeros(num_rows * next_power_of_2(head_dim), dtype=torch.float32, device=device)
        """[2P, rows of a tile, D padded]; values weighted by exp2(score - largest score)"""
        self.scales = torch.zeros(2 * num_rows, dtype=torch.float32, device=device)
        """[2, 2P, rows of a tile]; largest scores, and the weights' sums"""


class TaskList:
    """The entries of one launch, divided among its programs."""

    def __init__(self, tile: Tile, num_programs: int, max_entries: int, device: torch.device) -> None:
        self.tile = tile
        self.num_programs = num_programs
        self.cuts = torch.zeros((num_programs + 1, CUT_FIELDS), dtype=torch.int32, device=device)
        self.entries = torch.zeros((max_entries + 1, ENTRY_FIELDS), dtype=torch.int32, device=device)
        """The entries of the list, packed. One more after the last is loaded, but not used."""
        self.arrivals = torch.zeros(num_programs + 1, dtype=torch.int32, device=device)
        """Number of complete partial results of a shared unit, by the unit's first cut. Every layer adds its number, so
        between launches it is a multiple of the unit's programs."""


class AttentionTasks:
    """The division of one step's attention, for all layers with the same window. `plan` updates it in place."""

    def __init__(
        self,
        max_entries: int,
        max_tokens: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        window: int | None,
        *,
        scratch: Scratch | None = None,
        tiles: Tiles | None = None,
        quantized: bool = False,
        form: ScoreOptions | None = None,
        window_after: int | None = None,
    ) -> None:
        """`dtype` is that of queries; keys and values are of the same or, `quantized`, in 8 bits. Windows that share
        `scratch` must have the same `tiles`."""
        self.form = form = form or ScoreOptions()
        scale = head_dim**-0.5 if form.scale is None else form.scale
        assert scale > 0
        self.scale = scale * LOG2_E
        """Products of queries and keys times this are exponents of 2."""
        self.cap = 0.0 if form.softcap is None else form.softcap / scale
        """The cap of these products; 0 for none."""
        self.slopes = None if form.slopes is None else (form.slopes / scale).to(device, torch.float32)
        """[Q], in units of these products"""
        assert num_heads % num_kv_heads == 0
        assert max_tokens * num_kv_heads < 2**31, "units are numbered by an int32"
        assert window is None or window >= 1
        self.tiles = tiles or choose_tiles(num_heads, num_kv_heads, head_dim, dtype, quantized=quantized)
        for tile in (self.tiles.few, self.tiles.narrow, self.tiles.middle, self.tiles.wide):
            assert tile.rows >= num_heads // num_kv_heads, "a tile must hold at least one token"
            assert tile.min_tiles >= 2, "two cuts would be on the same tile"
        self.scratch = scratch or Scratch(self.tiles, head_dim, device)
        self.max_entries = max_entries
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.window, self.window_after = window, window_after
        self.ends = torch.zeros((2, max_entries), dtype=torch.int32, device=device)
        """Of the entries of a step with key ends: the last one, and how far they are behind their tokens."""
        num = num_multiprocessors(device)
        self.few, self.narrow, self.middle, self.wide = (
            TaskList(tile, num * tile.programs, max_entries, device)
            for tile in (self.tiles.few, self.tiles.narrow, self.tiles.middle, self.tiles.wide)
        )
        self.lists = [self.narrow]
        """The lists of the last planned step."""

    @property
    def group(self) -> int:
        """Query heads per key-value head."""
        return self.num_heads // self.num_kv_heads

    def tokens_of(self, tile: Tile) -> int:
        """Tokens of one query block."""
        return tile.rows // self.group

    def plan(self, step: StepArrays, *, one_each: bool = False) -> None:
        """Divide the step: once per step, before the first layer, with one launch per list. With `one_each` no entry
        has more than one token."""
        assert step.num_entries <= self.max_entries, f"{step.num_entries} entries in a step, at most {self.max_entries}"
        self.lists = [self.few if one_each and step.num_entries <= FEW_ENTRIES else self.narrow]
        if not one_each:
            self.lists.append(self.middle)
            if step.num_tokens > NO_CHUNKS:
                self.lists.append(self.wide)
        if step.key_ends is not None:
            ends_kernel[(step.num_entries,)](
                self.ends,
                step.key_ends,
                step.starts,
                step.counts,
                step.offsets,
                NUM=self.max_entries,
                WINDOW_AFTER=-1 if self.window_after is None else self.window_after,
                BLOCK_T=256,
            )
        mosts = [self.tokens_of(self.narrow.tile), 2 * self.tokens_of(self.middle.tile)]
        least = 1
        for tasks, most in zip(self.lists, [*mosts[: len(self.lists) - 1], _ANY_COUNT], strict=True):
            self._plan_list(tasks, step, least, most)
            least = most + 1

    def _plan_list(self, tasks: TaskList, step: StepArrays, least: int, most: int) -> None:
        """Divide the entries that have at least `least` and at most `most` tokens."""
        tile = tasks.tile
        plan_kernel[(max(tasks.num_programs + 1, step.num_entries),)](
            tasks.cuts,
            tasks.entries,
            tasks.arrivals,
            self.ends,
            step.rows,
            step.starts,
            step.counts,
            step.offsets,
            step.num_entries,
            ENDS=step.key_ends is not None,
            NUM=self.max_entries,
            NUM_KV_HEADS=self.num_kv_heads,
            WINDOW=self.window or 0,
            LEAST=least,
            MOST=most,
            BLOCK_Q=self.tokens_of(tile),
            BLOCK_N=tile.keys,
            MIN_KEYS=tile.min_tiles * tile.keys,
            OVERHEAD=max(tile.keys, 64),
            LEAST_PART=tile.least_part,
            NUM_PROGRAMS=tasks.num_programs,
            PROGRAMS=next_power_of_2(tasks.num_programs + 1),
            ENTRIES=max(16, next_power_of_2(self.max_entries)),
            CUT_FIELDS=CUT_FIELDS,
            ENTRY_FIELDS=ENTRY_FIELDS,
            num_warps=4,
        )


def check_cache(keys: Tensor, values: Tensor, tasks: AttentionTasks) -> None:
    """Assert the layout of one layer's keys and values, which are contiguous; see kv_cache.py."""
    assert keys.shape == values.shape and keys.dtype == values.dtype
    assert keys.shape == shape_of(len(keys), tasks.num_kv_heads, tasks.head_dim, keys.dtype), keys.shape
    assert keys.is_contiguous() and values.is_contiguous()
