"""The GPU memory that is needed besides weights and KV blocks."""

from pipeline.config.sections.speculative import max_num_drafts
from pipeline.config.settings import Settings
from pipeline.errors import UserError
from pipeline.kernels.step_inputs import BLOCK_SIZE
from pipeline.kernels.triton.rows import NUM_FIELDS
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.stages.execute.cuda.host_transfer import NUM_STAGING_BUFFERS, PACKED_BYTES
from pipeline.stages.execute.cuda.rows.device_rows import LIST_MEMORY_WORDS
from pipeline.stages.execute.cuda.rows.staging import NUM_SLOTS
from pipeline.stages.execute.drafts.eagle import MAX_PENDING, MAX_SHARED
from pipeline.stages.execute.kv import layout_of

GRAPHS_BYTES = 512 * 1024**2
"""Graphs, and libraries' memory during capture. An estimate from CUDA's allocator rules; graphs are hardly a tenth."""


def reserved_bytes(settings: Settings, config: ModelConfig) -> int:
    """Bytes of GPU memory to keep free beside the KV blocks: rows, lists, staging buffers for copies, graphs."""
    max_model_len = config.longest_sequence(settings.max_model_len)
    num_groups = len(layout_of(settings, config).groups)
    table_words = num_groups * (max_model_len // BLOCK_SIZE)
    row_words = max_model_len + table_words + NUM_FIELDS + settings.limits.max_stop_token_ids
    rows_bytes = 4 * (settings.schedule.max_num_seqs + 1) * row_words
    # Copies of the logits for logprobs, token counts for penalties, and grammar masks.
    max_num_seqs = settings.schedule.max_num_seqs
    max_num_samples = max_num_seqs + max_num_drafts(settings.speculative, max_num_seqs)
    sampling_extras_bytes = max_num_samples * (2 * 4 * config.vocab_size + config.vocab_size // 8)
    # Hidden states for the proposer, of the steps in flight and of rows that wait for proposals.
    num_states = NUM_SLOTS * settings.schedule.max_step_tokens + MAX_SHARED * MAX_PENDING * max_num_seqs
    proposer_bytes = 4 * num_states * config.hidden_size if settings.speculative.method == "eagle" else 0
    pooled_bytes = 4 * settings.schedule.max_step_tokens * config.hidden_size
    angles_bytes = 4 * max_model_len * config.head_dim
    return (
        rows_bytes
        + sampling_extras_bytes
        + pooled_bytes
        + proposer_bytes
        + angles_bytes
        + 4 * LIST_MEMORY_WORDS
        + NUM_STAGING_BUFFERS * PACKED_BYTES
        + GRAPHS_BYTES
    )


def require_row_memory(max_num_seqs: int, max_model_len: int, max_num_stops: int, num_groups: int = 1) -> None:
    """Offsets in the memory of rows are int32. Raises UserError if it exceeds them."""
    row_words = max_model_len - num_groups * (-max_model_len // BLOCK_SIZE) + NUM_FIELDS + max_num_stops
    most = (2**31 - 1 - LIST_MEMORY_WORDS) // row_words - 1  # one is the padding row
    if max_num_seqs > most:
        raise UserError(
            f"schedule.max_num_seqs is {max_num_seqs}, but the limit on a GPU is {most} sequences of "
            f"{max_model_len} tokens: lower schedule.max_num_seqs or max_model_len"
        )
