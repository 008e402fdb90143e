"""The scheduler's state of a prompt request and of its sequences."""

from collections.abc import Mapping

import msgspec
import numpy as np
from msgspec import Raw

from pipeline.runtime.messages import DraftCounts, Finish, FirstTimes, GenerationOptions, Pooling
from pipeline.stages.schedule.arrays import Ids
from pipeline.stages.schedule.kv_cache import prefix
from pipeline.stages.schedule.kv_cache.swap import Swapped
from pipeline.stages.schedule.media.request_media import RequestMedia
from pipeline.stages.schedule.samples.beam_search import BeamSearch

Order = tuple[int, float, int]
"""Rank, arrival and `seq`: the order in which sequences are served."""

NO_ROW = -1
NO_REPLICA = -1


class RequestState(msgspec.Struct, eq=False):
    """One prompt, for which `options.n` sequences are generated."""

    request_id: int
    attempt: int
    gateway: int
    arrival_s: float
    prompt: Ids
    options: GenerationOptions
    raw_options: Raw
    """The same, encoded, for other stages."""
    open_sequences: dict[int, "Sequence"] = {}
    """By index: sequences that have not finished."""
    sequences: list["Sequence"] = []
    """All of them, until the request is closed: a successor of detokenize receives their output again."""
    queued_s: float = 0.0
    """When it was admitted, by time.monotonic()."""
    root: bytes = prefix.ROOT
    """The root of its prefix keys."""
    keys: list[bytes] = []
    """Prefix keys of the prompt's full blocks, if n > 1: parallel samples share them."""
    token_output_bytes: int = 0
    """Bytes of the executor's token output of each output id; 0 without token outputs."""
    prompt_logprob_bytes: int = 0
    """Bytes of the token output of each prompt id but the first; its first sequence gets them."""
    num_known_prompt_logprobs: int = 0
    """Prompt logprobs received so far."""
    beam_search: BeamSearch | None = None
    cut_positions: list[int] = []
    """Those of `Admit`: a snapshot of the state is made at the block before each, if it is not close to another one."""
    row_options: Raw = Raw()
    """Options for the executor's rows: those of a beam search have others."""
    scope_id: str = ""
    """Whose request it is; empty without API keys."""
    media: RequestMedia | None = None
    extras: Mapping[int, bytes] = prefix.NO_EXTRAS
    """What the KV of its blocks depends on besides ids, by index of the block."""

    @property
    def row_token_output_bytes(self) -> int:
        """Bytes of the executor's token output of each sampled id; 0 without token outputs."""
        return self.token_output_bytes if self.beam_search is None else self.beam_search.token_output_bytes

    @property
    def is_pooled(self) -> bool:
        """Whether all its output is what the model's pooler makes of the prompt: there is no text."""
        return self.options.pooling != Pooling.NONE and self.options.max_tokens == 1

    @property
    def grids(self) -> list[list[int]]:
        """As in `RowAdd`."""
        return [] if self.media is None else self.media.grids

    @property
    def n(self) -> int:
        return self.options.n

    @property
    def priority(self) -> int:
        return self.options.priority

    @property
    def adapter_id(self) -> str:
        return self.options.adapter_id

    @property
    def needs_full_prefill(self) -> bool:
        return self.options.needs_full_prefill


class Sequence(msgspec.Struct, eq=False):
    """One sample of a request. While it runs, its ids are in its row and `ids` is empty."""

    seq: int
    request: RequestState
    index: int
    ids: Ids
    """int32: the settled ids, prompt and output."""
    max_num_tokens: int
    """Number of ids at which it finishes with `length`."""
    order: Order
    """Lower goes first and is preempted last."""
    detokenize: int = 0
    """The replica of detokenize that gets its output; NO_REPLICA if none does, because it is pooled."""
    row: int = NO_ROW
    keys: list[bytes] = []
    """Prefix keys of its full blocks, computed on demand."""
    swapped: Swapped | None = None
    """Its KV in swap space, if it was swapped out."""
    offloaded: list[list[int]] = []
    """Swap blocks with copies of its first blocks that it still holds, for each KV group, while it runs."""
    num_preemptions: int = 0
    is_paced: bool = False
    """Masks of its grammar were slow lately (policies/mask_turns.py)."""
    num_quick_masks: int = 0
    """Since it is paced."""
    last_mask_turn: int = 0
    is_long: bool = False
    """Whether it waits in the queue of long prompts."""
    num_skipped: int = 0
    """How often a later sequence started first while it waited."""
    started_s: float = 0.0
    """When its first step was planned; 0 before that."""
    first_s: float = 0.0
    """When its first sampled id was settled; 0 before that."""
    finish: Finish = Finish.NONE
    ended_by_text: bool = False
    """It finished because detokenize found a stop string."""
    num_resumed_tokens: int = 0
    """Ids at admission: the prompt, and output that the client already has."""
    resumed_finish: Finish = Finish.NONE
    """How the ids at admission end it, if they do."""
    resumed_outputs: Ids = msgspec.field(default_factory=lambda: np.zeros(0, np.int32))
    """Output at admission, if it is computed again from the prompt: that of a beam search."""
    token_outputs: bytearray = msgspec.field(default_factory=bytearray)
    """Token outputs of settled ids, without those at admission."""
    num_token_output_bytes_sent: int = 0
    """How much of these was sent to detokenize."""
    prompt_logprobs: bytearray = msgspec.field(default_factory=bytearray)
    """Logprobs of the prompt that were passed on."""
    error: str = ""
    """The reason, if it finished with `error`."""
    num_computed_prompt: int = 0
    """Prompt ids that were computed when it left its row, or before it came with output: what of them is not found when
    it starts again is computed a second time."""
    num_cached: int = 0
    """Prompt ids found in the prefix cache when it first started."""
    num_accepted_drafts: int = 0
    """Proposed ids that were right; counted for requests with a predicted output, like the next."""
    num_rejected_drafts: int = 0

    def extend_keys(self, ids: Ids, num_blocks: int, block_size: int) -> None:
        """Have `keys` for its first `num_blocks` full blocks. `ids` are its own, wherever they are."""
        if len(self.keys) < num_blocks:
            prefix.extend(self.keys, ids, num_blocks, block_size, self.request.root, self.request.extras)

    @property
    def swapped_by(self) -> int:
        """The step that copies it to swap space, if it is swapped out."""
        return 0 if self.swapped is None else self.swapped.step_id

    @property
    def row_index(self) -> int:
        """Its index for the executor. Beams draw no samples, so they are alike."""
        return 0 if self.request.beam_search is not None else self.index

    @property
    def prompt_logprob_bytes(self) -> int:
        return self.request.prompt_logprob_bytes if self.index == 0 else 0

    @property
    def unsent_token_outputs(self) -> bytes:
        return bytes(self.token_outputs[self.num_token_output_bytes_sent :])

    @property
    def is_recorded(self) -> bool:
        """Whether the executor returns token outputs of its output or of its prompt."""
        return self.request.row_token_output_bytes > 0 or self.prompt_logprob_bytes > 0

    @property
    def draft_counts(self) -> DraftCounts | None:
        """`index` is set when they are sent. None if nothing was counted."""
        if not (self.num_accepted_drafts or self.num_rejected_drafts):
            return None
        return DraftCounts(0, self.num_accepted_drafts, self.num_rejected_drafts)

    @property
    def first_times(self) -> FirstTimes:
        """`index` is set when they are sent."""
        return FirstTimes(0, self.request.queued_s, self.started_s, self.first_s, self.num_cached)
