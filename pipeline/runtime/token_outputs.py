"""The layout of token outputs, which the executor returns besides ids. Schedule forwards them as bytes of fixed
width.

    log probabilities   float32 logprob · num_top × int32 ids · num_top × float32 logprobs
    embedding, logits   hidden_size × float32; with `Pooling.ALL`, as many for each id of the prompt

All values are little-endian. `logprob` is the natural logarithm of the id's probability: the softmax of the model's
logits before temperature, filters, penalties and masks. The `num_top` likeliest ids are sorted by probability, then by
id. They may include the id itself.
"""

import numpy as np

from pipeline.runtime.messages import GenerationOptions, Pooling


def token_output_bytes(options: GenerationOptions, hidden_size: int, num_prompt: int = 1) -> int:
    """Bytes of the token output of each output id; 0: no token outputs. `hidden_size` is that of `ExecuteFacts`,
    `num_prompt` the number of prompt ids."""
    if options.pooling != Pooling.NONE:
        return embedding_bytes(hidden_size) * (num_prompt if options.pooling == Pooling.ALL else 1)
    return logprob_bytes(options.num_logprobs) if options.num_logprobs >= 0 else 0


def prompt_logprob_bytes(options: GenerationOptions) -> int:
    """Bytes of the token output of each prompt id but the first; 0: no token outputs. The first of n sequences has
    them."""
    return logprob_bytes(options.num_prompt_logprobs) if options.num_prompt_logprobs >= 0 else 0


def logprob_bytes(num_top: int) -> int:
    """Bytes of one token output of log probabilities."""
    return 4 + 8 * num_top


def logprob_dtype(num_top: int) -> "np.dtype[np.void]":
    """Its dtype, with the fields `logprob`, `top_ids` [num_top] and `top_logprobs` [num_top]."""
    return np.dtype([("logprob", "<f4"), ("top_ids", "<i4", (num_top,)), ("top_logprobs", "<f4", (num_top,))])


def embedding_bytes(hidden_size: int) -> int:
    """Bytes of an embedding, or of a prompt's logits."""
    return 4 * hidden_size
