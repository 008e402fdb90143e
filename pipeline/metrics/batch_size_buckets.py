"""Classes of steps by how much they compute, for what is counted of each."""

BATCHES = ("1", "2-4", "5-16", "17-64", "65-256", "257-1024", "1025-4096", "prompts")
"""Steps in which so many rows decode and nothing else is computed; and those with a part of a prompt."""


def batch_of(num_rows: int, num_tokens: int) -> int:
    """The place in `BATCHES` of a step that samples for `num_rows` rows, one at least, and computes `num_tokens`
    positions. All rows decode where the two are the same."""
    if num_tokens != num_rows:
        return len(BATCHES) - 1
    return min(((num_rows - 1).bit_length() + 1) // 2, len(BATCHES) - 2)
