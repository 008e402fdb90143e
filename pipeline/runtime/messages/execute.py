"""Messages that execute receives."""

import msgspec
from msgspec import Raw

from pipeline.runtime.messages.common import Adapters, ExpectGrammars, Message, Ping, Release, Start, Stop
from pipeline.runtime.messages.restarts import PeerRestarted
from pipeline.shm.arrays import Array


class RowAdd(msgspec.Struct, array_like=True, frozen=True):
    """A sequence takes a row."""

    row: int
    generation: int
    index: int
    """The sequence's index among the request's n; part of its noise key."""
    ids: Array
    """int32; every id known so far: the prompt, and outputs if the sequence was preempted"""
    num_prompt: int
    blocks: Array
    """int32; its block table so far"""
    options: Raw
    """`GenerationOptions`"""
    request_id: int = 0
    """Only for traces."""
    fork_of: int = -1
    """A running row of the same request with the same first `num_prompt` ids: `ids` then has only those that
    follow."""
    group_blocks: list[Array] = []
    """int32; the block tables of the KV groups after the first; `blocks` is that of the first"""
    first_blocks: list[int] = []
    """For each KV group, the place of the first block in its table: no step reads those before it. Empty: 0 for
    all."""
    grids: list[list[int]] = []
    """Of each image of the prompt: its first position, and its grid (`MediaItem.grid`)."""


NUM_PARTS = 1 << 16
"""Of the work on a media item. The executor ends where it can, at the end of these parts or before."""


class EncodeJob(msgspec.Struct, array_like=True, frozen=True):
    """A media item to encode (`MediaItem`), or parts of the work on it: several steps may encode it, all before it is
    read. Until the last of them, no step encodes another one; a first part drops what others have begun."""

    key: bytes
    slots: Array
    """int32 [num_rows]; the rows of the encoder cache that it writes"""
    grid: list[int]
    pixels: Array
    """uint8; none behind the first part"""
    request_id: int = 0
    """Only for traces."""
    shape: list[int] = []
    """Of the pixels."""
    first_part: int = 0
    end_part: int = NUM_PARTS


class Step(Message, frozen=True, tag="step"):
    """One step, as changes to the executor's rows: drop, add, append, copy, encode, compute, in this order.

    Copies are of whole blocks, with all layers, in the order of the list: a block that was copied from can be copied
    to by a later one. Ids from `ExecuteFacts.num_blocks` on are blocks of the swap segment. Copies read what earlier
    steps wrote and nothing that this step computes.

    Entry i computes positions `starts[i] .. starts[i] + counts[i]` of `rows[i]`. A row that the executor has ended is
    skipped: it writes no KV and emits no id. Entries that sample write their id to the row at `starts + counts`.
    All KV of a step is written, layer by layer, before any attention of that layer reads it, so that a row may
    start behind a prefix that another row of the same step computes.
    """

    incarnation: int
    step_id: int
    drops: Array
    """int32; rows that end"""
    adds: list[RowAdd]
    block_rows: Array
    """int32; parallel with `block_ids`: blocks appended to a row's table, in order"""
    block_ids: Array
    """int32"""
    rows: Array
    """int32; decode rows first"""
    starts: Array
    """int32"""
    counts: Array
    """int32"""
    samples: Array
    """uint8; 1 if the last computed position is the row's last id, so that the next id is sampled"""
    copy_sources: Array = b""
    """int32; parallel with `copy_targets`"""
    copy_targets: Array = b""
    """int32"""
    block_groups: Array = b""
    """uint8; parallel with `block_ids`: their KV groups; empty: the first for all"""
    drafts: Array = b""
    """int32, parallel with `rows`: how many ids the executor may propose for the row and verify in this step. Only
    entries of one position that sample have any. The row's blocks hold the positions of the proposed ids, and no later
    step computes the row before this one's result is settled. Empty: none."""
    state_reads: Array = b""
    """int32, parallel with `rows`, of a model with recurrent layers: the slot with the state that the entry continues,
    which is that behind position `starts - 1`; -1: none, the entry starts at 0. Empty for other models."""
    state_writes: Array = b""
    """int32, parallel with `rows`: the slot for the state behind the entry's last position. It is the slot that the
    entry reads, or one that no entry of the step reads; no other entry writes it."""
    state_copy_sources: Array = b""
    """int32, parallel with `state_copy_targets`: slots to copy before the step computes, in the order of the list. Ids
    from the number of slots on are slots of swap space."""
    state_copy_targets: Array = b""
    """int32"""
    encodes: list[EncodeJob] = []
    """What to encode before anything is computed. Earlier steps may read the same rows of the encoder cache."""
    span_rows: Array = b""
    """int32, parallel with the next two: positions that the step computes whose embeddings are rows of the encoder
    cache, as `span_starts .. span_starts + span_counts` of `span_rows`; by row in the order of its positions."""
    span_starts: Array = b""
    """int32"""
    span_counts: Array = b""
    """int32"""
    span_slots: Array = b""
    """int32; of all these positions, one after the other, the row of the encoder cache"""


class UseAdapters(Message, frozen=True, tag="use_adapters"):
    """The LoRA adapters of running and waiting sequences. The executor loads those that it lacks beside the steps, and
    keeps all of them until the next of these messages. It answers with `AdaptersLoaded` at once, and again whenever
    more of them are loaded. There is one unanswered at most."""

    incarnation: int
    number: int
    """Counts these messages of an incarnation."""
    adapter_ids: list[str]


class SaveKV(Message, frozen=True, tag="save_kv"):
    """The server is going to sleep: save these for the next executor, in `Launch.saved_kv_fd`. No step is in flight,
    and none follows. Each rank tells the supervisor (`KVSaved`)."""

    number: int
    """Of the `FallAsleep`."""
    blocks: Array
    """int32: KV blocks"""
    slots: Array
    """int32: slots of recurrent states"""


ExecuteInbox = Step | Release | Adapters | PeerRestarted | Start | Ping | Stop | UseAdapters | SaveKV | ExpectGrammars
