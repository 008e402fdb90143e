"""Gathers rows of a table: for the embedding, and for the tokens to compute logits for."""

import torch
from torch import Tensor


def take_rows(out: Tensor, table: Tensor, index: Tensor) -> None:
    """`out[i] = table[index[i]]`. out [N, H] of any dtype, table [R, H], index [N] int64."""
    out.copy_(torch.index_select(table, 0, index))


def take_known_rows(out: Tensor, table: Tensor, index: Tensor) -> None:
    """`take_rows` where no index is negative; the other rows of `out` have no meaning."""
    take_rows(out, table, index.clamp(min=0))


def put_encoded_rows(out: Tensor, encoded: Tensor, index: Tensor) -> None:
    """`out[i] = encoded[~index[i]]` where the index is negative. out and encoded [R, H] float32."""
    is_encoded = index < 0
    if bool(is_encoded.any()):
        out[is_encoded] = torch.index_select(encoded, 0, ~index[is_encoded])


def add_encoded_rows(out: Tensor, encoded: Tensor, index: Tensor) -> None:
    """`out[i] += encoded[~index[i]]` where the index is negative. out and encoded [R, H] float32."""
    is_encoded = index < 0
    if bool(is_encoded.any()):
        out[is_encoded] += torch.index_select(encoded, 0, ~index[is_encoded])


def take_rows_reference(table: Tensor, index: Tensor) -> Tensor:
    """The same, a row at a time."""
    return torch.stack([table[int(i)] for i in index])
