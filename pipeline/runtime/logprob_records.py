"""Records: what the executor tells of an id besides the id. Schedule passes them on as bytes of a known width.

    log probabilities   float32 logprob · num_top × int32 ids · num_top × float32 logprobs
    embedding           hidden_size × float32

All are little-endian. `logprob` is the natural logarithm of the id's probability by the softmax of the model's logits
as they are, without temperature, filter, penalty or mask. The `num_top` likeliest ids come likeliest first, of equal
ones the lowest first, whether the id itself is among them or not.
"""

from typing import Any

import numpy as np

RecordArray = np.ndarray[Any, np.dtype[np.void]]


def logprob_bytes(num_top: int) -> int:
    """Bytes of a record of log probabilities."""
    return 4 + 8 * num_top


def logprob_dtype(num_top: int) -> "np.dtype[np.void]":
    """Its fields: `logprob`, and `top_ids` [num_top] and `top_logprobs` [num_top]."""
    return np.dtype([("logprob", "<f4"), ("top_ids", "<i4", (num_top,)), ("top_logprobs", "<f4", (num_top,))])


def embedding_bytes(hidden_size: int) -> int:
    """Bytes of an embedding."""
    return 4 * hidden_size
