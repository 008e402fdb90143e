"""Gathers rows of a table: for the embedding, and for the tokens to compute logits for."""

import torch
from torch import Tensor


def take_rows(out: Tensor, table: Tensor, index: Tensor) -> None:
    """`out[i] = table[index[i]]`. out [N, H] of any dtype, table [R, H], index [N] int64."""
    out.copy_(torch.index_select(table, 0, index))


def take_rows_reference(table: Tensor, index: Tensor) -> Tensor:
    """The same, a row at a time."""
    return torch.stack([table[int(i)] for i in index])
