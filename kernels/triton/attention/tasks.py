"""How the attention of one step is divided among a fixed number of programs.

All work of a step is laid on a line: entry after entry, in it one key-value head after the other, in that one query
block after the other (a *unit*: some tokens x the heads of a group, one tile of queries), and in a unit its keys. The
line is cut at equal distances, one piece for each program:

    units      |  a  |  b  |       c       | d |         e         |
    programs   |     0     |     1     |     2     |       3       |
                           ^ moved to the end of b, which was near
                                       ^ inside of c: programs 1 and 2 share it, and each leaves a part

So the same grid serves one row of a hundred thousand keys, where every unit is shared by many programs, and a thousand
rows, where each program has several units of its own: there is no batch size where one way ends and another begins. At
most two units of a program are shared, whatever the step, so memory for two parts a program is enough.

- A cut that falls near the boundary of two units is moved there (`Tile.least_part`): a part costs more than a slightly
  longer piece. Units that are short beside a share are never cut.
- A program's share is not less than `Tile.min_tiles`, for what is short is not worth sharing. But as long as there are
  programs, each unit has one: short units are done beside each other, not one after the other.
- A query block costs its keys and a tile besides, so many short rows are divided evenly too. Keys outside the window
  cost nothing.

Entries of few tokens, of some and of many are three lists, each with tiles of its own size: a wide tile for a single
token would waste nearly all of its rows, a narrow one for a chunk would read keys again for every few tokens. Which
lists there are follows from the step's shape, as a recorded graph needs it; who is in which, the GPU finds.

`plan` is one launch a list, `attention_plan.py`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.kernels.step_inputs import BLOCK_SIZE
from pipeline.kernels.triton.attention.plan import plan_kernel
from pipeline.kernels.triton.launch import next_power_of_2, num_multiprocessors
from pipeline.kernels.triton.rows import StepArrays

CUT_FIELDS = 16
"""int32 of a cut: rank of its entry, head, query block, first tile behind the cut, number of the unit, first of the
cuts inside of this unit (-1: the cut is at the unit's begin), how many they are, nothing; row, start, count and offset
of the entry, so that a program need not wait for its rank first; nothing."""
ENTRY_FIELDS = 4
"""int32 of an entry of a list: row, start, count, offset."""
NO_CHUNKS = 512
"""Tokens of a step up to which it has no list of long chunks: a launch less for each layer."""
_ANY_COUNT = 2**30


@dataclass(frozen=True, slots=True)
class Tile:
    """Sizes of one variant of the kernel."""

    rows: int
    """Queries: tokens x heads of a group."""
    keys: int
    num_warps: int
    num_stages: int
    programs: int
    """On one multiprocessor at a time; registers and shared memory have to allow it."""
    min_tiles: int
    """The least share of a program, where there are no more units than such shares."""
    least_part: int
    """Tiles on both sides of a cut inside of a unit: fewer are not worth a part. They are not less than a 32nd of a
    share either."""
    combined: int
    """Numbers that are read at once where parts are combined, parts x rows x dimensions."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """Those of one model."""

    narrow: Tile
    """For entries that one such tile holds, and for steps that only decode."""
    middle: Tile
    """For entries that two such tiles hold: drafts being verified, ends of prompts."""
    wide: Tile
    """For longer chunks, in steps where they can be many tokens."""


def choose_tiles(num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> Tiles:
    """Sizes for an H100. Reasoned, not measured.

    A narrow tile is bound by bytes: 32 KiB of keys and values, two in flight, two programs a multiprocessor, which is
    five times what hides the memory's latency at its full speed (24 KiB a multiprocessor at 3.3 TB/s and 1 us). A
    middle one is the least that the multiplying units of Hopper take as a whole (64 rows, one group of four warps). A
    wide one reads keys half as often.
    """
    group, padded = num_heads // num_kv_heads, next_power_of_2(head_dim)
    key_bytes = 2 * padded * dtype.itemsize
    least_rows = max(16, next_power_of_2(group))
    keys = min(128, max(16, 32768 // key_bytes))
    narrow = Tile(least_rows, keys, 4, 3, 2, 4, 2, 1024)
    if dtype.itemsize > 2:
        # Products of float32 are three of tf32: registers are short, and speed is not what it is asked for.
        narrow = Tile(least_rows, min(64, max(16, 16384 // key_bytes)), 4, 2, 2, 4, 1, 512)
        middle = Tile(max(32, least_rows), narrow.keys, 8, 2, 1, 4, 1, 2048)
        return Tiles(narrow, middle, middle)
    if padded > 128:
        middle = Tile(max(64, least_rows), max(16, 32768 // key_bytes), 8, 2, 1, 4, 2, 8192)
        return Tiles(narrow, middle, middle)
    middle = Tile(max(64, least_rows), 64, 4, 3, 2, 4, 2, 4096)
    wide = Tile(max(128, least_rows), 64, 8, 3, 1, 8, 4, 8192)
    return Tiles(narrow, middle, wide)


class Scratch:
    """Memory for the parts of shared units. One serves all layers and windows of a model: a launch leaves nothing in
    it that a later one reads."""

    def __init__(self, tiles: Tiles, head_dim: int, device: torch.device) -> None:
        num_rows = (
            2
            * num_multiprocessors(device)
            * max(tile.programs * tile.rows for tile in (tiles.narrow, tiles.middle, tiles.wide))
        )
        self.sums = torch.zeros(num_rows * next_power_of_2(head_dim), dtype=torch.float32, device=device)
        """[2P, rows of a tile, D padded]; values weighted by exp2(score - largest score)"""
        self.scales = torch.zeros(2 * num_rows, dtype=torch.float32, device=device)
        """[2, 2P, rows of a tile]; largest scores, and the weights' sums"""


class TaskList:
    """What one launch of attention works off."""

    def __init__(self, tile: Tile, num_programs: int, max_entries: int, device: torch.device) -> None:
        self.tile = tile
        self.num_programs = num_programs
        self.cuts = torch.zeros((num_programs + 1, CUT_FIELDS), dtype=torch.int32, device=device)
        self.entries = torch.zeros((max_entries + 1, ENTRY_FIELDS), dtype=torch.int32, device=device)
        """The listed ones, packed; one more is loaded, and not used, behind the last."""
        self.arrivals = torch.zeros(num_programs + 1, dtype=torch.int32, device=device)
        """How many parts of a shared unit are there, by the unit's first cut. Every layer adds the number of its parts,
        so that it is a multiple of that number between two launches."""


class AttentionTasks:
    """The division of one step's attention, for all layers of one window. Made anew by `plan`, in place."""

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
    ) -> None:
        """Where several windows share `scratch`, their `tiles` are the same. `dtype` is that of queries and cache."""
        assert num_heads % num_kv_heads == 0
        assert max_tokens * num_kv_heads < 2**31, "units are numbered by an int32"
        assert window is None or window >= 1
        self.tiles = tiles or choose_tiles(num_heads, num_kv_heads, head_dim, dtype)
        for tile in (self.tiles.narrow, self.tiles.middle, self.tiles.wide):
            assert tile.rows >= num_heads // num_kv_heads, "a tile holds less than one token"
            assert tile.min_tiles >= 2, "two cuts would fall on one tile"
        self.scratch = scratch or Scratch(self.tiles, head_dim, device)
        self.max_entries = max_entries
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.window = window
        num = num_multiprocessors(device)
        self.narrow, self.middle, self.wide = (
            TaskList(tile, num * tile.programs, max_entries, device)
            for tile in (self.tiles.narrow, self.tiles.middle, self.tiles.wide)
        )
        self.lists = [self.narrow]
        """Those of the step that was planned last."""

    @property
    def group(self) -> int:
        """Query heads of a key-value head."""
        return self.num_heads // self.num_kv_heads

    def tokens_of(self, tile: Tile) -> int:
        """Tokens of one query block."""
        return tile.rows // self.group

    def plan(self, step: StepArrays, *, one_each: bool = False) -> None:
        """Divide the step. Once a step, before the first layer; one launch for each of its lists. With `one_each` no
        entry has more than one token."""
        assert step.num_entries <= self.max_entries, f"{step.num_entries} entries in a step, {self.max_entries} at most"
        self.lists = [self.narrow]
        if not one_each:
            self.lists.append(self.middle)
            if step.num_tokens > NO_CHUNKS:
                self.lists.append(self.wide)
        mosts = [self.tokens_of(self.narrow.tile), 2 * self.tokens_of(self.middle.tile)]
        least = 1
        for tasks, most in zip(self.lists, [*mosts[: len(self.lists) - 1], _ANY_COUNT], strict=True):
            self._plan_list(tasks, step, least, most)
            least = most + 1

    def _plan_list(self, tasks: TaskList, step: StepArrays, least: int, most: int) -> None:
        """Of the entries with at least and at most so many tokens."""
        tile = tasks.tile
        plan_kernel[(max(tasks.num_programs + 1, step.num_entries),)](
            tasks.cuts,
            tasks.entries,
            tasks.arrivals,
            step.rows,
            step.starts,
            step.counts,
            step.offsets,
            step.num_entries,
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
    """Keys and values of one layer lie as kernels expect: [num_blocks, K, BLOCK_SIZE, D] each, without gaps."""
    assert keys.shape == values.shape and keys.dtype == values.dtype
    assert keys.shape[1:] == (tasks.num_kv_heads, BLOCK_SIZE, tasks.head_dim), keys.shape
    assert keys.is_contiguous() and values.is_contiguous()
