"""What the steps of a row need, or bring, besides one id for each: one word of flags per row. The planner's paths ask
this word, and nothing else about features.

    plan          looks at each row, when the last result is settled                           handles all flags
    plan ahead    the same, before the oldest result in flight is settled                      handles AHEAD
    decode run    the last step again, each row one position further; results and output too   handles DECODE_RUN

The word is made when a sequence gets a row, and stays the same until it leaves it, but for PACED. A fast path names the
flags that it handles, and is not taken while a row has any other. So a new feature with a flag of its own takes the
slow path, until someone has read the fast ones and added it there.
`tests/stages/schedule/test_paths.py` runs each feature on each path.
"""

from enum import IntEnum

from pipeline.stages.schedule.request import Sequence
from pipeline.stages.schedule.scheduler_config import SchedulerConfig


class RowFlag(IntEnum):
    """Each is a bit. (Not an IntFlag: its operators take longer than all else that a repeated step does with them.)"""

    BEAM = 1
    """A beam search chooses its next id when all its beams are settled, and may replace the ids before it
    (samples/beams.py). Until then nothing is sent."""
    DRAFTS = 2
    """The executor may propose ids: the result says how many positions a step has computed."""
    LOGPROBS = 4
    """Results bring logprob records, of the output or of the prompt."""
    PREDICTION = 8
    """The client gave a predicted output: what comes of proposed ids is counted for it."""
    FULL_PREFILL = 16
    """The prompt is computed whole, without prefix cache and swap space."""
    KV_GROUPS = 32
    """There are several KV groups or a window: blocks are released while the row runs, and a step may need several."""
    OFFLOAD = 64
    """Full blocks are copied to swap space, by the next step."""
    PIPELINED = 128
    """The executor is a pipeline: its first stage does not have the row's last id before a later step."""
    STATE = 256
    """The model has recurrent layers: each entry of a step names the slots of its states."""
    PACED = 512
    """Masks of the row's grammar were slow: it runs in turns with others (policies/mask_turns.py)."""

    MEDIA = 1024
    """The prompt has media items: steps of its positions read the encoder cache (media/spans.py)."""


AHEAD = (
    RowFlag.LOGPROBS
    | RowFlag.PREDICTION
    | RowFlag.FULL_PREFILL
    | RowFlag.KV_GROUPS
    | RowFlag.OFFLOAD
    | RowFlag.PIPELINED
    | RowFlag.STATE
    | RowFlag.MEDIA
)
"""What a plan before settling handles: it needs the number of a row's ids, not the ids. A step's word has DRAFTS only
if ids may be proposed in it."""

DECODE_RUN = RowFlag.PREDICTION | RowFlag.FULL_PREFILL | RowFlag.MEDIA
"""What a decode run handles. Without DRAFTS, there is nothing to count for a predicted output. Rows that decode have
computed their media items."""


def may_plan_ahead(flags: int) -> bool:
    """Whether the step after one whose rows have these flags may be planned before its result is settled."""
    return not flags & ~AHEAD


def may_repeat(flags: int) -> bool:
    """Whether rows with these flags may be in a decode run."""
    return not flags & ~DECODE_RUN


def flags_of_all(config: SchedulerConfig) -> int:
    """The flags that every row has with this configuration, if it is no beam."""
    flags = 0
    if config.num_speculative_tokens:
        flags |= RowFlag.DRAFTS
    if len(config.kv_groups) > 1 or any(group.window for group in config.kv_groups):
        flags |= RowFlag.KV_GROUPS
    if config.offloads:
        flags |= RowFlag.OFFLOAD
    if config.num_stages > 1:
        flags |= RowFlag.PIPELINED
    if config.states.num_slots:
        flags |= RowFlag.STATE
    return flags


def flags_of(sequence: Sequence, of_all: int) -> int:
    """The word of a row with this sequence; `of_all` are the flags of all rows."""
    request, flags = sequence.request, of_all
    if request.beam_search is not None:
        flags = (flags | RowFlag.BEAM) & ~RowFlag.DRAFTS
    if sequence.is_recorded:
        flags |= RowFlag.LOGPROBS
    if request.options.predicted_ids:
        flags |= RowFlag.PREDICTION
    if request.needs_full_prefill:
        flags |= RowFlag.FULL_PREFILL
    if sequence.is_paced:
        flags |= RowFlag.PACED
    if request.media is not None:
        flags |= RowFlag.MEDIA
    return flags
