"""Buckets of batch sizes: steps are counted by the number of rows that they decode."""

BATCH_SIZE_BUCKETS = ("1", "2-4", "5-16", "17-64", "65-256", "257-1024", "1025-4096", "prompts")
"""Numbers of rows, for steps that only decode; `prompts` is for all steps that compute a part of a prompt."""


def bucket_of(num_rows: int, num_tokens: int) -> int:
    """The index into `BATCH_SIZE_BUCKETS` of a step that samples for `num_rows` rows (at least 1) and computes
    `num_tokens` positions. All rows decode if the two are equal."""
    if num_tokens != num_rows:
        return len(BATCH_SIZE_BUCKETS) - 1
    return min(((num_rows - 1).bit_length() + 1) // 2, len(BATCH_SIZE_BUCKETS) - 2)
