"""Rows in the GPU's memory: what it knows of each running sequence, and the step that is computed over them.

The host sends changes; what a step samples is written here by the step itself, so that the next can be launched before
the host has seen it.

Shapes: R rows, of which the last is nobody's and stands for padding; L max_model_len; B blocks of the longest row;
N entries of a step, T its tokens, S its samples, all with padding.
"""

from dataclasses import dataclass
from enum import IntEnum

from torch import Tensor


class Field(IntEnum):
    """Columns of `RowState.params`. Those that are called float or u64 hold its bits."""

    NUM_IDS = 0
    """Ids known: the prompt's and those drawn. Changed by the GPU."""
    ENDED = 1
    """1: a step computes nothing for the row. Changed by the GPU."""
    NUM_PROMPT = 2
    NUM_STOPS = 3
    """Ids in `RowState.stops` that end the row."""
    TEMPERATURE = 4
    """float32; below GREEDY_BELOW (kernels/sampling_inputs.py) is greedy"""
    TOP_P = 5
    """float32 in (0, 1]; 1 is off"""
    MIN_P = 6
    """float32 in [0, 1]; 0 is off"""
    TOP_K = 7
    """0 is off; at most the size of the vocabulary"""
    KEY_LOW = 8
    KEY_HIGH = 9
    """u64, the sequence's noise key (kernels/noise.py); a draw's key is made of it and NUM_IDS."""
    HAS_LOGITS_PROCESSORS = 10
    """1: some of what follows is to be read; see kernels/logits_processors.py for its meanings."""
    REPETITION = 11
    """float32; 1 is off"""
    PRESENCE = 12
    """float32; 0 is off"""
    FREQUENCY = 13
    """float32; 0 is off"""
    MIN_TOKENS = 14
    ENDERS_AT = 15
    """Where in the heap of lists its `enders` begin; likewise"""
    NUM_ENDERS = 16
    BIAS_AT = 17
    """Ids, and behind all of them as many float32."""
    NUM_BIAS = 18
    RUNS_AT = 19
    """As `LogitsProcessors.runs`."""
    NUM_RUNS = 20
    ALLOWED_AT = 21
    """Words of a mask; -1 where all are allowed."""
    NUM_TOP = 22
    """Of the records of its ids; -1 has none."""


NUM_FIELDS = 24
"""Columns of `RowState.params`: a whole number of 32 bytes."""


@dataclass(frozen=True, slots=True)
class RowState:
    """Views of one piece of memory, all int32."""

    state: Tensor
    """All of it, one-dimensional: changes are numbers that go to places of it."""
    params: Tensor
    """[R, NUM_FIELDS]"""
    ids: Tensor
    """[R, L]"""
    blocks: Tensor
    """[R, B]; KV blocks of each row, of which those that hold its tokens are valid"""
    stops: Tensor
    """[R, most stop ids]; the first NUM_STOPS of each row are valid"""


@dataclass(frozen=True, slots=True)
class StepArrays:
    """One step as the model's kernels read it, filled on the GPU from `RowState` and from what the host has sent.

    Entry i computes tokens `offsets[i] .. offsets[i] + counts[i]` of the batch, which are positions `starts[i] ..
    starts[i] + counts[i]` of row `rows[i]`. Entries whose row has ended, and padding, have a count of 0.
    """

    rows: Tensor
    """[N] int32; padding names the last row"""
    starts: Tensor
    """[N] int32; likewise"""
    counts: Tensor
    offsets: Tensor
    ids: Tensor
    """[T] int32; 0 for tokens that are computed for nobody"""
    positions: Tensor
    """[T] int32; likewise"""
    slots: Tensor
    """[T] int64; block x BLOCK_SIZE + place in the block, -1 for tokens that are computed for nobody"""
    sampled: Tensor
    """[S] int32; the token whose logits are wanted, 0 for padding"""
    sample_rows: Tensor
    """[S] int32; its row, the last for padding"""
    blocks: Tensor
    """`RowState.blocks`"""

    @property
    def num_entries(self) -> int:
        return len(self.rows)

    @property
    def num_tokens(self) -> int:
        return len(self.ids)

    @property
    def num_samples(self) -> int:
        return len(self.sampled)
