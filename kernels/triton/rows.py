"""Rows in GPU memory: the state of each running sequence, and the arrays of the step that is computed over them.

The host sends changes. A step itself writes the ids that it samples, so the next step can be launched before the host
has seen them.

Shapes: R rows, the last one for padding; L max_model_len; B blocks of the longest row; N entries of a step, T its
tokens, S its samples, all with padding.
"""

from dataclasses import dataclass
from enum import IntEnum

from torch import Tensor


class Field(IntEnum):
    """Columns of `RowState.params`. Those of type float32 or u64 hold its bits."""

    NUM_IDS = 0
    """Number of known ids: the prompt's and the sampled ones. Changed by the GPU."""
    ENDED = 1
    """1: a step computes nothing for the row. Changed by the GPU."""
    NUM_PROMPT = 2
    NUM_STOPS = 3
    """Number of ids in `RowState.stops`."""
    TEMPERATURE = 4
    """float32; below GREEDY_BELOW (kernels/sampling/sampling_inputs.py) is greedy"""
    TOP_P = 5
    """float32 in (0, 1]; 1 is off"""
    MIN_P = 6
    """float32 in [0, 1]; 0 is off"""
    TOP_K = 7
    """0 is off; at most the vocabulary size"""
    KEY_LOW = 8
    KEY_HIGH = 9
    """u64, the sequence's noise key (kernels/sampling/noise_keys.py); a sample's key is derived from it and
    `num_known`."""
    HAS_LOGITS_PROCESSORS = 10
    """1: the fields below are read; kernels/sampling/logits_processors.py defines them."""
    REPETITION = 11
    """float32; 1 is off"""
    PRESENCE = 12
    """float32; 0 is off"""
    FREQUENCY = 13
    """float32; 0 is off"""
    MIN_TOKENS = 14
    ENDERS_AT = 15
    """Offset of the `enders` in the list memory; likewise for the lists below"""
    NUM_ENDERS = 16
    BIAS_AT = 17
    """Ids, followed by as many float32."""
    NUM_BIAS = 18
    RUNS_AT = 19
    """The format is that of `LogitsProcessors.runs`."""
    NUM_RUNS = 20
    ALLOWED_AT = 21
    """Words of a mask; -1 if all ids are allowed."""
    NUM_TOP = 22
    """Number of top logprobs; -1 for no logprobs."""
    ADAPTER = 23
    """The slot of the row's LoRA adapter, plus 1; 0 for none."""


NUM_FIELDS = 24
"""Columns of `RowState.params`, a multiple of 32 bytes."""


@dataclass(frozen=True, slots=True)
class RowState:
    """Views of one allocation, all int32."""

    state: Tensor
    """The whole allocation, one-dimensional; changes name offsets in it."""
    params: Tensor
    """[R, NUM_FIELDS]"""
    ids: Tensor
    """[R, L]"""
    blocks: Tensor
    """[R, KV groups x B]; KV blocks of each row: the table of each group, one after the other. Those that hold its
    tokens are valid"""
    stops: Tensor
    """[R, max_num_stops]; the first NUM_STOPS of each row are valid"""


@dataclass(frozen=True, slots=True)
class StepArrays:
    """The arrays of one step for the model's kernels, filled on the GPU from `RowState` and the host's words.

    Entry i computes tokens `offsets[i] .. offsets[i] + counts[i]` of the batch, which are positions `starts[i] ..
    starts[i] + counts[i]` of row `rows[i]`. Entries whose row has ended, and padding, have a count of 0.
    """

    rows: Tensor
    """[N] int32; the last row for padding"""
    starts: Tensor
    """[N] int32; likewise"""
    counts: Tensor
    offsets: Tensor
    ids: Tensor
    """[T] int32; 0 for padding and ended rows"""
    positions: Tensor
    """[T] int32; likewise"""
    slots: Tensor
    """[T] int64; block x BLOCK_SIZE + offset in the block, -1 for padding and ended rows"""
    sampled: Tensor
    """[S] int32; the token to compute logits for, 0 for padding"""
    sample_rows: Tensor
    """[S] int32; its row, the last for padding"""
    num_known: Tensor
    """[S] int32; number of the row's ids up to that token: the id that is sampled follows them. 0 for padding"""
    blocks: Tensor
    """[R, B], of `RowState.blocks`: the tables of the first KV group"""
    adapters: Tensor | None = None
    """[T] int32; the slot of each token's LoRA adapter, -1 for none. None if no token has one"""
    key_ends: Tensor | None = None
    """[T] int32; the first key that each token does not see, as in `StepInputs`. None: its position + 1"""
    others: "tuple[StepArrays, ...]" = ()
    """The same step for the other KV groups: only `slots` and `blocks` differ. Their slots are equally far apart."""

    def of_group(self, group: int) -> "StepArrays":
        """The step with the slots and tables of a KV group."""
        return self.others[group - 1] if group else self

    @property
    def num_entries(self) -> int:
        return len(self.rows)

    @property
    def num_tokens(self) -> int:
        return len(self.ids)

    @property
    def num_samples(self) -> int:
        return len(self.sampled)
